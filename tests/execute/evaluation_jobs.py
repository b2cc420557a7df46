"""Evaluation of planned models beside plain ones; every function returns plain data."""

from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from tensoropt import parallelize, sampler
from tensoropt.capture.steps import difference
from tests.execute.habit_jobs import Mesh, parallel
from tests.execute.jobs import build, data_parallel, refusal


def batch_of(name: str, rows: int, length: int) -> dict[str, torch.Tensor]:
    """Texts with unequal numbers of targets."""
    generator = torch.Generator().manual_seed(100 * rows + length)
    ids = torch.randint(0, 32, (rows, length), generator=generator)
    labels = ids.clone()
    for row in range(rows):
        labels[row, : row % length] = -100
    first = "input_ids" if name in ("bert", "gpt2", "gpt2_ignored", "llama") else "ids"
    return {first: ids, "labels": labels}


def own_part(model: Any, batch: dict[str, torch.Tensor]) -> tuple[slice, dict[str, torch.Tensor]]:
    """The rows that this rank passes, and the batch of them."""
    rows = len(batch["labels"])
    rank, world = model.data_rank, model.data_world
    part = slice(rows * rank // world, rows * (rank + 1) // world)
    return part, {name: value[part] for name, value in batch.items()}


def pair(name: str, mesh: Mesh, seed: int | None, **how: Any) -> tuple[Any, nn.Module]:
    """A planned model and the plain one, both in evaluation; without a seed it is data parallel."""
    plain, args, kwargs = build(name)
    if hasattr(plain, "config"):
        plain.config.use_cache = False  # a plan makes no caches
    if seed is not None or isinstance(mesh[0], str):
        return parallel(name, mesh, seed or 0, **how)[0].eval(), plain.eval()
    model = parallelize(build(name)[0], data_parallel(name, mesh), args, kwargs, **how)
    return model.eval(), plain.eval()


def results(output: Any, part: slice, rows: int) -> list[Any]:
    """The leaves of a plain model's output, of some rows where they have them."""
    leaves = pytree.tree_leaves(output)
    return [v[part] if isinstance(v, torch.Tensor) and v.dim() and len(v) == rows else v for v in leaves]


def compared(model: Any, plain: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[float, int]:
    """The largest difference between the outputs for a batch, and how many tensors they have."""
    part, own = own_part(model, batch)
    with torch.no_grad():
        ours, theirs = model(**own), plain(**batch)
    assert type(ours) is type(theirs)
    expected = results(theirs, part, len(next(iter(batch.values()))))
    found = pytree.tree_leaves(ours)
    assert len(found) == len(expected)
    far, count = 0.0, 0
    for a, b in zip(found, expected, strict=True):
        if not isinstance(b, torch.Tensor):
            assert a == b
            continue
        assert a.shape == b.shape, (a.shape, b.shape)
        assert a.dtype == b.dtype
        count += 1
        if not b.dtype.is_floating_point:
            assert a.equal(b)
        far = max(far, difference(a.double(), b.double()))
    return far, count


def evaluated(rank, world, name, mesh, batch, seeds, shapes):
    """How far evaluations of several shapes are from the plain model's, under plans of several seeds; how
    many tensors they have, and how many shares there are."""
    found = []
    for seed in seeds:
        model, plain = pair(name, mesh, seed, batch=batch)
        for rows, length in shapes:
            found.append((*compared(model, plain, batch_of(name, rows, length)), model.data_world))
    return found


def without_labels(rank, world, name, mesh):
    """A call that has no targets, with another number of rows."""
    model, plain = pair(name, mesh, None, batch="share")
    call = batch_of(name, 13, 7)
    part, own = own_part(model, call)
    call.pop("labels")
    with torch.no_grad():
        ours = model(**{name: value for name, value in own.items() if name != "labels"})
        theirs = plain(**call)
    key = "logits" if "logits" in theirs else "scores"
    return difference(ours[key], theirs[key][part]), int("loss" in ours)


def loss_alone(rank, world, mesh):
    """Losses where nothing else is wanted; whether all else is None, and how many forms were captured."""
    model, plain = pair("gpt2_ignored", mesh, None, batch="share", outputs="loss")
    far, none = [], True
    for shape in ((4, 16), (6, 16), (5, 11)):
        batch = batch_of("gpt2_ignored", *shape)
        _, own = own_part(model, batch)
        with torch.no_grad():
            ours, theirs = model(**own), plain(**batch)
        far.append(difference(ours.loss, theirs.loss))
        none &= ours.logits is None
    return far, none, len(model._tensoropt.evaluator._forms)


def refused(rank, world):
    """What is said where ranks evaluate unlike calls, where rows cannot be added, or some ranks have none."""
    model, _ = pair("tagged", (1, 2), None, batch="share")
    scored, _ = pair("scored", (1, 2), None, batch="share")
    same, _ = pair("tagged", (1, 2), 2)
    long, short, other = batch_of("tagged", 4, 9), batch_of("tagged", 4, 7), batch_of("tagged", 8, 6)
    other["ids"] = (other["ids"] + rank) % 32
    said = {}
    with torch.no_grad():
        said["lengths"] = refusal(lambda: model(**(long if rank else short)))
        said["called"] = refusal(lambda: model(**long, other=3))
        said["rows"] = refusal(lambda: scored(**batch_of("scored", 3 + rank, 6)))
        said["well"] = refusal(lambda: scored(**batch_of("scored", 3, 6)))
        said["values"] = refusal(lambda: same(**other))
        said["no rows"] = refusal(lambda: scored(**own_part(scored, batch_of("scored", 1, 6))[1]))
    said["sampler"] = refusal(lambda: sampler(model, range(9), shuffle=False))
    said["left out"] = refusal(lambda: sampler(model, range(9), drop_last=True))
    return said


def few_rows(rank, world, name, mesh, outputs, counts):
    """How far evaluations of a few rows are from the plain model's, of which some ranks may have none; and
    whether only one of the losses is not a number."""
    model, plain = pair(name, mesh, None, batch="share", outputs=outputs)
    found = []
    for rows in counts:
        batch = batch_of(name, rows, 6 if name != "gpt2_ignored" else 16)
        part, own = own_part(model, batch)
        with torch.no_grad():
            ours, theirs = model(**own), plain(**batch)
        far = difference(ours["loss"].nan_to_num(), theirs["loss"].nan_to_num())
        for key in ("scores", "logits"):
            if key in theirs and outputs == "all":
                assert ours[key].shape == theirs[key][part].shape
                far = max(far, difference(ours[key], theirs[key][part]) if len(ours[key]) else 0.0)
        found.append((far, bool(ours["loss"].isnan() ^ theirs["loss"].isnan())))
    return found


def without_what_is_not_read(rank, world, mesh):
    """The loss alone, of ranks that pass zeros for inputs that they do not read."""
    model, plain = pair("gpt2_ignored", mesh, 3, outputs="loss")
    batch = batch_of("gpt2_ignored", 4, 16)
    names = zip(model._tensoropt.convention.input_names(), model._tensoropt.engine.reads(), strict=True)
    given = {name: batch[name] if read else torch.zeros_like(batch[name]) for name, read in names}
    with torch.no_grad():
        return difference(model(**given).loss, plain(**batch).loss)


def in_inference_mode(rank, world, mesh):
    """As Lightning evaluates: no tensor of it may be used for training, but a training may follow."""
    model, plain = pair("tagged", mesh, 1)
    batch = batch_of("tagged", 5, 7)
    with torch.inference_mode():
        ours = model(**batch)
    theirs = plain(**batch)
    loss = model.train()(**batch_of("tagged", 8, 6))["loss"]
    loss.backward()
    return max(difference(ours["scores"], theirs["scores"]), difference(ours["loss"], theirs["loss"]))


def returned_parameter(rank, world, mesh):
    """What is said of a model that returns a parameter."""
    model, _ = pair("with_parameter", mesh, 1)
    with torch.no_grad():
        return refusal(lambda: model(**batch_of("with_parameter", 8, 6)))


def trained(rank, world, name, mesh, rows):
    """How far evaluations are from the plain model's before and after training steps on so many rows, and the
    losses of these: they see the weights, and the buffers, as they are then."""
    model, plain = pair(name, mesh, None, batch="share")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, plain)]
    batch, other = batch_of(name, rows, 6), batch_of(name, 8, 9)
    _, own = own_part(model, batch)
    far = [compared(model, plain, other)[0]]
    for _ in range(2):
        losses = []
        for each, call, optimizer in zip((model, plain), (own, batch), optimizers, strict=True):
            losses.append(each.train()(**call)["loss"])
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
            each.eval()
        far += [difference(*(loss.detach() for loss in losses)), compared(model, plain, other)[0]]
    return far
