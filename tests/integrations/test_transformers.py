"""Hugging Face's ``Trainer`` in one process: what it weighs, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import PreTrainedTokenizerFast, Trainer, default_data_collator

import tensoropt
from tensoropt.errors import PlanError
from tensoropt.integrations.transformers import PlanTrainer
from tests.integrations import trainer_jobs as jobs
from tests.integrations.planned import close, write_plan


@pytest.mark.parametrize("drop", [False, True])
def test_an_evaluation_weighs_its_last_batch_by_its_rows(drop, tmp_path):
    args, data = jobs.arguments(tmp_path, 1, dataloader_drop_last=drop), jobs.Samples(10)
    ours = PlanTrainer(jobs.build(), args, plan=write_plan(tmp_path, "alone"), eval_dataset=data)
    plain = Trainer(jobs.build(), args, eval_dataset=data)
    assert ours.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-5)
    args.per_device_eval_batch_size = 3  # any
    assert ours.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-5)


def test_a_batch_without_targets_adds_nothing_to_those_accumulated_with_it(tmp_path):
    data = [
        {name: row[name] for name in ("input_ids", "labels")}
        for row in map(jobs.Samples(16).__getitem__, range(16))
    ]
    for row in data[4:8]:
        row["labels"] = torch.full_like(row["labels"], -100)
    found = []
    for plan in (None, write_plan(tmp_path, "alone")):
        made = jobs.trainer(tmp_path, plan, data, max_steps=2, train_sampling_strategy="sequential")
        made.train()
        found.append(jobs.history(made))
    close(found[1], found[0])


def test_the_tokens_of_a_tokenizer_are_the_models_before_it_is_parallelized(tmp_path):
    words = Tokenizer(WordLevel({"<end>": 0, "<pad>": 1}, "<pad>"))
    tokens = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<pad>")
    args, plan = jobs.arguments(tmp_path, 1, max_steps=1), write_plan(tmp_path, "alone")
    data = {"train_dataset": jobs.Samples(8), "eval_dataset": jobs.Samples(4)}
    more = {"processing_class": tokens, "data_collator": default_data_collator}
    made = PlanTrainer(jobs.build(), args, plan=plan, **more, **data)
    made.train()
    assert made.model.config.pad_token_id == 1


# -- what is refused --------------------------------------------------------------------------------------


def refused(folder: Path, model: nn.Module | None = None, **more: Any) -> str:
    """What is said of changed arguments; those of ``Trainer`` itself begin with ``its_``."""
    args = jobs.arguments(folder, 1)
    its = {name.removeprefix("its_"): value for name, value in more.items() if name.startswith("its_")}
    for name, value in more.items():
        if name in ("split_batches", "dispatch_batches"):
            setattr(args.accelerator_config, name, value)
        elif not name.startswith("its_"):
            setattr(args, name, value)
    with pytest.raises(PlanError) as error:
        PlanTrainer(model or jobs.build(), args, plan="not read", **its)
    return str(error.value)


@pytest.mark.parametrize(("change", "says"), [
    ({"fp16": True}, "explore with --dtype bfloat16, and pass fp16=False"),
    ({"bf16": True}, "cannot follow bf16=True"),
    ({"bf16_full_eval": True}, "pass bf16_full_eval=False"),
    ({"fsdp": "full_shard"}, "the plan decides where the model's parameters are, and leave fsdp out"),
    ({"deepspeed": "zero3.json"}, "cannot follow deepspeed='zero3.json'"),
    ({"torch_compile": True}, "pass torch_compile=False"),
    ({"gradient_checkpointing": True}, "the plan decides which blocks are recomputed"),
    ({"neftune_noise_alpha": 5.0}, "hooks the model's embedding"),
    ({"label_smoothing_factor": 0.1}, "build it into the model"),
    ({"auto_find_batch_size": True}, "the plan is for one batch size"),
    ({"ddp_find_unused_parameters": True}, "a setting of DistributedDataParallel"),
    ({"save_on_each_node": True}, "use a folder that all nodes share"),
    ({"average_tokens_across_devices": False}, "is that of the global batch; leave it out"),
    ({"train_sampling_strategy": "group_by_length"}, "pass one of random, sequential"),
    ({"split_batches": True}, "leave split_batches out"),
    ({"its_compute_loss_func": print}, "takes no compute_loss_func"),
    ({"its_model_init": jobs.build}, "pass it as model"),
    ({"model": nn.Linear(2, 2)}, "save_pretrained, which Linear does not have"),
    ({"model": nn.DataParallel(jobs.build())}, "DataParallel wraps the model"),
], ids=lambda value: "-".join(value) if isinstance(value, dict) else "")  # fmt: skip
def test_what_a_plan_cannot_do_is_refused(change, says, tmp_path):
    assert says in refused(tmp_path, **change)


class FromLogits(PlanTrainer):
    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        return model(**inputs).logits.mean()


class WithoutLabels(PlanTrainer):
    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        inputs.pop("labels")
        return model(**inputs).logits.mean()


class Scaled(PlanTrainer):
    def compute_loss(self, *args: Any, **more: Any) -> Any:
        return 2 * super().compute_loss(*args, **more)


def test_a_loss_of_a_subclass(tmp_path):
    """Refused with the remedy if it needs more than the model's loss."""
    args, plan = jobs.arguments(tmp_path, 1, max_steps=1, eval_strategy="no"), write_plan(tmp_path, "alone")

    def trained(kind: type[PlanTrainer]) -> None:
        kind(jobs.build(), args, plan=plan, train_dataset=jobs.Samples(8)).train()

    trained(Scaled)
    for kind, says in ((FromLogits, "NoneType"), (WithoutLabels, "call with input_ids, labels")):
        with pytest.raises(PlanError, match=rf"{kind.__name__}.compute_loss failed .*{says}.*loss=function"):
            trained(kind)


def test_a_wrapper_around_a_parallelized_model_is_named(tmp_path):
    model = tensoropt.parallelize(jobs.build(), write_plan(tmp_path, "alone"), batch="share")
    with pytest.raises(PlanError, match=r"DataParallel wraps the parallelized model.*the bare module"):
        tensoropt.sampler(nn.DataParallel(model), range(8))


def test_what_accelerate_is_configured_for_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "EAGER")
    with pytest.raises(PlanError, match=r"configured for torch.compile, but the plan decides"):
        PlanTrainer(jobs.build(), jobs.arguments(tmp_path, 1), plan=write_plan(tmp_path, "alone"))


def test_a_batch_of_another_size_and_other_calls_are_refused(tmp_path):
    plan = write_plan(tmp_path, "alone")

    def made(rows: int = jobs.GLOBAL, train: Any = None, **more: Any) -> PlanTrainer:
        args = jobs.arguments(tmp_path, 1, per_device_train_batch_size=rows, **more)
        data = {"train_dataset": train or jobs.Samples(22), "eval_dataset": jobs.Samples(4)}
        return PlanTrainer(jobs.build(), args, plan=plan, **data)

    with pytest.raises(
        PlanError, match="among 1 data-parallel ranks, but per_device_train_batch_size=8; pass"
    ):
        made(8)
    trainer = made()
    (tmp_path / "checkpoint-7").mkdir()
    with pytest.raises(PlanError, match="PlanTrainer did not write it"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-7"))
    with pytest.raises(PlanError, match="is not parallelized"):
        PlanTrainer(jobs.build(), jobs.arguments(tmp_path, 1))
