"""What TRL's ``SFTTrainer`` leaves out by a plan, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig

from tensoropt.errors import PlanError
from tests.integrations.planned import write_plan

pytest.importorskip("trl", reason="the extra trl is not installed")

from tensoropt.integrations.trl import PlanSFTTrainer
from tests.integrations import sft_jobs as jobs


def test_the_metrics_of_logits_are_left_out_and_named(tmp_path):
    with pytest.warns(UserWarning, match="leaves out entropy and mean_token_accuracy.*only its loss"):
        made = jobs.trainer(tmp_path, write_plan(tmp_path, "alone", jobs.SOURCE), max_steps=1)
    made.train()
    names = {name for entry in made.state.log_history for name in entry}
    assert "num_tokens" in names
    assert not any("entropy" in name or "accuracy" in name for name in names)


# -- what is refused --------------------------------------------------------------------------------------


def refused(folder: Path, plan: str = "not read", **more: Any) -> str:
    """What is said of changed arguments; those of ``SFTTrainer`` itself begin with ``its_``."""
    its = {name.removeprefix("its_"): value for name, value in more.items() if name.startswith("its_")}
    args = jobs.arguments(folder, 1, **{n: v for n, v in more.items() if not n.startswith("its_")})
    passed = {"train_dataset": jobs.questions(8), "processing_class": jobs.tokenizer(), **its}
    with pytest.raises(PlanError) as error:
        PlanSFTTrainer(jobs.build(), args, plan=plan, **passed)
    return str(error.value)


@pytest.mark.parametrize(("change", "says"), [
    ({"bf16": None}, "explore with --dtype bfloat16, and pass bf16=False"),
    ({"gradient_checkpointing": True}, "recomputed, and pass gradient_checkpointing=False"),
    ({"padding_free": True}, "cannot follow padding_free=True: it joins the rows"),
    ({"packing": True}, "cannot follow packing=True: it joins the rows that the plan divides; pass"),
    ({"activation_offloading": True}, "kept for the backward pass"),
    ({"loss_type": "dft"}, "cannot follow loss_type='dft': the loss that was explored"),
    ({"chat_template_path": "other/model"}, "call trl.clone_chat_template before"),
    ({"its_peft_config": LoraConfig()}, "call get_peft_model before it is explored"),
    ({"its_compute_metrics": print}, "the loss, without logits"),
], ids=lambda value: "-".join(value) if isinstance(value, dict) else "")  # fmt: skip
def test_what_a_plan_cannot_do_is_refused(change, says, tmp_path):
    assert says in refused(tmp_path, **change)


def test_batches_of_other_lengths_and_other_inputs_are_refused(tmp_path):
    plan = write_plan(tmp_path, "alone", jobs.SOURCE)
    said = refused(tmp_path, plan, max_length=1024)
    assert "for sequences of 8 tokens, but max_length=1024 lets batches be longer; pass max_length=8" in said
    assert "pass per_device_train_batch_size=4" in refused(tmp_path, plan, per_device_train_batch_size=8)
    said = refused(tmp_path, write_plan(tmp_path, "alone"))
    assert "attention_mask, input_ids, labels, but the plan is for a call with input_ids, labels" in said
