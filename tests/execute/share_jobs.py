"""Training in which each rank passes its own rows; every function returns plain data."""

import contextlib
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, TensorDataset

import tensoropt
from tensoropt.capture.steps import difference
from tests.execute import jobs
from tests.execute.habit_jobs import parallel
from tests.execute.jobs import build, heard, loss_of, refusal, whole


def own_rows(share: Any, batch: int, call: Any) -> Any:
    """A call with this rank's rows of all that has as many as the batch."""

    def own(value: torch.Tensor) -> torch.Tensor:
        return value[share.rows(batch)] if share.divided and value.dim() and len(value) == batch else value

    return tree_map_only(torch.Tensor, own, call)


def shares(rank, world, name, mesh, seeds):
    """How far losses and gradients are from those of the unsplit model, under plans of several seeds; whether
    the shares are all rows, and how many there are."""
    found = []
    for seed in seeds:
        model, args, kwargs = parallel(name, mesh, seed, batch="share")
        plain, _, _ = build(name)
        engine = model._tensoropt.engine
        share = engine.share
        inputs = [v for v in [*args, *kwargs.values()] if isinstance(v, torch.Tensor)]
        rows = share.rows(len(inputs[0]))
        seen: list[Any] = [None] * world
        dist.all_gather_object(seen, (model.data_rank, rows))
        of = dict(seen)
        own_args, own_kwargs = own_rows(share, len(inputs[0]), (args, kwargs))
        loss = loss_of(model(*own_args, **own_kwargs))
        expected = loss_of(plain(*args, **kwargs))
        loss.backward()
        expected.backward()
        worst = 0.0
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            if p.grad is None or not p.numel():
                continue
            got = whole(p.grad)
            if got.shape == q.shape:
                worst = max(worst, float((got - q.grad).abs().max() / (q.grad.abs().max() + 1e-3)))
        covers = sorted(row for each in of.values() for row in each) == list(range(len(inputs[0])))
        found.append((difference(loss, expected), worst, covers, model.data_world))
    return found


def _data(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, 32, (count, 6), generator=generator)
    labels = ids.clone()
    for row in range(count):  # uneven numbers of targets
        labels[row, : row % 6] = -100
    return TensorDataset(ids, labels)


def data_parallel(world: int, micro: int, **more: Any) -> nn.Module:
    """The model of tokens under data parallelism."""
    model, args, kwargs = build("tokens")
    return tensoropt.parallelize(model, jobs.data_parallel("tokens", (micro, world)), args, kwargs, **more)


def epochs(rank, world, micro, count, stop, batch="share"):
    """Two epochs by the sampler, beside one process with the same order; with ``stop``, the second run begins
    there."""
    data = _data(count)
    model, (plain, _, _) = data_parallel(world, micro, batch=batch), build("tokens")
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, plain)]
    order = tensoropt.sampler(model, data, seed=3)
    loader = DataLoader(data, order.batch_size, sampler=order)
    whole_order = [
        torch.randperm(count, generator=torch.Generator().manual_seed(3 + epoch)).tolist()
        for epoch in range(2)
    ]
    far, lengths = [], []
    for epoch in range(2):
        order.set_epoch(epoch)
        if stop is not None and epoch == 0:
            order.load_state_dict({"epoch": 0, "start": stop})
        lengths.append(len(order))
        batches = [whole_order[epoch][i : i + 8] for i in range(0, count, 8)]
        if epoch == 0 and stop is not None:
            batches = batches[stop:]
        for (ids, labels), rows in zip(loader, batches, strict=True):
            for optimizer in optimizers:
                optimizer.zero_grad()
            ours = model(ids, labels)
            theirs = plain(*data[rows])
            ours.backward()
            theirs.backward()
            far.append(abs(float(ours) - float(theirs)))
            for optimizer in optimizers:
                optimizer.step()
    return {"far": max(far), "steps": len(far), "lengths": lengths, "world": model.data_world}


def misfed(rank, world):
    """What is said where the rows passed and the way of passing them do not go together."""
    data = _data(8)
    ids, labels = data[:]
    share = data_parallel(world, 1, batch="share")
    own = share._tensoropt.engine.share.rows(8)
    found = {
        "global to share": refusal(lambda: share(ids, labels)),
        "unknown": refusal(lambda: data_parallel(world, 1, batch="local")),
        "well": refusal(lambda: share(ids[own], labels[own])),
    }
    model = data_parallel(world, 1)
    found["share to global"] = refusal(lambda: model(ids[own], labels[own]))
    found["not ranks"] = f"{model.data_rank} {model.data_world}"
    return found


def alike(rank, world):
    """What is warned of where ranks pass the same rows, rows of one value, or rows of their own; three calls
    each."""
    ids, labels = _data(8)[:]
    said = {}
    for what in ("same", "constant", "own"):
        for training in (True, False):
            model = data_parallel(world, 1, batch="share").train(training)
            order = model._tensoropt.engine.share.rows(8)
            rows = slice(4) if what == "same" else order
            passed = (ids[rows], labels[rows]) if what != "constant" else (torch.ones(4, 6).long(),) * 2
            if not training:  # other calls than the plan's own
                passed = (passed[0][:, :5], passed[1][:, :5])
            with heard("data_rank") as said[f"{what} {training}"], torch.set_grad_enabled(training):
                for _ in range(3):
                    model(*passed)
    return said


def sent(rank, world, micro):
    """The sizes of what is gathered of a batch in a training step."""
    model, sizes, real = data_parallel(world, micro, batch="share"), [], dist.all_gather_into_tensor
    order = tensoropt.sampler(model, range(8), shuffle=False)
    ids, labels = _data(8)[list(order)]

    def gather(whole: torch.Tensor, part: torch.Tensor, **how: Any) -> Any:
        if part.dtype == torch.int64 and part.shape == labels.shape:
            sizes.append(part.numel())
        return real(whole, part, **how)

    with mock.patch.object(dist, "all_gather_into_tensor", gather):
        model(ids, labels).backward()
    return sizes


def accumulated(rank, world, micro):
    """How far gradients of two unequal batches are from one process, the first one in ``no_sync``."""
    model, (plain, _, _) = data_parallel(world, micro, batch="share"), build("tokens")
    rows, data = model._tensoropt.engine.share.rows(8), _data(16)
    for start in (0, 8):
        ids, labels = data[start : start + 8]
        with model.no_sync() if start == 0 else contextlib.nullcontext():
            model(ids[rows], labels[rows]).backward()
        plain(ids, labels).backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return max(difference(whole(p.grad), q.grad) for p, q in pairs)
