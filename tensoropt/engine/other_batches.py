"""Batches with another number of rows than the plan's: the last of an epoch, or those of an evaluation.

Smaller ones are filled up with copies of the last row, whose targets the loss ignores. In evaluation, larger
ones run in pieces of the plan's size, whose losses are weighted (:mod:`tensoropt.engine.evaluation`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from tensoropt.errors import PlanError
from tensoropt.graph import Operator, OperatorGraph
from tensoropt.ops.families.losses import is_mean
from tensoropt.ops.registry import spec_of
from tensoropt.sharding.configurations import MicroBatchRefused, micro_batch_strategies
from tensoropt.sharding.groups import GroupGraph, batch_inputs

_MOVES = frozenset(f"aten.{name}" for name in (
    "alias.default", "clone.default", "contiguous.default", "flatten.using_ints",
    "pad.default", "reshape.default", "constant_pad_nd.default", "slice.Tensor",
    "squeeze.dim", "to.dtype", "transpose.int", "unsqueeze.default", "view.default",
    "_to_copy.default",
))  # fmt: skip
"""Operators that move, cut or pad targets without changing their values."""


def ignored_targets(graph: GroupGraph) -> Mapping[str, int] | str:
    """Return, for each input with targets, the target that the loss ignores; or why it can ignore no rows."""
    source = graph.atoms.graph
    if not source.training:
        return "the plan is for inference"
    try:
        micro_batch_strategies(graph)
    except MicroBatchRefused as error:
        return str(error)
    found: dict[str, int] = {}
    batch = set(batch_inputs(source))
    rows = source.tensors[source.inputs[0]].shape[0] if batch else 0
    read_as_targets: set[tuple[str, str]] = set()
    waiting, seen = [source.outputs[0]], set[str]()
    while waiting:
        name = waiting.pop()
        if name in batch:
            return "its loss depends on the batch in other ways than a cross entropy that ignores targets"
        op = source.producer.get(name)
        if op is None or name in seen:
            continue
        seen.add(name)
        if not spec_of(op.target).counted_targets:
            # It may be the number of rows that the model multiplied or divided by.
            if rows in op.args:
                return f"{op.name} computes with {rows}, which may be the number of rows"
            waiting += op.inputs()
            continue
        origin = _origin(source, op, read_as_targets)
        if origin not in batch or not is_mean(op):
            return f"{op.name} is not a mean over targets taken directly from an input of the model"
        ignored = ignore_index(op)
        if found.setdefault(origin, ignored) != ignored:
            return f"two losses ignore different targets of {origin}"
    if not found:
        return "its loss has no targets to ignore"
    for op in source.operators:
        for name in op.inputs():
            if name in found and (op.name, name) not in read_as_targets:
                return f"{op.name} reads the targets, too"
    return found


def _origin(source: OperatorGraph, loss: Operator, read: set[tuple[str, str]]) -> str:
    name, op = loss.inputs()[1], loss
    read.add((op.name, name))
    while (maker := source.producer.get(name)) is not None and maker.target in _MOVES:
        name, op = maker.inputs()[0], maker
        read.add((op.name, name))
    return name


def ignore_index(loss: Operator) -> int:
    """Return the target value that a loss operator ignores."""
    return int(loss.args[4] if len(loss.args) > 4 else loss.kwargs.get("ignore_index", -100))


def _shares_of_pieces(counts: Sequence[Mapping[str, torch.Tensor]]) -> list[torch.Tensor]:
    """Return the weight of each piece's loss in the batch's loss.

    Args:
        counts: for each piece, the number of targets by loss.

    Raises:
        PlanError: several losses that are summed would need different weights.
    """
    totals = {name: sum(of[name] for of in counts) for name in counts[0]}
    shares = [[of[name] / total for of in counts] for name, total in totals.items()]
    first, *others = map(torch.stack, shares)
    if any(not torch.allclose(first, other, equal_nan=True) for other in others):
        raise PlanError(
            "a batch with more rows than the plan's is evaluated in pieces, but the losses that this model "
            "adds up ignore different targets of it; pass batches of the plan's size"
        )
    return list(first)


def joined_loss(losses: Sequence[torch.Tensor], counts: Sequence[Mapping[str, torch.Tensor]]) -> torch.Tensor:
    """Return the loss of a batch as the weighted sum of its pieces' losses (:func:`_shares_of_pieces`)."""
    if len(losses) == 1:
        return losses[0]
    # The mean of no target at all is NaN, which counts by nothing.
    parts = [
        torch.where(share == 0, torch.zeros_like(loss), loss * share)
        for loss, share in zip(losses, _shares_of_pieces(counts), strict=True)
    ]
    return torch.stack(parts).sum(0)


def filled(value: torch.Tensor, rows: int, target: int | None, start: int = 0) -> torch.Tensor:
    """Return ``rows`` rows from ``start`` on; missing ones repeat the last row, or consist of ``target``."""
    part = value[start : start + rows]
    if len(part) == rows:
        return part
    last = value[-1:] if len(value) else value.new_zeros((1, *value.shape[1:]))
    if target is not None:
        last = torch.full_like(last, target)
    return torch.cat([part, last.expand(rows - len(part), *value.shape[1:])])
