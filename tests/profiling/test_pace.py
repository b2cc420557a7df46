"""The machine's pace: what is usual comes from idle minutes, and other minutes are scaled to it."""

from __future__ import annotations

import pytest

from tensoropt.profiling.measure import at_usual_pace
from tensoropt.profiling.pace import PACE_S, Pace, pace_s, pace_share, pace_words, usual_pace_s
from tensoropt.profiling.store import ProfileStore


class Ranks:
    """Ranks whose reference work takes what they are told, the second one always longer."""

    seconds = 0.004

    def run(self, function):
        assert function is pace_s
        return [0.9 * self.seconds, self.seconds]


@pytest.fixture
def store(tmp_path):
    with ProfileStore(tmp_path / "p.sqlite") as opened:
        yield opened


def test_the_reference_work_takes_some_milliseconds():
    assert 1e-4 < pace_s(0, 1) < 1.0


def test_only_idle_minutes_say_what_is_usual(store):
    ranks = Ranks()
    pace = Pace(ranks, store, "here")
    assert usual_pace_s(store, "here") is None
    assert pace.now_s(1.5) == 0.004
    assert usual_pace_s(store, "here") is None
    for ranks.seconds in (0.004, 0.005, 0.003):
        assert pace.now_s(0.0) == ranks.seconds
    assert usual_pace_s(store, "here") == 0.004
    ranks.seconds = 0.1
    pace.now_s(2.0)
    assert usual_pace_s(store, "here") == 0.004
    assert usual_pace_s(store, "elsewhere") is None


def test_what_is_usual_stays_as_long_as_a_store_is_open(tmp_path):
    ranks = Ranks()
    with ProfileStore(tmp_path / "p.sqlite") as first:
        pace = Pace(ranks, first, "here")
        pace.now_s(0.0)
        assert usual_pace_s(first, "here") == 0.004
        ranks.seconds = 0.006
        for _ in range(5):
            pace.now_s(0.0)
        assert usual_pace_s(first, "here") == 0.004
    with ProfileStore(tmp_path / "p.sqlite") as second:
        assert usual_pace_s(second, "here") == 0.006


def test_a_share_is_known_if_both_are():
    assert pace_share(0.004, 0.008) == 0.5
    assert pace_share(None, 0.008) == pace_share(0.004, None) == 1.0


def test_a_slow_machine_is_said():
    assert pace_words(0.4) == "the machine ran at 0.4 of its pace while this was measured"
    assert pace_words(0.97) == ""


def test_records_of_a_slow_minute_are_scaled(store):
    records = {
        "slow": {"forward_s": 2.0, "backward_s": 4.0, PACE_S: 0.008},
        "old": {"forward_s": 2.0, "backward_s": 4.0},
        "failed": {"error": "x"},
    }
    assert at_usual_pace(records, store, "here") == records
    Pace(Ranks(), store, "here").now_s(0.0)
    scaled = at_usual_pace(records, store, "here")
    assert scaled["slow"] == {"forward_s": 1.0, "backward_s": 2.0, PACE_S: 0.008}
    assert (scaled["old"], scaled["failed"]) == (records["old"], records["failed"])
    assert records["slow"]["forward_s"] == 2.0
