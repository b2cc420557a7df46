"""All ranks of a mesh in one process: a shard per coordinate, collectives by their definition.

The slow, obvious twin of the executor's redistribution: nothing here knows how the steps were chosen.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from tensoropt.sharding.reshard.steps import ReshardingStep

Coordinate = tuple[int, ...]
Shards = dict[Coordinate, torch.Tensor]


def coordinates(mesh: Sequence[int]) -> list[Coordinate]:
    return list(itertools.product(*(range(size) for size in mesh)))


def cut(value: torch.Tensor, dim: int, parts: int) -> list[torch.Tensor]:
    """``parts`` pieces as ``torch.chunk`` cuts them, with empty pieces where it gives fewer."""
    pieces = value.chunk(parts, dim) if value.shape[dim] else [value]
    return [*pieces, *(value.narrow(dim, 0, 0) for _ in range(parts - len(pieces)))]


def group_of(at: Coordinate, axes: Sequence[int], mesh: Sequence[int]) -> list[Coordinate]:
    """Members of a rank's group over the flattened ``axes``, in group order."""
    members = []
    for combination in coordinates([mesh[a] for a in axes]):
        member = list(at)
        for axis, index in zip(axes, combination, strict=True):
            member[axis] = index
        members.append(tuple(member))
    return members


def execute(step: ReshardingStep, shards: Shards, mesh: Sequence[int]) -> Shards:
    """One step on all ranks."""
    result: Shards = {}
    for at in shards:
        members = group_of(at, step.axes, mesh)
        me, pieces = members.index(at), [shards[m] for m in members]
        if step.kind == "slice":
            result[at] = cut(shards[at], step.atom, len(members))[me]
        elif step.kind == "all_reduce":
            result[at] = sum(pieces)
        elif step.kind == "reduce_scatter":
            result[at] = cut(sum(pieces), step.atom, len(members))[me]
        elif step.kind == "all_gather":
            result[at] = torch.cat(pieces, step.atom)
        elif step.kind == "all_to_all":
            result[at] = cut(torch.cat(pieces, step.atom), step.target, len(members))[me]
        elif step.kind == "mask":
            result[at] = shards[at] if me == 0 else torch.zeros_like(shards[at])
        elif step.kind == "pad":
            padded = [p if i == me else torch.zeros_like(p) for i, p in enumerate(pieces)]
            result[at] = torch.cat(padded, step.atom)
        else:
            raise AssertionError(step.kind)
    return result


def largest(shards: Shards) -> tuple[int, ...]:
    return tuple(max(sizes) for sizes in zip(*(piece.shape for piece in shards.values()), strict=True))


def run(steps: Sequence[ReshardingStep], shards: Shards, mesh: Sequence[int]) -> Shards:
    """Execute steps in turn, checking the sizes each of them announces."""
    for step in steps:
        assert largest(shards) == step.before, step
        shards = execute(step, shards, mesh)
        assert largest(shards) == step.after, step
    return shards
