"""Node co-placement and the blocks it makes."""

from __future__ import annotations

from dataclasses import replace

import networkx as nx
import numpy as np
import pytest

from tensoropt.placement import PlacedTensor, Placement, PlacementProblem, simulate_placement
from tensoropt.planners.placed.common.contraction import (
    Contraction,
    GroupLimits,
    co_place,
    contract,
    share_devices,
)
from tests.planners.placed.hand import problem_of
from tests.planners.placed.placements import random_problem


def quotient(found: Contraction) -> nx.DiGraph:
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(found.groups)))
    for tensor in found.whole.tensors:
        for reader in tensor.readers:
            ends = found.block[tensor.producer], found.block[reader]
            if ends[0] != ends[1]:
                graph.add_edge(*ends)
    return graph


def diamond() -> PlacementProblem:
    """0 -> 1 -> 3 and 0 -> 3, which is the heaviest; joining 0 and 3 alone would wait for itself."""
    tensors = (
        PlacedTensor(name="a", bytes=1, producer=0, readers=(1,)),
        PlacedTensor(name="b", bytes=100, producer=0, readers=(3,)),
        PlacedTensor(name="c", bytes=1, producer=1, readers=(3,)),
        PlacedTensor(name="d", bytes=10, producer=2, readers=(3,)),
    )
    return replace(random_problem(0, 4, 2), tensors=tensors)


@pytest.mark.parametrize("seed", range(6))
def test_limits_hold_and_no_cycle_is_closed(seed):
    problem = random_problem(seed, 60, 3, width=8)
    limits = GroupLimits(most_operators=2 + seed % 5, most_groups=20, most_bytes=2**30, most_seconds=0.1)
    found = co_place(problem, limits)
    assert sorted(o for g in found.groups for o in g) == list(range(60))
    assert max(map(len, found.groups)) <= limits.most_operators
    held = [sum(problem.step_bytes(o) for o in g) for g in found.groups if len(g) > 1]
    assert max(held) <= limits.most_bytes
    assert nx.is_directed_acyclic_graph(quotient(found))
    assert all(a < b for a, b in quotient(found).edges)  # a topological order


def test_an_edge_beside_a_longer_path_waits_until_the_path_is_joined():
    two = co_place(diamond(), GroupLimits(most_operators=2, most_groups=1))
    assert two.block[0] != two.block[3]
    three = co_place(diamond(), GroupLimits(most_operators=3, most_groups=1))
    assert nx.is_directed_acyclic_graph(quotient(three))
    assert len(co_place(diamond(), GroupLimits(most_operators=4, most_groups=1)).groups) == 1


def test_operators_without_edges_are_gathered_last():
    lone = replace(random_problem(0, 30, 2), tensors=())
    assert len(co_place(lone, GroupLimits(most_operators=30, most_groups=7)).groups) == 7
    assert len(co_place(lone, GroupLimits(most_operators=5, most_groups=1)).groups) == 6


def test_operators_pinned_apart_are_never_joined():
    problem = replace(random_problem(0, 20, 2), pinned=tuple((o, (o % 2,)) for o in range(20)))
    found = co_place(problem, GroupLimits(most_operators=20, most_groups=1))
    assert all(len({o % 2 for o in g}) == 1 for g in found.groups)
    assert len(found.problem.pinned) == len(found.groups)


@pytest.mark.parametrize("seed", range(6))
def test_blocks_add_up_and_expand_to_a_placement_of_the_operators(seed):
    problem = random_problem(seed, 24, 2, transfer=0.0)
    found = co_place(problem, GroupLimits(most_operators=5, most_groups=8))
    blocks = found.problem
    assert np.allclose(blocks.forward_s.sum(axis=0), problem.forward_s.sum(axis=0))
    assert np.isclose(blocks.stored_bytes.sum(), problem.stored_bytes.sum())
    device = [i % 2 for i in range(blocks.size)]
    simulated = simulate_placement(blocks, Placement.in_order(device, 2))
    whole = simulate_placement(problem, found.expand(simulated.placement))
    alone = simulate_placement(problem, found.expand(Placement.in_order([0] * blocks.size, 2)))
    assert whole.time_s <= simulated.time_s * (1 + 1e-3)  # what a block makes leaves before it is done
    assert np.isclose(
        alone.time_s, simulate_placement(blocks, Placement.in_order([0] * blocks.size, 2)).time_s
    )


def test_every_operator_its_own_block_is_the_problem_itself():
    problem = random_problem(0, 6, 2)
    assert contract(problem, [[o] for o in range(6)]).problem is problem


@pytest.mark.parametrize("seed", range(6))
def test_groups_share_devices_as_evenly_as_can_be(seed):
    problem = replace(random_problem(seed, 60, 3, width=8), together=((0, 30), (5, 59)), pinned=((7, (1,)),))
    groups = share_devices(problem, 6)
    assert sorted(o for group in groups for o in group) == list(range(60))
    assert len(groups) <= 6
    for pair in problem.together:
        assert any(set(pair) <= set(group) for group in groups)
    held = [sum(problem.step_bytes(o) for o in group) for group in groups]
    assert max(held) <= 0.5 * sum(held)


def test_a_group_may_wait_for_another_in_its_midst():
    """0 and 3 share a device over their heavy edge, which a block that runs in one go cannot."""
    heavy = {(0, 1): 1.0, (0, 3): 9.0, (1, 3): 1.0, (2, 3): 2.0}
    problem = problem_of([1.0, 2.0, 2.0, 1.0], list(heavy), message_s=heavy)
    assert {(0, 3), (1,), (2,)} == set(share_devices(problem, 3))
    assert (0, 3) not in co_place(problem, GroupLimits(most_operators=2, most_groups=3)).groups


@pytest.mark.parametrize("group", [co_place, share_devices])
def test_operators_that_no_common_device_can_run_stay_apart(group):
    problem = random_problem(1, 8, 2)
    seconds = problem.forward_s.copy()
    for o in range(8):
        seconds[o, o % 2] = np.inf
    problem = replace(problem, forward_s=seconds)
    limits = GroupLimits(most_operators=8, most_groups=2) if group is co_place else 2
    found = group(problem, limits)
    groups = found.groups if group is co_place else found
    assert all(len({o % 2 for o in members}) == 1 for members in groups)
