"""Cut search on chains whose operators can be cut, and on a model with two towers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import numpy as np
import pytest
import torch
from torch import nn

from tensoropt.capture import capture
from tensoropt.cluster import load_cluster
from tensoropt.costs.source import CostSource
from tensoropt.errors import InfeasibleError
from tensoropt.evaluation.problem import prepare_graph
from tensoropt.placement import simulate_placement
from tensoropt.placement.prices import PlacedPrices, PricedGraph
from tensoropt.planners.errors import UnsuitableError
from tensoropt.planners.placed.cut_search import CutSearch, placements, segments
from tensoropt.planners.placed.local_search import LocalSearch
from tensoropt.profiling.store import ProfileStore
from tensoropt.question.settings import Settings
from tests.planners.placed.hand import Chain, problem_of
from tests.planners.placed.placements import places

LITTLE = CutSearch(seconds=2.5)


def fastest(problem) -> float:
    answers = places(problem, None, 0, LocalSearch(seconds=0.01))
    return simulate_placement(problem, answers[-1].placement).time_s


@pytest.mark.parametrize(
    ("seconds", "devices"),
    [
        ((6.0, 5.0, 0.1), 2),
        ((0.1, 0.2, 0.1), 2),
        pytest.param((0.2, 12.0, 0.2, 9.0, 0.1), 2, marks=pytest.mark.slow),
        pytest.param((0.1, 8.0, 0.2, 0.1), 4, marks=pytest.mark.slow),
    ],
)
def test_what_is_cut_is_what_enumeration_cuts(seconds, devices):
    chain = Chain(seconds, devices=devices, parallel=True)
    names = [f"op{i}" for i in range(len(seconds))]
    best = min(
        fastest(chain.split(dict.fromkeys(cut, ("rows", pieces))).problem)
        for pieces in range(2, devices + 1)
        if devices % pieces == 0
        for size in range(len(names) + 1)
        for cut in combinations(names, size)
    )
    graph, answer = placements(chain, None, 0, LITTLE)[-1]
    assert simulate_placement(graph.problem, answer.placement).time_s == pytest.approx(best)


class Evens(Chain):
    """A batch of which only two halves are equal."""

    def batch_cuts(self, pieces):
        return super().batch_cuts(pieces) if pieces == 2 else {}


@pytest.mark.parametrize("devices", [3])
def test_a_batch_that_no_divisor_of_the_devices_divides_leaves_some_out(devices):
    chain = Evens((8.0, 9.0, 8.0), devices=devices, parallel=True)
    graph, answer = placements(chain, None, 0, LITTLE)[-1]
    assert simulate_placement(graph.problem, answer.placement).time_s < sum(chain.seconds)
    assert "op0[1/2]" in graph.problem.names


def test_refusals_say_what_helps():
    with pytest.raises(UnsuitableError, match="into 2 to 2 equal pieces; use local_search, or another"):
        placements(Chain((1.0, 1.0), devices=2), None, 0)
    with pytest.raises(InfeasibleError, match=r"^cut_search finds no plan within"):
        placements(Chain((1.0, 1.0), devices=2, parallel=True, capacity=0.5), None, 0)


class Named:
    """A problem of hand whose operators all are the model's own."""

    def __init__(self, problem):
        self.problem = problem

    def whole_of(self, operator):
        return self.problem.names[operator]


def test_segments_end_where_little_crosses():
    sizes = {(i, i + 1): 1.0 for i in range(7)} | {(0, 3): 2.0, (4, 7): 2.0}
    problem = problem_of([1.0] * 8, list(sizes), message_s=sizes)
    assert segments(Named(problem), 2) == [tuple(problem.names[:4]), tuple(problem.names[4:])]


@pytest.mark.parametrize("most", [1, 3, 12, 20])
def test_every_operator_is_in_one_segment_in_order(most):
    rng = np.random.default_rng(most)
    problem = problem_of(rng.random(20), [(i, i + 1) for i in range(19)])
    found = segments(Named(problem), most)
    assert [name for segment in found for name in segment] == list(problem.names)
    assert len(found) <= most


class Towers(nn.Module):
    """Two towers of unlike width, whose features meet in the products of all pairs of a batch."""

    def __init__(self, wide: int = 512, narrow: int = 256):
        super().__init__()
        self.left = nn.Sequential(nn.Linear(wide, wide), nn.ReLU(), nn.Linear(wide, 64))
        self.right = nn.Sequential(nn.Linear(narrow, narrow), nn.ReLU(), nn.Linear(narrow, 64))

    def forward(self, a: torch.Tensor, b: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.left(a) @ self.right(b).T, labels)


@pytest.fixture
def two_towers(tmp_path) -> Iterator[PricedGraph]:
    with torch.device("meta"):
        model = Towers()
        args = torch.empty(4096, 512), torch.empty(4096, 256), torch.empty(4096, dtype=torch.int64)
    cluster = load_cluster("dgx-a100[2]")
    with ProfileStore(tmp_path / "profiles.sqlite") as store:
        costs = CostSource(cluster, store, Settings(measure="never"), None)
        yield PlacedPrices(prepare_graph(capture(model, args).graph).graph, cluster, costs).price()


@pytest.mark.slow
def test_towers_that_meet_in_all_pairs_are_cut_up_to_there(two_towers):
    """No sample of the product follows the batch of one input alone: it stays whole, the towers need not."""
    whole = two_towers
    cuts = whole.batch_cuts(2)
    names = {name for o in range(whole.problem.size) if (name := whole.whole_of(o)) is not None}
    assert cuts
    assert set(cuts) < names
    answers = placements(whole, None, 0, LITTLE)
    assert all(set(graph.graph.splits) <= set(cuts) for graph, _ in answers)
    assert "groups is cut in 2" in answers[-1][1].notes[0]
