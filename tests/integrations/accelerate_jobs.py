"""Training with accelerate under torchrun (``accelerate_jobs.py WHAT FOLDER PLAN``), or in one process."""

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

import tensoropt
from tensoropt.integrations.accelerate import PlanAccelerator
from tests.execute.jobs import refusal
from tests.integrations.averages import Average, in_two_parts
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


def trained(folder: Path, plan: str | None, epochs: int = EPOCHS) -> dict[str, Any]:
    def begin() -> Any:
        accelerator, model = made(plan), model_for(plan)
        optimizer = groups(model)
        prepared = accelerator.prepare(*loaders(), optimizer, warmed_up(optimizer), model)
        training, evaluation, optimizer, scheduler, model = prepared

        def epoch(number: int, average: Average) -> Any:
            losses, norms, rates = [], [], []
            training.set_epoch(number)
            for batch in training:
                with accelerator.accumulate(model):
                    loss = model(**batch).loss
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                    if accelerator.sync_gradients:
                        average.update()
                losses.append(float(loss.detach()))
                rates.append(scheduler.get_last_lr()[0])
            return losses, norms, rates

        return model, optimizer, scheduler, evaluation, epoch

    return in_two_parts(folder, plan, epochs, begin)


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
    order = tensoropt.sampler(model, data)
    share = accelerator.prepare(DataLoader(data, order.batch_size, sampler=order))
    return {
        "early": early,
        "size": refusal(lambda: accelerator.prepare(DataLoader(data, 3, shuffle=True))),
        "second": refusal(lambda: accelerator.prepare(build())),
        "rows": [len(batch["labels"]) for batch in share],
        "same": accelerator.prepare(model) is model,
        "gather": refusal(lambda: accelerator.gather_for_metrics([1], use_gather_object=True)),
        "save": refusal(lambda: accelerator.save_state(folder)),
        "load": refusal(lambda: accelerator.load_state(folder)),
        "model": refusal(lambda: accelerator.save_model(model, folder)),
        "state": refusal(lambda: accelerator.get_state_dict(model)),
    }


if __name__ == "__main__":
    take_part(globals())
