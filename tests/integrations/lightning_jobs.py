"""Training by Lightning's Trainer: under torchrun (``lightning_jobs.py WHAT FOLDER PLAN``), or in
one process.

The last batch of an epoch has two of four rows, and so
does its accumulation.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import seed_everything
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import tensoropt
from tensoropt.integrations.lightning import PlanStrategy
from tensoropt.integrations.rows import divided
from tests.execute.jobs import refusal
from tests.integrations.planned import take_part
from tests.integrations.trainer_jobs import GLOBAL, UNWRITTEN, Samples, build, recipe

EPOCH, EPOCHS = 3, 18
"""Steps of the optimizer in an epoch of 22 samples, two batches each; epochs."""
STEPS = EPOCH * EPOCHS


def samples(count: int) -> list[dict[str, torch.Tensor]]:
    data = Samples(count)
    return [{name: data[row][name] for name in ("input_ids", "labels")} for row in range(count)]


def groups(model: nn.Module) -> torch.optim.AdamW:
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others}], lr=1e-2)


def warmed_up(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: min((step + 1) / 4, 1.0))


class Shuffled(Sampler[int]):
    """An order of its own for each epoch, which continued jobs need."""

    def __init__(self, data: Any, seed: int = 3):
        self.count, self.seed, self.epoch = len(data), seed, 0

    def __len__(self) -> int:
        return self.count

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return iter(torch.randperm(self.count, generator=generator).tolist())


def loaders() -> tuple[Any, Any]:
    """Loaders of global batches, with a plan and without."""
    data, more = samples(22), samples(10)
    return DataLoader(data, GLOBAL, sampler=Shuffled(data)), DataLoader(more, GLOBAL)


class OwnBatches:
    """A batch sampler of a script's own; rows occur again, and the last batch is smaller."""

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([3, 1, 4, 1], [5, 9, 2, 6], [8, 7])


def ordered(world: int) -> dict[str, DataLoader[Any]]:
    """Loaders of all kinds of orders; for one of them, a rank of ``world`` has its part as the batch size."""
    data, drawn = samples(22), torch.Generator().manual_seed(4)
    weights = torch.arange(1.0, 23.0)

    def by(order: Any, rows: int = GLOBAL) -> DataLoader[Any]:
        return DataLoader(data, rows, sampler=order)

    return {
        "shuffled": DataLoader(data[:10], GLOBAL, shuffle=True),
        "with replacement": by(RandomSampler(data, replacement=True, num_samples=10, generator=drawn)),
        "subset": by(SubsetRandomSampler(range(3, 13))),
        "weighted": by(WeightedRandomSampler(weights, 10)),
        "parts": by(WeightedRandomSampler(weights, 10, generator=drawn), GLOBAL // world),
        "batches": DataLoader(data, batch_sampler=OwnBatches()),
    }


def how(plan: str) -> dict[str, Any]:
    if plan in UNWRITTEN:
        return {"plan": UNWRITTEN[plan](), "args": (), "kwargs": recipe()[2]}
    return {"plan": plan}


def place(plan: str | None) -> dict[str, Any]:
    """Where a job runs: each node has as many ranks as torchrun started on it."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if plan else 1
    world = int(os.environ.get("WORLD_SIZE", 1)) if plan else 1
    return {"accelerator": "cpu", "devices": local, "num_nodes": world // local}


class Tuning(LightningModule):
    """A user's module: a model that returns its loss, and what Lightning asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.model = build()
        self.losses: list[float] = []
        self.evaluated: list[float] = []
        self.rates: list[float] = []

    def forward(self, batch: dict[str, torch.Tensor]) -> Any:
        return self.model(**batch)

    def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
        loss = self.model(**batch).loss
        self.log("loss", loss)
        self.losses.append(float(loss))
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], _: int) -> None:
        self.log("eval_loss", self.model(**batch).loss, sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.evaluated.append(float(self.trainer.callback_metrics["eval_loss"]))

    def configure_optimizers(self) -> Any:
        optimizer = groups(self.model)
        scheduler = warmed_up(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_batch_end(self, *_: Any) -> None:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])


def trainer(folder: Path, plan: str | None, steps: int, **more: Any) -> Trainer:
    saved = ModelCheckpoint(folder / "saved", "{step}", every_n_train_steps=steps // 2, save_top_k=-1)
    settings = {
        "max_steps": steps, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5,
        "num_sanity_val_steps": 0, "check_val_every_n_epoch": 2, "callbacks": [saved], "logger": False,
        "enable_progress_bar": False, "enable_model_summary": False, "use_distributed_sampler": True,
    }  # fmt: skip
    settings["strategy"] = "auto" if plan is None else PlanStrategy(**how(plan))
    return Trainer(**settings | place(plan) | more)


def found_by(module: Tuning, made: Trainer) -> dict[str, Any]:
    return {
        "losses": module.losses, "evaluated": list(module.evaluated), "rates": module.rates,
        "logged": float(made.callback_metrics["eval_loss"]),
    }  # fmt: skip


def loss_of(model: nn.Module) -> float:
    model.eval()
    batch = samples(10)[:GLOBAL]
    with torch.no_grad():
        return float(model(**{name: torch.stack([row[name] for row in batch]) for name in batch[0]}).loss)


def fitted(folder: Path, plan: str | None, steps: int = STEPS) -> dict[str, Any]:
    """Training that is evaluated, and saved in the middle; then from the middle again, and the weights."""
    seed_everything(3)
    module, made = Tuning(), trainer(folder, plan, steps)
    made.fit(module, *loaders())
    found = found_by(module, made)
    made.save_checkpoint(folder / "weights.ckpt", weights_only=True)
    again = Tuning()
    continued = trainer(folder, plan, steps)
    continued.fit(again, *loaders(), ckpt_path=folder / "saved" / f"step={steps // 2}.ckpt")
    found["resumed"] = found_by(again, continued)
    found["validated"] = continued.validate(
        again, loaders()[1], ckpt_path=folder / "weights.ckpt", verbose=False
    )[0]["eval_loss"]
    made.strategy.barrier()
    plain = Tuning.load_from_checkpoint(folder / "weights.ckpt", map_location="cpu")
    return found | {"saved": loss_of(plain.model)}


def briefly_fitted(folder: Path, plan: str | None) -> dict[str, Any]:
    return fitted(folder, plan, 2 * EPOCH * 2)


def fitted_on_nodes(folder: Path, plan: str | None) -> dict[str, Any]:
    """The same where each rank is a node of its own."""
    if plan is not None:
        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": os.environ["RANK"]}
    return briefly_fitted(folder, plan)


class Measuring(Tuning):
    """A module that also measures what the model returns beside its loss."""

    def validation_step(self, batch: dict[str, torch.Tensor], number: int) -> None:
        output = self.model(**batch)
        rows = len(batch["labels"])
        self.log("eval_loss", output.loss, sync_dist=True, batch_size=rows)
        self.log("mean", output.logits.square().mean(), sync_dist=True, batch_size=rows)

    def predict_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
        return self.model(**batch).logits.mean((1, 2))


def measured(folder: Path, plan: str | None) -> dict[str, Any]:
    """Validation and prediction by batches of other sizes than the plan's."""
    module, made = Measuring(), trainer(folder, plan, 2)
    (found,) = made.validate(module, DataLoader(samples(10), 6), verbose=False)
    own = torch.cat(made.predict(module, DataLoader(samples(9), 6)))
    if plan is not None:
        parts: list[Any] = [None] * 2
        torch.distributed.all_gather_object(parts, own)
        own = torch.cat(parts) if module.model.data_world == 2 else own
    return {"loss": found["eval_loss"], "mean": found["mean"], "predicted": sorted(own.tolist())}


def misused(folder: Path, plan: str | None) -> dict[str, Any]:
    """What is said of loaders that would give ranks other rows than the plan asks for."""
    model, data = tensoropt.parallelize(build(), plan, batch="share"), samples(22)

    def said(loader: DataLoader[Any]) -> str:
        return refusal(lambda: next(iter(divided(loader, model))))

    rows = tensoropt.sampler(model, data)
    return {
        "size": said(DataLoader(data, 3, shuffle=True)),
        "items": said(DataLoader(data, None)),
        "no length": said(DataLoader(data, batch_sampler=iter([[0, 1]]))),
        "other": said(DataLoader(data, GLOBAL, sampler=DistributedSampler(data, 1, 0))),
        "last": said(DataLoader(data[:21], GLOBAL)),
        "last of own": said(DataLoader(data, batch_sampler=[[0, 1, 2, 3], [4]])),
        "apart": said(DataLoader(data, GLOBAL // 2, sampler=range(rows.rank, 22, 2))),
        "left out": said(DataLoader(data[:21], GLOBAL, drop_last=True)),
        "own share": said(DataLoader(data, GLOBAL // 2, shuffle=True)),
        "own order": said(DataLoader(data, rows.batch_size, sampler=rows)),
        "own order, whole": said(DataLoader(data, GLOBAL, sampler=rows)),
    }


if __name__ == "__main__":
    os.environ.setdefault("TORCHELASTIC_RUN_ID", "none")  # as torchrun sets it, by which Lightning knows it
    take_part(globals())
