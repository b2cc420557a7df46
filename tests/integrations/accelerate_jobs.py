"""Training with accelerate under torchrun (``accelerate_jobs.py WHAT FOLDER PLAN``), or in one process."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

import tensoropt
from tensoropt.integrations.accelerate import PlanAccelerator
from tests.execute.jobs import refusal
from tests.integrations.lightning_jobs import EPOCHS, groups, how, loaders, ordered, samples, warmed_up
from tests.integrations.planned import take_part
from tests.integrations.trainer_jobs import GLOBAL, UNWRITTEN, build


def made(plan: str | None) -> Accelerator:
    settings: dict[str, Any] = {"cpu": True, "gradient_accumulation_steps": 2}
    if plan is None:
        return Accelerator(**settings)
    return PlanAccelerator(plan=None if plan in UNWRITTEN else plan, **settings)


def model_for(plan: str | None) -> nn.Module:
    """The model, parallelized already by a plan that is in no file."""
    model = build()
    return tensoropt.parallelize(model, **how(str(plan)), batch="share") if plan in UNWRITTEN else model


class Average:
    """The exponential moving average of a model's parameters, as scripts keep it; a rank averages what it has
    of them. Saved as the parameters of a checkpoint, which any plan of the model reads."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.values = self._parameters()

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]

    @torch.no_grad()
    def _put(self, values: list[torch.Tensor]) -> None:
        for parameter, value in zip(self.model.parameters(), values, strict=True):
            parameter.copy_(value)

    @torch.no_grad()
    def update(self) -> None:
        """Take in the parameters as they are, after a step."""
        for value, parameter in zip(self.values, self.model.parameters(), strict=True):
            value.lerp_(parameter, 0.2)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model with the average as its parameters, until the block ends."""
        own = self._parameters()
        self._put(self.values)
        try:
            yield
        finally:
            self._put(own)

    def save(self, path: Path) -> None:
        """All ranks together."""
        with self.in_place():
            tensoropt.save_checkpoint(path, self.model)

    def load(self, path: Path) -> None:
        """All ranks together; the parameters stay."""
        own = self._parameters()
        tensoropt.load_checkpoint(path, self.model)
        self.values = self._parameters()
        self._put(own)


def trained(folder: Path, plan: str | None, epochs: int = EPOCHS) -> dict[str, Any]:
    """What is found by a loop that averages the parameters, and is saved in its middle; then from the middle
    again."""
    found: dict[str, Any] = {}
    for part in ("first", "again"):
        accelerator, model = made(plan), model_for(plan)
        optimizer = groups(model)
        prepared = accelerator.prepare(*loaders(), optimizer, warmed_up(optimizer), model)
        training, evaluation, optimizer, scheduler, model = prepared
        begun, average, middle = 0, Average(model), epochs // 2
        if part == "again" and plan is not None:
            begun = tensoropt.load_checkpoint(folder / "middle", model, optimizer, scheduler)["epoch"]
            average.load(folder / "average")
        rows: dict[str, list[float]] = {"losses": [], "norms": [], "rates": []}
        for number in range(begun, epochs):
            if number == middle and part == "again":  # what one process found before it is left out
                rows = {name: [] for name in rows}
            training.set_epoch(number)
            for batch in training:
                with accelerator.accumulate(model):
                    loss = model(**batch).loss
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                        rows["norms"].append(float(norm))
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                    if accelerator.sync_gradients:
                        average.update()
                rows["losses"].append(float(loss.detach()))
                rows["rates"].append(scheduler.get_last_lr()[0])
            if part == "first" and number + 1 == middle and plan is not None:
                extra = {"epoch": middle}
                tensoropt.save_checkpoint(folder / "middle", model, optimizer, scheduler, extra)
                average.save(folder / "average")
        model.eval()
        evaluated = [loss_on(model, evaluation)]
        with average.in_place():
            evaluated.append(loss_on(model, evaluation))
        found[part] = rows | dict(zip(("evaluated", "averaged"), evaluated, strict=True))
    return found


@torch.no_grad()
def loss_on(model: nn.Module, batches: Any) -> list[float]:
    return [float(model(**batch).loss) for batch in batches]


def briefly_trained(folder: Path, plan: str | None) -> dict[str, Any]:
    return trained(folder, plan, 2)


def sampled(folder: Path, plan: str | None) -> dict[str, Any]:
    """The losses by loaders of all kinds of orders, and in the order of accelerate's seed."""
    accelerator, model = made(plan), model_for(plan)
    accelerator.gradient_accumulation_steps = 1
    model, optimizer = accelerator.prepare(model, groups(model))
    found: dict[str, Any] = {}
    for name, loader in ordered(1 if plan is None else model.data_world).items():
        found[name] = trained_on(accelerator, model, optimizer, accelerator.prepare(loader))
    accelerator.dataloader_config.use_seedable_sampler = True
    accelerator.dataloader_config.data_seed = 7
    seeded = accelerator.prepare(ordered(1)["shuffled"])
    for epoch in ("seeded", "seeded again"):
        found[epoch] = trained_on(accelerator, model, optimizer, seeded)
    return found


def trained_on(accelerator: Accelerator, model: nn.Module, optimizer: Any, loader: Any) -> list[float]:
    # Ranks follow the first one, however others are seeded.
    torch.manual_seed(5 + accelerator.process_index)
    losses = []
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def measured(folder: Path, plan: str | None) -> dict[str, Any]:
    """What is found for the rows of an evaluation by batches of another size than the plan's."""
    accelerator, model = made(plan), model_for(plan)
    model, loader = accelerator.prepare(model, DataLoader(samples(10), 6))
    model.eval()
    losses, found, labels = [], [], []
    for batch in loader:
        with torch.no_grad():
            output = model(**batch)
        losses.append(float(accelerator.gather_for_metrics(output.loss)))
        means, targets = accelerator.gather_for_metrics((output.logits.mean((1, 2)), batch["labels"]))
        found += means.tolist()
        labels += targets.flatten().tolist()
    return {"losses": losses, "means": found, "labels": labels}


def misused(folder: Path, plan: str | None) -> dict[str, Any]:
    """What is said of a loader before its model, of a second model, and of what is done with whole models."""
    accelerator, data = made(plan), samples(8)
    early = refusal(lambda: accelerator.prepare(DataLoader(data, GLOBAL)))
    model = accelerator.prepare(build())
    return {
        "early": early,
        "second": refusal(lambda: accelerator.prepare(build())),
        "same": accelerator.prepare(model) is model,
        "gather": refusal(lambda: accelerator.gather_for_metrics([1], use_gather_object=True)),
        "save": refusal(lambda: accelerator.save_state(folder)),
        "load": refusal(lambda: accelerator.load_state(folder)),
        "model": refusal(lambda: accelerator.save_model(model, folder)),
        "state": refusal(lambda: accelerator.get_state_dict(model)),
    }


if __name__ == "__main__":
    take_part(globals())
