"""Search and simulation in turns: few strategies are simulated, and the best of all are among them."""

import numpy as np
import pytest

from tensoropt.api import explore
from tensoropt.engine.models import ModelSpec
from tensoropt.frontier import dominated_area, reduce
from tensoropt.profiling.store import ProfileStore
from tensoropt.search import Staircase
from tensoropt.session.one_space import Found, unbeaten_by

ASKED = {"measure": "never", "micro_batches": [1, 2]}


@pytest.fixture(scope="module", params=["dgx-h100[2]", pytest.param("dgx-h100", marks=pytest.mark.slow)])
def found(request, tmp_path_factory):
    """What the search alone finds with the default gap, and with none."""
    path = tmp_path_factory.mktemp("store") / "profiles.sqlite"
    with ProfileStore(path) as store, pytest.MonkeyPatch.context() as patch:
        # Counts are the search's: published planners' plans beat some of its points.
        patch.setattr("tensoropt.api.with_quick_plans", lambda session, searched, found, **_: found)
        model = ModelSpec("zoo:gpt2-tiny", 0).build()
        yield [
            explore(*model, cluster=request.param, store=store, epsilon=epsilon, **ASKED)
            for epsilon in (0.001, 0.0)
        ]


def costs(exploration):
    return np.array([(p.memory_bytes, p.time_s) for p in exploration.points])


@pytest.mark.slow
def test_representatives_lose_a_thousandth_of_the_hypervolume(found):
    loose, exact = (costs(one) for one in found)
    both = reduce(*np.concatenate([loose, exact]).T)
    ends = np.array([[both.memory[-1], both.time[-1]], [both.memory[0], both.time[0]]])
    area = [
        dominated_area(f.memory, f.time)
        for f in (reduce(*np.concatenate([c, ends]).T) for c in (loose, exact))
    ]
    assert area[0] >= 0.999 * area[1]
    assert loose[-1, 1] <= exact[-1, 1] * 1.001
    assert loose[0, 0] <= exact[0, 0] * 1.001
    assert len(loose) <= 300


class FakeFrontier:
    memory, time = np.arange(1.0, 21.0), np.arange(20.0, 0.0, -1.0)

    def __len__(self):
        return len(self.memory)


def test_neighbours_of_winners_are_asked_for_and_no_others():
    found = Found(0, FakeFrontier())
    found.numbers[[0, 9, 19]] = [0, 1, 2]
    assert found.neighbours(np.array([], np.int64)).size == 0
    near = found.neighbours(np.array([0]))
    assert near.size
    assert set(near.tolist()) <= set(range(1, 19))
    found.numbers[:] = np.arange(20)
    assert found.neighbours(np.arange(20)).size == 0


def test_rivals_leave_out_what_they_beat():
    assert unbeaten_by(FakeFrontier(), None).tolist() == list(range(20))
    rivals = Staircase(np.array([5.0]), np.array([10.0]))
    # What needs less memory than every rival, and what is faster than all of them.
    assert unbeaten_by(FakeFrontier(), rivals).tolist() == [0, 1, 2, 3, *range(11, 20)]
