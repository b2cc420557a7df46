"""What coming from work to a collective and going back costs: from stamps of ranks, and as it is saved."""

from __future__ import annotations

import json

import pytest

from tensoropt.profiling.transition_timing import Turns
from tensoropt.profiling.transitions import Transition, transition_of_group

FOUND = Transition(
    works_s=(0.0, 1e-3, 4e-3),
    sizes=(4096, 65536),
    arriving_s=((0.0, 0.0), (1e-4, 2e-4), (1e-4, 3e-4)),
    leaving_s=((0.0, 0.0), (1e-5, 2e-5), (1e-5, 4e-5)),
)


def test_what_is_saved_comes_back():
    assert Transition.from_dict(json.loads(json.dumps(FOUND.to_dict()))) == FOUND


def test_work_takes_as_long_as_the_slower_rank_of_each_block():
    """Ranks are slow by turns: 3 and 1 ms, then 1 and 3. Alone a block takes each 2 ms, in step all 3."""
    alone, turns = Turns(1, 0, 2), Turns(1, 4096, 2)
    ranks = []
    for first in (3e-3, 1e-3):
        second = 4e-3 - first
        by_itself = [(0.0, first, first), (first, 4e-3, 4e-3)]
        in_step = [(0.0, first, 3.1e-3), (3.1e-3, 3.1e-3 + second, 6.2e-3)]
        ranks.append([[by_itself, in_step, [(0.0, 0.0, 1e-4)] * 2]] * 4)
    plan = [alone, turns, Turns(0, 4096, 2)]
    transition = transition_of_group([(plan, ranks)])
    assert transition.works_s == pytest.approx((0.0, 2e-3))
    assert transition.leaving_s[1][0] == pytest.approx(1e-3)
    assert transition.arriving_s[1][0] == pytest.approx(0.0, abs=1e-9)
