"""The peak of CPU ranks: the best of all that was measured."""

from __future__ import annotations

import pytest

from tensoropt.profiling.peak import TIMED, _most_flops, known_peaks, measure_peaks
from tensoropt.profiling.store import ProfileStore


class Ranks:
    """Two ranks that reach so many FLOP/s in one measurement after the other."""

    def __init__(self, *reached: tuple[float, float]):
        self.reached = list(reached)

    def run(self, function, dtype):
        assert function is _most_flops
        return self.reached.pop(0)


@pytest.mark.parametrize("dtype", TIMED)
def test_a_processor_computes_products(dtype):
    assert 1e8 < _most_flops(0, 1, dtype) < 1e13


def test_the_best_rank_of_the_best_measurement_counts_and_is_kept(tmp_path):
    with ProfileStore(tmp_path / "profile.sqlite") as store:
        assert known_peaks(store, "here") == {}
        ranks = Ranks((4e9, 5e9), (3e9, 1e9), (2e9, 6e9), (8e9, 9e9))
        for best in (5e9, 5e9, 6e9):
            assert measure_peaks(ranks, store, "here", ["float32"]) == {"float32": best}
        assert measure_peaks(ranks, store, "here", ["float64"]) == {"float32": 6e9, "float64": 9e9}
        assert known_peaks(store, "here") == {"float32": 6e9, "float64": 9e9}
        assert known_peaks(store, "elsewhere") == {}
