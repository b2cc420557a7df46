"""What devices of placed plans ask an allocator for: by hand, and as much at every moment as the simulator
counts."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from tensoropt.cluster import load_cluster
from tensoropt.costs.source import CostSource
from tensoropt.placement import Placement, PlacementProblem, SimulatedPlacement, simulate_placement
from tensoropt.placement.prices import PlacedPrices
from tensoropt.placement.requests import device_requests
from tensoropt.profiling.store import ProfileStore
from tensoropt.question.settings import Settings
from tensoropt.verify.predict import predict_placed
from tests.naive import reserved_by, signed_bytes
from tests.placement.test_simulate import diamond, residual
from tests.planners.placed.placements import random_problem
from tests.simulate.test_caching_allocator import check_against_a_real_step, opened_wide


def test_devices_by_hand() -> None:
    simulated = simulate_placement(diamond(), Placement.in_order([0, 0, 1, 0], 2))
    own, other = (device_requests(simulated, device, "adam") for device in (0, 1))
    assert (own.lasting, own.state) == ([100, 100], [100, 100])
    assert (other.lasting, other.state) == ([], [])
    # The copy of a, c; both are done with when c is sent. Then c's gradient comes, and makes that of a.
    assert signed_bytes([*other.step, *other.end]) == [10, 30, -10, -30, 30, 10, -30, -10]
    # a, and what b saves, stay for backward; b; c, once it is asked for. d makes b's gradient and c's, and b
    # its share of a's. The other share comes last: for a moment both, 20 bytes, are there beside their sum.
    assert signed_bytes([*own.step, *own.end]) == [
        10, 5, 20, 30, -20, -30, 30, 20, 10, -5, -10, -20, -10, -30, 10, 20, -10, -20
    ]  # fmt: skip
    assert own.replay().requested == simulated.peak_bytes[0]


def test_a_backward_that_returns_more_than_it_takes_by_hand() -> None:
    """d's backward needs s, of 10 bytes, and has 4 less alive than that and the gradient that it makes."""
    tensors = tuple(replace(of, kept_by=(3,) if of.name == "s" else ()) for of in residual().tensors)
    problem = residual(tensors=tensors, backward_peak_bytes=np.array([0.0, 0.0, 0.0, -4.0]))
    simulated = simulate_placement(problem, Placement.in_order([0, 0, 0, 0], 2))
    # s is returned as d's backward begins, and 6 bytes are alive instead while it runs. Then b's share of a's
    # gradient, beside that of s, and the sum of both.
    assert signed_bytes(device_requests(simulated, 0, "adam").step) == [
        10, 10, 10, -10, -10, -10, 10, 6, -6, 10, 10, -10, -10, -10
    ]  # fmt: skip
    check_requests(simulated)


def check_requests(simulated: SimulatedPlacement) -> None:
    for device in range(simulated.problem.devices.count):
        requests = device_requests(simulated, device, "adam")
        stored = sum(requests.lasting) + sum(requests.state)
        alive = [
            stored,
            *(stored + now for now in itertools.accumulate(signed_bytes([*requests.step, *requests.end]))),
        ]
        # The bytes at every point of the memory curve are alive, one after another.
        at = 0
        for _, kinds in simulated.timeline.memory(f"device {device}"):
            assert sum(kinds.values()) in alive[at:]
            at += alive[at:].index(sum(kinds.values()))
        assert max(alive) == simulated.peak_bytes[device]
        for expandable in (False, True):
            peaks = requests.replay(expandable=expandable)
            assert peaks.requested == simulated.peak_bytes[device]
            assert peaks.requested <= peaks.allocated <= peaks.reserved
            assert peaks.reserved == reserved_by(requests, expandable=expandable)


def variants(problem: PlacementProblem, seed: int) -> PlacementProblem:
    below = problem.backward_peak_bytes - 4 * 2.0**20
    if seed % 3 == 0:
        problem = replace(problem, backward_peak_bytes=below, update_peak_bytes=problem.parameter_bytes)
    return replace(problem, micro_batches=3 if seed % 4 == 0 else 1)


@pytest.mark.sweep(quick=3)
@pytest.mark.parametrize("seed", range(12))
def test_random_placements_ask_for_what_is_counted(seed: int) -> None:
    training = seed % 5 > 0
    problem = random_problem(seed, 14, 3, mixed=seed % 2 == 0, training=training)
    device = np.random.default_rng(seed).integers(0, 3, size=14).tolist()
    problem = variants(problem, seed) if training else problem
    check_requests(simulate_placement(problem, Placement.in_order(device, 3)))


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_an_allocator_reserves_as_much_for_a_real_step(micro_batches: int) -> None:
    loaded, store = opened_wide(), ProfileStore(":memory:")
    costs = CostSource(load_cluster("netsplit-paper"), store, Settings(), None)
    graph = PlacedPrices(loaded.graph, costs.cluster, costs).price(micro_batches=micro_batches)
    size = graph.problem.size
    placement = Placement.in_order([3 * operator // size for operator in range(size)], 3)
    simulated, (strategy, _) = simulate_placement(graph.problem, placement), predict_placed(graph, placement)
    for device in range(3):
        # A message may be there for more or fewer operators than simulated.
        check_against_a_real_step(device_requests(simulated, device, "adam"), device, loaded, strategy, 0.04)
