"""All ranks of a mesh in one process: a shard per coordinate, collectives by their definition.

The slow, obvious twin of the executor's redistribution: nothing here knows how the steps were chosen.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from tensoropt.ops.layouts import PARTIAL
from tensoropt.sharding.reshard.steps import ReshardingStep

Coordinate = tuple[int, ...]
Shards = dict[Coordinate, np.ndarray]


def coordinates(mesh: Sequence[int]) -> list[Coordinate]:
    return list(itertools.product(*(range(size) for size in mesh)))


def cut(value: np.ndarray, dim: int, parts: int) -> list[np.ndarray]:
    """``parts`` pieces as ``torch.chunk`` cuts them, with empty pieces where it gives fewer."""
    step = -(-value.shape[dim] // parts)
    bounds = [min(i * step, value.shape[dim]) for i in range(parts + 1)]
    return [np.take(value, range(a, b), axis=dim) for a, b in itertools.pairwise(bounds)]


def shard(value: np.ndarray, placements: Sequence[int], mesh: Sequence[int], at: Coordinate) -> np.ndarray:
    """The piece of ``value`` that the sharding axes give this rank, the first axis outermost."""
    for axis, code in enumerate(placements):
        if code >= 0:
            value = cut(value, code, mesh[axis])[at[axis]]
    return value


def distribute(
    value: np.ndarray, placements: Sequence[int], mesh: Sequence[int], rng: np.random.Generator
) -> Shards:
    """Shards of ``value``; on partial axes random summands that add up to it."""
    partial = [axis for axis, code in enumerate(placements) if code == PARTIAL]
    members = coordinates([mesh[a] for a in partial])
    summands = {m: rng.integers(-9, 9, value.shape).astype(float) for m in members[1:]}
    summands[members[0]] = value - sum(summands.values(), np.zeros_like(value))
    return {
        at: shard(summands[tuple(at[a] for a in partial)], placements, mesh, at) for at in coordinates(mesh)
    }


def check_holds(shards: Shards, value: np.ndarray, placements: Sequence[int], mesh: Sequence[int]) -> None:
    """Assert that the shards are ``value`` under these placements."""
    partial = [axis for axis, code in enumerate(placements) if code == PARTIAL]
    for at, piece in shards.items():
        members = group_of(at, partial, mesh)
        total = sum(shards[m] for m in members)
        expected = shard(value, placements, mesh, at)
        assert piece.shape == expected.shape, (at, piece.shape, expected.shape)
        np.testing.assert_allclose(total, expected, atol=1e-9, err_msg=f"rank {at}")


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
            result[at] = np.concatenate(pieces, step.atom)
        elif step.kind == "all_to_all":
            result[at] = cut(np.concatenate(pieces, step.atom), step.target, len(members))[me]
        elif step.kind == "mask":
            result[at] = shards[at] if me == 0 else np.zeros_like(shards[at])
        elif step.kind == "pad":
            padded = [p if i == me else np.zeros_like(p) for i, p in enumerate(pieces)]
            result[at] = np.concatenate(padded, step.atom)
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
