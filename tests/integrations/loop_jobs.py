"""Training by a script's own loop under torchrun (``loop_jobs.py WHAT FOLDER PLAN``), or in one process.

Accumulated batches are two of four rows; the last ones of an epoch are one of four and one of two.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader

import tensoropt
from tests.integrations.averages import Average
from tests.integrations.lightning_jobs import EPOCHS, groups, how, loaders, samples, warmed_up
from tests.integrations.planned import take_part
from tests.integrations.trainer_jobs import GLOBAL, build

SEED = 3
"""Of the one process's loader (:func:`loaders`)."""


def own_loaders(plan: str | None, model: nn.Module) -> tuple[Any, Any]:
    if plan is None:
        return loaders()
    order = tensoropt.sampler(model, samples(22), seed=SEED)
    rows = tensoropt.sampler(model, samples(10), shuffle=False, batch_size=GLOBAL)
    return tuple(DataLoader(each.dataset, each.batch_size, sampler=each) for each in (order, rows))


def trained(folder: Path, plan: str | None, epochs: int = EPOCHS) -> dict[str, Any]:
    """A loop that averages, and is saved in its middle; then from the middle again."""
    found: dict[str, Any] = {}
    for part in ("first", "again"):
        model = build()
        optimizer = groups(model)  # of the parameters before they are distributed
        scheduler = warmed_up(optimizer)
        if plan is not None:
            tensoropt.parallelize(model, **how(plan), batch="share")
        training, evaluation = own_loaders(plan, model)
        begun, average = 0, Average(model)
        if part == "again" and plan is not None:
            begun = tensoropt.load_checkpoint(folder / "middle", model, optimizer, scheduler)["epoch"]
            average.load(folder / "average")
        losses, norms, rates = [], [], []
        for epoch in range(begun, epochs):
            training.sampler.set_epoch(epoch)
            for number, batch in enumerate(training, 1):
                loss = model(**batch).loss
                (loss / 2).backward()
                losses.append(float(loss.detach()))
                if number % 2 == 0:
                    norms.append(float(clip_grad_norm_(model.parameters(), 0.5)))
                    optimizer.step()
                    optimizer.zero_grad()
                    average.update()
                    rates.append(scheduler.get_last_lr()[0])
                    scheduler.step()
            if part == "first" and epoch + 1 == epochs // 2 and plan is not None:
                extra = {"epoch": epoch + 1}
                tensoropt.save_checkpoint(folder / "middle", model, optimizer, scheduler, extra)
                average.save(folder / "average")
        of_part = {"losses": losses, "norms": norms, "rates": rates}
        if part == "again" and plan is None:
            of_part = {name: values[len(values) // 2 :] for name, values in of_part.items()}
        model.eval()
        with torch.no_grad():
            of_part["evaluated"] = [float(model(**batch).loss) for batch in evaluation]
            with average.in_place():
                of_part["averaged"] = [float(model(**batch).loss) for batch in evaluation]
        found[part] = of_part
    return found


def briefly_trained(folder: Path, plan: str | None) -> dict[str, Any]:
    return trained(folder, plan, 2)


if __name__ == "__main__":
    take_part(globals())
