"""Training by ``PlanTrainer`` under torchrun (``trainer_jobs.py WHAT FOLDER PLAN``), or by ``Trainer``.

A plan's file ends with the number of shares of a batch.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, IterableDataset, WeightedRandomSampler
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
)

import tensoropt
from tensoropt.engine.models import ModelSpec, load_model
from tensoropt.sharding.strategy import ParallelStrategy
from tensoropt.verify.random_strategies import random_pipeline
from tests.execute.jobs import heard
from tests.integrations.planned import SOURCE, take_part
from tests.placement.execute.random_placed import random_placed

GLOBAL, LENGTH, VOCABULARY, STEPS = 4, 8, 61, 50


def build() -> nn.Module:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=1, n_embd=16, n_head=2, vocab_size=VOCABULARY, n_positions=LENGTH, resid_pdrop=0,
        embd_pdrop=0, attn_pdrop=0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def recipe() -> tuple[nn.Module, tuple[Any, ...], dict[str, torch.Tensor]]:
    ids = torch.zeros(GLOBAL, LENGTH, dtype=torch.int64)
    return build(), (), {"input_ids": ids, "labels": ids.clone()}


def adapted() -> nn.Module:
    """The model with LoRA's adapters, which alone are trained."""
    plain = build()
    torch.manual_seed(1)
    return get_peft_model(plain, LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM"))


def adapted_recipe() -> tuple[nn.Module, tuple[Any, ...], dict[str, torch.Tensor]]:
    return adapted(), (), recipe()[2]


def pipelined(source: str = SOURCE) -> ParallelStrategy:
    """A strategy of two stages and two micro-batches."""
    graph = load_model(ModelSpec(source)).graph
    return random_pipeline(graph, (2, 2), "1f1b", random.Random(0))


def placed(source: str = SOURCE) -> ParallelStrategy:
    """A strategy of operators on two devices."""
    return random_placed(load_model(ModelSpec(source)).graph, 2, random.Random(0))


UNWRITTEN: dict[str | None, Callable[..., ParallelStrategy]] = {"pipeline": pipelined, "placed": placed}
"""The plans that are in no file, by their kind."""


class Samples(Dataset[dict[str, Any]]):
    """Texts with unequal numbers of targets, and a column that no model has."""

    def __init__(self, count: int):
        self.ids = torch.randint(
            1, VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(count)
        )

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, row: int) -> dict[str, Any]:
        labels = self.ids[row].clone()
        labels[: row % 6] = -100
        return {"input_ids": self.ids[row], "labels": labels, "number": row}


class Stream(IterableDataset[dict[str, Any]]):
    """Such texts as they come."""

    def __iter__(self) -> Any:
        samples = Samples(40)
        yield from (samples[row] for row in range(len(samples)))


def settings(folder: Path, world: int) -> dict[str, Any]:
    steps = {"max_steps": STEPS, "warmup_steps": 4, "logging_steps": 1, "eval_steps": 10, "save_steps": 10}
    rows = dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size"), GLOBAL // world)
    strategies = {"eval_strategy": "steps", "save_strategy": "steps", "lr_scheduler_type": "linear"}
    return steps | rows | strategies | {
        "output_dir": str(folder / "out"), "use_cpu": True, "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2, "weight_decay": 0.1, "max_grad_norm": 0.5, "seed": 3, "report_to": [],
        "disable_tqdm": True, "include_num_input_tokens_seen": "all",
    }  # fmt: skip


def arguments(folder: Path, world: int, **more: Any) -> TrainingArguments:
    return TrainingArguments(**settings(folder, world) | more)


def trainer(
    folder: Path, plan: str | None, data: Any = None, make: Callable[[], nn.Module] = build,
    asked: str = "recipe", **more: Any,
) -> Trainer:  # fmt: skip
    """A trainer on 22 samples: the last batch of an epoch has two rows, its last accumulation one batch. The
    plan is a file, or one of :data:`UNWRITTEN`, for calls as the function ``asked`` has them; None for a
    plain trainer."""
    passed: dict[str, Any] = {"train_dataset": data or Samples(22), "eval_dataset": Samples(10)}
    for name in ("compute_metrics", "data_collator", "eval_dataset"):
        if name in more:
            passed[name] = more.pop(name)
    if plan is None:
        return Trainer(make(), arguments(folder, 1, **more), **passed)
    from tensoropt.integrations.transformers import PlanTrainer

    model, world = make(), 1
    if plan in UNWRITTEN:
        strategy = UNWRITTEN[plan](SOURCE.replace("recipe", asked))
        tensoropt.parallelize(model, strategy, (), globals()[asked]()[2], batch="share")
    else:
        world, passed["plan"] = int(Path(plan).stem[-1]), plan
    return PlanTrainer(model, arguments(folder, world, **more), **passed)


def history(made: Trainer) -> dict[str, list[float]]:
    log = made.state.log_history
    names = ("loss", "grad_norm", "learning_rate", "eval_loss")
    found = {name: [float(entry[name]) for entry in log if name in entry] for name in names}
    return found | {
        "flos": [made.state.total_flos],
        "tokens": [made.state.num_input_tokens_seen],
        "batch": [made.get_total_train_batch_size(made.args)],
    }


def loss_of(saved: Path | nn.Module) -> float:
    """The loss of a saved model."""
    model = AutoModelForCausalLM.from_pretrained(saved) if isinstance(saved, Path) else saved
    model.eval()
    rows = [Samples(10)[row] for row in range(4)]
    with torch.no_grad():
        return float(model(**{n: torch.stack([r[n] for r in rows]) for n in ("input_ids", "labels")}).loss)


def trained(folder: Path, plan: str | None, steps: int = STEPS) -> dict[str, Any]:
    """Training that is evaluated and saved in the middle and at the end; then from the middle again."""
    more = {"max_steps": steps, "eval_steps": steps // 2, "save_steps": steps // 2}
    made = trainer(folder, plan, **more)
    made.train()
    made.save_model(str(folder / "model"))
    found: dict[str, Any] = history(made) | {"columns": len(set(made._signature_columns))}
    if made.is_world_process_zero():
        (folder / "out" / f"checkpoint-{steps}").rename(folder / "last")
        found["saved"] = loss_of(folder / "model")
        found["middle"] = loss_of(folder / "out" / f"checkpoint-{steps // 2}")
    made.accelerator.wait_for_everyone()
    again = trainer(folder, plan, **more)
    again.train(resume_from_checkpoint=True)
    return found | {"resumed": history(again)}


def briefly_trained(folder: Path, plan: str | None) -> dict[str, Any]:
    return trained(folder, plan, 4)


def moved(folder: Path, plan: str | None) -> dict[str, Any]:
    """Training by a pipeline that continues from the middle by another plan."""
    more = {"max_steps": 4, "eval_steps": 2, "save_steps": 2}
    trainer(folder, plan and "pipeline", **more).train()
    again = trainer(folder, plan, **more)
    again.train(resume_from_checkpoint=str(folder / "out" / "checkpoint-2"))
    return history(again)


def tuned(folder: Path, plan: str | None) -> dict[str, Any]:
    """Training of adapters, saved in the middle and continued; the loss of those that were saved."""
    more = {"max_steps": 4, "eval_steps": 2, "save_steps": 2}
    trainer(folder, plan, make=adapted, **more).train()
    again = trainer(folder, plan, make=adapted, **more)
    again.train(resume_from_checkpoint=str(folder / "out" / "checkpoint-2"))
    again.save_model(str(folder / "adapters"))
    again.accelerator.wait_for_everyone()
    merged = PeftModel.from_pretrained(build(), folder / "adapters").merge_and_unload()
    return history(again) | {"saved": loss_of(merged)}


class Texts(Samples):
    """Texts of two to seven words, none as long as the plan."""

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"input_ids": self.ids[row][: 2 + row % (LENGTH - 2)]}


def to_the_longest(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """What a collator with dynamic padding makes."""
    ids = [row["input_ids"] for row in rows]
    batch = {
        "input_ids": pad_sequence(ids, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(text) for text in ids], batch_first=True),
        "labels": pad_sequence(ids, batch_first=True, padding_value=-100),
    }
    # So that ranks have batches of other lengths.
    longest = max(map(len, ids))
    return {name: value[:, :longest] for name, value in batch.items()}


def masked_recipe() -> tuple[nn.Module, tuple[Any, ...], dict[str, torch.Tensor]]:
    model, args, kwargs = recipe()
    return model, args, kwargs | {"attention_mask": torch.ones_like(kwargs["input_ids"])}


def lengthened(folder: Path, plan: str | None) -> dict[str, Any]:
    """Training and evaluation on texts that are padded to the longest of their batch."""
    more = {"max_steps": 4, "eval_steps": 2, "save_strategy": "no", "data_collator": to_the_longest}
    more["asked"] = "masked_recipe"
    with heard("padded to the plan's length of 8 tokens") as said:
        made = trainer(folder, plan, Texts(22), **more, eval_dataset=Texts(10))
        made.train()
    if plan is not None and made.is_world_process_zero():
        assert len(said) == 1, said
        # Of a pipeline, which has one batch, the first has other texts than those of two shares.
        share = 56 if plan in UNWRITTEN else 62
        assert f"{share}% of the first one is padding" in said[0], said
    found = history(made)
    return {name: found[name] for name in ("loss", "grad_norm", "eval_loss")}


def weighted(folder: Path, plan: str | None) -> dict[str, Any]:
    """Training in the order of a subclass's own sampler; its last batch has two rows."""
    made = trainer(folder, plan, max_steps=4, save_strategy="no", eval_strategy="no")
    made._get_train_sampler = lambda *_: WeightedRandomSampler(torch.arange(1.0, 23.0), 10)
    made.train()
    return {"loss": history(made)["loss"]}


def streamed(folder: Path, plan: str | None) -> dict[str, Any]:
    """Training on data without a length, and then the loss of the best model."""
    more = {"max_steps": 6, "save_steps": 2, "eval_steps": 2, "load_best_model_at_end": True}
    made = trainer(folder, plan, Stream(), **more, learning_rate=0.1)
    made.train()
    return history(made) | {"best": made.evaluate()["eval_loss"], "of": made.state.best_metric}


def measured(folder: Path, plan: str | None) -> dict[str, Any]:
    """Evaluation and prediction by batches of another size than the plan's, with what is made of logits."""

    def compute(found: Any) -> dict[str, float]:
        right = (found.predictions.argmax(-1) == found.label_ids)[found.label_ids != -100]
        return {"right": float(right.mean()), "count": float(right.size)}

    world = 1 if plan is None or plan in UNWRITTEN else int(Path(plan).stem[-1])
    rows = 6 // world
    made = trainer(folder, plan, per_device_eval_batch_size=rows, compute_metrics=compute)
    evaluated = made.evaluate()
    predicted = made.predict(Samples(10))
    data = [{"input_ids": Samples(9)[row]["input_ids"]} for row in range(9)]
    unlabelled = made.predict(data).predictions
    return {
        "loss": evaluated["eval_loss"],
        "right": [evaluated["eval_right"], predicted.metrics["test_right"]],
        "count": [evaluated["eval_count"]],
        # Next to 1, as small logits differ by rounding.
        "predictions": (1 + predicted.predictions[:, -1, :5]).flatten().tolist(),
        "unlabelled": (1 + unlabelled[:, 0, :5]).flatten().tolist(),
        "labels": predicted.label_ids.flatten().tolist(),
        "training": briefly(made),
    }


def briefly(made: Trainer) -> list[float]:
    """The losses of a training that begins after an evaluation."""
    made.args.max_steps = 2
    made.train()
    return [entry["loss"] for entry in made.state.log_history if "loss" in entry]


if __name__ == "__main__":
    take_part(globals())
