"""Training by a script's own loop under torchrun (``loop_jobs.py WHAT FOLDER PLAN``), or in one process.

Accumulated batches are two of four rows; the last ones of an epoch are one of four and one of two.
"""

from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader

import tensoropt
from tests.integrations.averages import Average, in_two_parts
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
    def begin() -> Any:
        model = build()
        optimizer = groups(model)  # of the parameters before they are distributed
        scheduler = warmed_up(optimizer)
        if plan is not None:
            tensoropt.parallelize(model, **how(plan), batch="share")
        training, evaluation = own_loaders(plan, model)

        def epoch(number: int, average: Average) -> Any:
            losses, norms, rates = [], [], []
            training.sampler.set_epoch(number)
            for count, batch in enumerate(training, 1):
                loss = model(**batch).loss
                (loss / 2).backward()
                losses.append(float(loss.detach()))
                if count % 2 == 0:
                    norms.append(float(clip_grad_norm_(model.parameters(), 0.5)))
                    optimizer.step()
                    optimizer.zero_grad()
                    average.update()
                    rates.append(scheduler.get_last_lr()[0])
                    scheduler.step()
            return losses, norms, rates

        return model, optimizer, scheduler, evaluation, epoch

    return in_two_parts(folder, plan, epochs, begin)


def briefly_trained(folder: Path, plan: str | None) -> dict[str, Any]:
    return trained(folder, plan, 2)


if __name__ == "__main__":
    take_part(globals())
