"""OS-DPOS on chains whose operators can be cut."""

from __future__ import annotations

import numpy as np
import pytest

from tensoropt.errors import InfeasibleError
from tensoropt.placement import simulate_placement
from tensoropt.planners.placed.common.units import MemoryBook, units_of
from tensoropt.planners.placed.dpos import schedule_by_ranks
from tensoropt.planners.placed.os_dpos import placements
from tests.planners.placed.hand import Chain


def finish_s(chain: Chain) -> float:
    problem = chain.problem
    caps = np.full(chain.devices, chain.capacity)
    return schedule_by_ranks(problem, MemoryBook(units_of(problem), caps)).finish_s


def test_the_longest_operator_is_cut_as_enumeration_says():
    chain = Chain((0.2, 12.0, 0.2), devices=4)
    best = min((chain.split({"op1": ("rows", n)}) for n in (2, 3, 4)), key=finish_s)
    ((graph, answer),) = placements(chain, None, 0)
    assert dict(graph.splits)["op1"] == dict(best.splits)["op1"] == ("rows", 4)
    # 0.2, cut 0.1, message 0.1, 3, message 0.1, joined 0.1, 0.2
    assert simulate_placement(graph.problem, answer.placement).time_s == pytest.approx(3.8)
    assert answer.notes[0] == "started from the model itself"
    assert answer.notes[1] == "cut on the critical path: op1 along rows into 4"


def test_it_stops_at_the_first_that_gains_nothing():
    # 0.3 s cannot be cut at a gain, so that 0.25 s is not even tried
    tried: list[str] = []

    class Watched(Chain):
        def split(self, splits):
            tried.extend(splits)
            return super().split(splits)

    ((graph, _),) = placements(Watched((0.25, 9.0, 0.3, 0.2), devices=3), None, 0)
    assert dict(graph.splits).keys() == {"op1"}
    assert set(tried) == {"op1", "op2"}
    assert tried.index("op1") < tried.index("op2")


def test_a_cut_may_not_fit():
    # each piece holds as much as the whole: 1 + n + 1 over devices of 2 each
    chain = Chain((1.0, 12.0, 1.0), devices=2, message_s=0.0, capacity=2.0)
    ((graph, answer),) = placements(chain, None, 0)
    assert dict(graph.splits) == {"op1": ("rows", 2)}
    assert answer.notes[0] == "started from the model itself"
    assert simulate_placement(graph.problem, answer.placement).fits()


@pytest.mark.parametrize(
    ("capacity", "start"),
    [(4.0, "data parallelism (the batch of 2 groups cut in 2)"), (1.5, "the model itself")],
)
def test_the_start_depends_on_room(capacity, start):
    """Data parallelism where one device holds the model, otherwise the model."""
    chain = Chain((6.0, 6.0), devices=2, parallel=True, message_s=0.0, capacity=capacity)
    ((_, answer),) = placements(chain, None, 0)
    assert answer.notes[0] == f"started from {start}"


def test_what_is_cut_already_can_be_cut_anew():
    class Uneven(Chain):
        """The batch can be cut in two only."""

        def data_parallel(self):
            return {"op0": ("rows", 2)}

    ((graph, answer),) = placements(Uneven((12.0,), devices=4), None, 0)
    assert dict(graph.splits) == {"op0": ("rows", 4)}
    assert answer.notes[1] == "cut on the critical path: op0 along rows into 4"


def test_nothing_fits_nowhere():
    with pytest.raises(InfeasibleError, match="os_dpos finds no plan within"):
        placements(Chain((1.0, 1.0), devices=2, stored=8.0, capacity=4.0), None, 0)
