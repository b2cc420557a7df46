"""Training by ``PlanSFTTrainer`` under torchrun (``sft_jobs.py WHAT FOLDER PLAN``), or by ``SFTTrainer``.

A plan's file ends with the number of shares of a batch.
"""

import os
from pathlib import Path
from typing import Any

os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"  # TRL reports what it trains

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import nn
from transformers import PreTrainedTokenizerFast
from transformers.trainer_utils import align_special_tokens
from trl import SFTConfig, SFTTrainer

import tensoropt
from tests.integrations import trainer_jobs
from tests.integrations.planned import take_part
from tests.integrations.trainer_jobs import LENGTH, STEPS, VOCABULARY, build, history, loss_of

SOURCE = "tests.integrations.sft_jobs:recipe"


def recipe() -> tuple[nn.Module, tuple[Any, ...], dict[str, torch.Tensor]]:
    model, args, kwargs = trainer_jobs.recipe()
    return model, args, kwargs | {"attention_mask": torch.ones_like(kwargs["input_ids"])}


def tokenizer() -> PreTrainedTokenizerFast:
    """Words ``1`` to ``60``, and the end of a text."""
    words = Tokenizer(WordLevel({"<end>": 0} | {str(word): word for word in range(1, VOCABULARY)}, "1"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<end>")


def questions(count: int) -> Dataset:
    """Prompts of one to four words, and completions that bring some texts over the length."""
    rows = trainer_jobs.Samples(count).ids.repeat(1, 2).tolist()
    cuts = [(1 + number % 4, 3 + number % 7) for number in range(count)]
    texts = [
        (row[:first], row[first : first + second]) for row, (first, second) in zip(rows, cuts, strict=True)
    ]
    return Dataset.from_list(
        [{"prompt": " ".join(map(str, p)) + " ", "completion": " ".join(map(str, c))} for p, c in texts]
    )


def arguments(folder: Path, world: int, **more: Any) -> SFTConfig:
    own = {"bf16": False, "gradient_checkpointing": False}
    lengths = {"max_length": LENGTH, "pad_to_multiple_of": LENGTH}
    return SFTConfig(**trainer_jobs.settings(folder, world) | own | lengths | more)


def trainer(folder: Path, plan: str | None, **more: Any) -> SFTTrainer:
    """A trainer on 22 questions; the plan is a file, or ``pipeline``; None for a plain trainer."""
    passed: dict[str, Any] = {
        "train_dataset": questions(22),
        "eval_dataset": questions(10),
        "processing_class": tokenizer(),
    }
    if plan is None:
        return SFTTrainer(build(), arguments(folder, 1, **more), **passed)
    from tensoropt.integrations.trl import PlanSFTTrainer

    model, world = build(), 1
    if plan == "pipeline":
        align_special_tokens(model, tokenizer())
        tensoropt.parallelize(model, trainer_jobs.pipelined(SOURCE), (), recipe()[2], batch="share")
    else:
        world, passed["plan"] = int(Path(plan).stem[-1]), plan
    return PlanSFTTrainer(model, arguments(folder, world, **more), **passed)


def found_by(made: SFTTrainer) -> dict[str, Any]:
    names = ("num_tokens", "eval_num_tokens")
    log = made.state.log_history
    return history(made) | {name: [entry[name] for entry in log if name in entry] for name in names}


def trained(folder: Path, plan: str | None, steps: int = STEPS, **more: Any) -> dict[str, Any]:
    """Training that is evaluated, and saved in the middle; then from the middle again, and what was saved."""
    more = {"max_steps": steps, "eval_steps": steps // 2, "save_steps": steps // 2, **more}
    made = trainer(folder, plan, **more)
    made.train()
    made.save_model(str(folder / "model"))
    found: dict[str, Any] = found_by(made)
    again = trainer(folder, plan, **more)
    again.train(resume_from_checkpoint=str(folder / "out" / f"checkpoint-{steps // 2}"))
    found["resumed"] = found_by(again)
    again.accelerator.wait_for_everyone()
    return found | {"saved": loss_of(folder / "model")}


def briefly_trained(folder: Path, plan: str | None) -> dict[str, Any]:
    return trained(folder, plan, 4)


def packed(folder: Path, plan: str | None) -> dict[str, Any]:
    """Texts that are joined and cut to the length, of which all tokens are targets."""
    return trained(folder, plan, 4, packing=True, packing_strategy="wrapped", completion_only_loss=False)


if __name__ == "__main__":
    take_part(globals())
