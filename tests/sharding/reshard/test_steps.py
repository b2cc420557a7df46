"""Every resharding, executed on all ranks by definition: the global value must survive.

Buffers of reshardings, against what their steps say by hand.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from math import prod

import pytest
import torch

from tensoropt.ops.layouts import PARTIAL, PARTIAL_GRAD, REPLICATE, local_shape
from tensoropt.sharding.reshard.steps import (
    COLLECTIVES,
    ReshardingStep,
    edge_steps,
    forward_placements,
    gradient_placements,
    move_pattern,
    permuted_atoms,
    permuted_steps,
    resharding_elements,
    resharding_steps,
)
from tests.sharding.rule_check import _distribute, difference
from tests.sharding.simulator import run

MESH = (1, 4)


def step(
    kind: str, before: tuple[int, ...], after: tuple[int, ...], atom: int = 0, target: int = -1
) -> ReshardingStep:
    return ReshardingStep(kind, (1,), atom, target, before, after)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("steps", "elements"),
    [
        ([step("all_reduce", (8, 8), (8, 8))], 64),
        ([step("slice", (8, 8), (2, 8))], 16),
        ([step("all_gather", (2, 8), (8, 8))], 64),  # pieces follow one another
        ([step("all_gather", (8, 2), (8, 8), atom=1)], 128),  # received, then put together
        ([step("reduce_scatter", (8, 8), (2, 8))], 16),
        ([step("reduce_scatter", (8, 8), (8, 2), atom=1)], 64 + 16),
        ([step("all_gather", (2, 8), (7, 8))], 64 + 56),  # padded pieces are received, then cut
        ([step("reduce_scatter", (7, 8), (2, 8))], 64 + 16),  # padded pieces, received
        ([step("all_to_all", (2, 8), (8, 2), atom=0, target=1)], 16 + 16),  # pieces, received
        ([step("all_to_all", (8, 2), (2, 8), atom=1, target=0)], 16 + 16),  # received, put together
        ([step("all_reduce", (8, 8), (8, 8)), step("slice", (8, 8), (2, 8))], 64 + 16),
    ],
)
def test_most_that_is_alive(steps: list[ReshardingStep], elements: int) -> None:
    assert resharding_elements(steps, MESH) == elements


R, P, RP = REPLICATE, PARTIAL, PARTIAL_GRAD


def placements(axes: int, atoms: int) -> list[tuple[int, ...]]:
    return list(itertools.product([R, P, *range(atoms)], repeat=axes))


def preserve(
    mesh: tuple[int, ...],
    sizes: tuple[int, ...],
    steps: Sequence[ReshardingStep],
    source: tuple[int, ...],
    target: tuple[int, ...],
) -> None:
    """Assert that steps bring a random value from one placement to another."""
    generator, atoms = torch.Generator().manual_seed(0), tuple((size,) for size in sizes)
    value = torch.randn(sizes, generator=generator, dtype=torch.float64)
    shards = run(steps, _distribute(value, atoms, source, mesh, generator), mesh)
    assert difference(value, shards, atoms, target, mesh, 1e-9) is None, (source, target)
    for at, shard in shards.items():
        assert shard.shape == local_shape(atoms, target, mesh, at)


def reshard(
    mesh: tuple[int, ...], sizes: tuple[int, ...], source: tuple[int, ...], target: tuple[int, ...]
) -> None:
    preserve(mesh, sizes, resharding_steps(sizes, mesh, source, target), source, target)


def even(atoms: Sequence[int], layout: Sequence[int], mesh: Sequence[int]) -> bool:
    return all(
        size % prod(mesh[a] for a, c in enumerate(layout) if c == atom) == 0
        for atom, size in enumerate(atoms)
    )


SHARDS = [
    ((1, 2), (4, 6)), ((1, 3), (6, 3, 6)), ((1, 2, 2), (4, 8)), ((1, 2, 2), (4, 8, 4)), ((1, 2, 3), (6, 12)),
    # Uneven: 5 over 4 leaves one empty.
    ((1, 2), (7, 4)), ((1, 4), (5, 9)), ((1, 2, 2), (9, 4)), ((1, 3, 2), (10, 6)),
]  # fmt: skip


@pytest.mark.parametrize(("mesh", "atoms"), SHARDS, ids=str)
def test_all_pairs_keep_the_value(mesh, atoms):
    """An atom that no axis divides is cut by one axis at most; others nest as they like."""
    every = [
        p
        for p in placements(len(mesh) - 1, len(atoms))
        if all(p.count(i) <= 1 or even(atoms, (R, *p), mesh) for i in range(len(atoms)))
    ]
    for source, target in itertools.product(every, every):
        reshard(mesh, atoms, (R, *source), (R, *target))


def test_three_axes_keep_the_value():
    mesh, atoms = (1, 2, 2, 2), (8, 8)
    every = placements(3, 2)
    rng = random.Random(1)
    for _ in range(1200):
        reshard(mesh, atoms, (R, *rng.choice(every)), (R, *rng.choice(every)))


@pytest.mark.parametrize("micro", [R, P, 0, 1])
def test_micro_batch_axis_is_never_communicated_over(micro):
    """Where both sides agree on the micro-batch axis no step may name it, whatever the others do."""
    mesh, atoms = (2, 2, 2), (8, 8)
    every = placements(2, 2)
    for source, target in itertools.product(every, every):
        ends = (micro, *source), (micro, *target)
        steps = resharding_steps(atoms, mesh, *ends)
        assert all(0 not in step.axes for step in steps)
        preserve(mesh, atoms, steps, *ends)


def kinds(steps) -> list[str]:
    return [step.kind for step in steps]


def one_axis(source: int, target: int, atoms=(8, 8)):
    return edge_steps(atoms, (1, 2), (R, source), (R, target))


@pytest.mark.parametrize(
    ("source", "target", "forward", "backward"),
    [
        pytest.param(P, R, ["all_reduce"], [], id="row-linear-to-anything"),
        pytest.param(R, RP, [], ["all_reduce"], id="anything-to-column-linear"),
        pytest.param(P, RP, ["all_reduce"], ["all_reduce"], id="row-to-column-linear"),
        pytest.param(P, 0, ["reduce_scatter"], ["all_gather"], id="sequence-parallel-out"),
        pytest.param(0, RP, ["all_gather"], ["reduce_scatter"], id="sequence-parallel-in"),
        pytest.param(0, R, ["all_gather"], ["slice"], id="gather"),
        pytest.param(R, 0, ["slice"], ["all_gather"], id="slice"),
        pytest.param(0, 1, ["all_to_all"], ["all_to_all"], id="exchange"),
        pytest.param(R, P, ["mask"], [], id="bias-into-contraction"),
        pytest.param(0, P, ["pad"], ["slice"], id="shard-into-partial"),
        pytest.param(RP, R, [], ["mask"], id="partial-gradient-from-whole"),
        pytest.param(RP, 0, ["slice"], ["pad"], id="zero-sharded"),
    ],
)
def test_each_edge_and_its_dual(source, target, forward, backward):
    steps = one_axis(source, target)
    assert (kinds(steps[0]), kinds(steps[1])) == (forward, backward)


def test_backward_is_the_forward_of_the_gradients():
    """Forward keeps the value, backward keeps the gradient, hence ``<value, gradient>``: the adjoint."""
    mesh, atoms = (1, 2, 2), (4, 8)
    every = list(itertools.product([R, RP, P, 0, 1], repeat=2))
    for source, target in itertools.product(every, every):
        source, target = (R, *source), (R, *target)
        forward, backward = edge_steps(atoms, mesh, source, target)
        preserve(mesh, atoms, forward, forward_placements(source), forward_placements(target))
        preserve(mesh, atoms, backward, gradient_placements(target), gradient_placements(source))


@pytest.mark.parametrize(
    ("source", "target", "sent"),
    [
        # Flattened groups communicate once.
        ((P, P), (R, R), [("all_reduce", (1, 2), 64)]),
        ((0, 0), (R, R), [("all_gather", (1, 2), 64)]),
        ((0, 0), (1, 1), [("all_to_all", (1, 2), 16)]),
        # What shrinks comes first: the later payloads are smaller.
        ((P, P), (0, R), [("reduce_scatter", (1,), 64), ("all_reduce", (2,), 32)]),
        ((R, P), (0, R), [("slice", (1,), 64), ("all_reduce", (2,), 32)]),
        ((0, 0), (R, 1), [("all_to_all", (2,), 16), ("all_gather", (1,), 32)]),
    ],
)
def test_what_is_sent_on_two_axes(source, target, sent):
    mesh = (1, 2, 2)
    steps = resharding_steps((8, 8), mesh, (R, *source), (R, *target))
    assert [(s.kind, s.axes, s.payload(mesh)) for s in steps] == sent


def test_moves_of_one_pattern_send_the_same():
    """Also where atoms divide unevenly, which patterns keep apart."""
    rng, seen, shared = random.Random(5), {}, 0
    for _ in range(20000):
        mesh = tuple(rng.choice([1, 2, 3, 4]) for _ in range(rng.randint(1, 4)))
        atoms = tuple(rng.choice([2, 3, 4, 6, 16, 24]) for _ in range(rng.randint(1, 3)))
        source, target = (tuple(rng.choice([R, P, *range(len(atoms))]) for _ in mesh) for _ in range(2))
        sent = [(s.kind, s.axes, s.payload(mesh)) for s in resharding_steps(atoms, mesh, source, target)]
        key = mesh, prod(atoms), move_pattern(atoms, mesh, source, target)
        shared += seen.setdefault(key, (atoms, sent))[0] != atoms
        assert seen[key][1] == sent, (atoms, mesh, source, target)
    assert shared > 100


def axes_on(layout: Sequence[int], atom: int) -> list[int]:
    return [axis for axis, code in enumerate(layout) if code == atom]


def nests(left: list[int], right: list[int]) -> bool:
    short = min(len(left), len(right))
    return left[:short] == right[:short]


def test_nothing_is_sent_without_need():
    """Bounds that every pair on a 2x2 mesh keeps."""
    mesh, atoms = (1, 2, 2), (8, 8)
    every = placements(2, 2)

    def local(layout: tuple[int, ...]) -> int:
        return prod(local_shape(tuple((s,) for s in atoms), layout, mesh))

    for source, target in itertools.product(every, every):
        source, target = (R, *source), (R, *target)
        steps = resharding_steps(atoms, mesh, source, target)
        sent = [s for s in steps if s.kind in COLLECTIVES]
        touched = {a for a, (x, y) in enumerate(zip(source, target, strict=True)) if x != y}
        if source == target:
            assert not steps
        # Axes nest in order: where neither order is the beginning of the other, shards come off and go on.
        reordered = any(not nests(axes_on(source, atom), axes_on(target, atom)) for atom in (0, 1))
        if not reordered:
            assert {a for s in steps for a in s.axes} <= touched, (source, target, steps)
        assert kinds(steps).count("all_reduce") <= 1
        assert len(sent) <= len(touched) + reordered, (source, target, steps)
        if P not in source:
            assert not {"all_reduce", "reduce_scatter"} & set(kinds(steps))
        if not any(c >= 0 for c in source):
            assert "all_gather" not in kinds(steps)
        # No intermediate is larger than both ends, unless nesting demands it.
        if not reordered and "all_to_all" not in kinds(steps):
            peak = max([prod(s.after) for s in steps], default=0)
            assert peak <= max(local(source), local(target)), (source, target, steps)


def test_steps_of_a_tensor_that_lies_otherwise() -> None:
    """(4 x 2, 8) with its dims the other way round: atoms 0 1 2 come as 2 0 1."""
    places = permuted_atoms(((4, 2), (8,)), (1, 0))
    assert places == (1, 2, 0)
    (step,) = permuted_steps(resharding_steps((4, 2, 8), (2,), (0,), (2,)), places)
    assert (step.kind, step.atom, step.target) == ("all_to_all", 1, 0)
    assert (step.before, step.after) == ((8, 2, 2), (4, 4, 2))
