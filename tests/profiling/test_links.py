"""Link fitting on known lines, and measuring on two real ranks."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensoropt.cluster import Mesh, load_cluster
from tensoropt.costs.communication import CommunicationModel
from tensoropt.errors import MeasurementError
from tensoropt.profiling import links
from tensoropt.profiling.link_fits import LinkFit, _fit_line, fit_segments
from tensoropt.profiling.link_timing import COLLECTIVES, time_collective
from tensoropt.profiling.links import (
    _PAIR_SIZES,
    _QUICK_SIZES,
    _in_step,
    load_links,
    measure_links,
)
from tensoropt.ranks.pool import RankPool
from tensoropt.ranks.worker_process import RankError

ROUNDS = links._ROUNDS["gloo"]
alphas = st.floats(1e-6, 1e-2)
slopes = st.floats(1e-12, 1e-7)


@given(alphas, slopes)
def test_a_line_is_found_exactly(alpha, slope):
    seconds = [alpha + size * slope for size in _QUICK_SIZES]
    found = _fit_line(_QUICK_SIZES, seconds)
    assert found == pytest.approx((alpha, slope), rel=1e-5, abs=1e-15)
    segments, residual = fit_segments(_QUICK_SIZES, seconds)
    assert len(segments) == 1
    assert residual < 1e-5


@given(st.lists(st.floats(1e-7, 10.0), min_size=len(_QUICK_SIZES), max_size=len(_QUICK_SIZES)))
def test_any_times_give_a_finite_rising_prediction(seconds):
    segments, residual = fit_segments(_QUICK_SIZES, seconds)
    fit = LinkFit(kind="all_reduce", group=(0, 1), segments=segments, residual=residual)
    predicted = [fit.time_s(2 ** (power / 4)) for power in range(120)]
    assert all(math.isfinite(value) and value >= 0 for value in predicted)
    assert all(b >= a * (1 - 1e-12) for a, b in itertools.pairwise(predicted))
    assert math.isfinite(residual)
    assert LinkFit.from_dict("all_reduce", json.loads(json.dumps(fit.to_dict()))) == fit


def test_two_regimes_get_two_lines():
    seconds = [1e-4 + size / 5e9 if size <= 1024**2 else 2e-3 + size / 1e9 for size in _QUICK_SIZES]
    segments, residual = fit_segments(_QUICK_SIZES, seconds)
    assert len(segments) == 2
    assert residual < 1e-6
    assert [(s.from_bytes, s.up_to_bytes) for s in segments] == [(0, 1024**2), (2 * 1024**2, math.inf)]
    assert [segment.bandwidth_bytes_per_s for segment in segments] == pytest.approx([5e9, 1e9])
    assert [segment.alpha_s for segment in segments] == pytest.approx([1e-4, 2e-3])
    fit = LinkFit(kind="", group=(), segments=segments, residual=residual)
    ends = [fit.time_s(1024**2), fit.time_s(2 * 1024**2)]
    assert fit.time_s(1.5 * 1024**2) == pytest.approx(sum(ends) / 2)


def test_beyond_a_burst_a_link_is_as_fast_as_at_the_largest_size():
    segments, _ = fit_segments([64 * 1024, 512 * 1024], [1e-4, 2e-2])
    assert LinkFit(kind="", group=(), segments=segments, residual=0.0).time_s(2**20) == pytest.approx(4e-2)


def test_a_lifted_point_does_not_bend_the_line():
    seconds = [1e-4 + size / 1e9 for size in _QUICK_SIZES]
    seconds[1] *= 30  # another process ran
    segments, residual = fit_segments(_QUICK_SIZES, seconds)
    assert LinkFit(kind="", group=(), segments=segments, residual=0.0).time_s(1024) < 2e-4
    assert residual > 0.1  # the disturbance is not hidden


@pytest.mark.parametrize("seconds", [[1.0], [1.0, 0.0], [1.0, 2.0, 3.0]])
def test_too_few_or_impossible_times_are_refused(seconds):
    with pytest.raises(MeasurementError, match="at least two sizes"):
        fit_segments([1, 2], seconds)


@pytest.mark.parametrize(
    ("seconds", "mean"),
    [
        ([1.0] * 49 + [100.0], 1.0),  # a standstill
        ([1.0] * 45 + [10.0] * 5, 95 / 50),  # it comes again and again: the collective's own
        ([1.0] * 49 + [10.0], 59 / 50),
        ([1.0, 1.1, 1.2, 1.3, 9.0], 1.15),
        ([1.0, 1.1, 1.2, 1.3, 4.4], 1.8),
        ([1.0, 1.1, 1.2, 1.3, 1.4], 1.2),
        ([1.0, 5.0], 3.0),
        ([2.0], 2.0),
    ],
)
def test_one_standstill_is_no_part_of_a_collective(seconds, mean):
    assert _in_step(np.array(seconds)) == pytest.approx(mean)


class FakePool:
    """Answers with the stamps of links that take ``alpha + bytes / beta``; fails where told to."""

    backend = "gloo"
    process_ids = (1, 2)

    def __init__(self, world_size: int, failing: str = "") -> None:
        self.world_size, self.failing, self.calls = world_size, failing, 0

    def run(self, function, *arguments):
        *what, plan = arguments
        self.calls += 1
        if what[0] == self.failing:
            raise RankError(f"rank 1 did not finish {what[0]}\nstack", rank=1, kind="hung")
        factor = 2 if function.__name__ == "time_pair" else 1
        stamps = [([0.0] * n, [factor * (1e-4 + size / 1e9)] * n, []) for size, n in plan]
        return [stamps] * self.world_size


class FakeGpus(FakePool):
    """Links of which half of the latency is the launch, or more on all ranks but the first; the host of the
    last rank is late in some repeats."""

    backend = "nccl"

    def __init__(self, world_size: int, late: int = 2) -> None:
        super().__init__(world_size)
        self.late = late

    def run(self, function, *arguments):
        idle = super().run(function, *arguments)[0]
        found = []
        for rank in range(self.world_size):
            own = []
            for starts, ends, _ in idle:
                factor = 2 if function.__name__ == "time_pair" else 1
                behind = [end - factor * (5e-5 + 1e-5 * rank) for end in ends]
                if rank == self.world_size - 1:
                    behind = [math.nan if i % self.late == 0 else s for i, s in enumerate(behind)]
                own.append((starts, ends, behind))
            found.append(own)
        return found


def test_collectives_of_gpus_count_behind_work(store):
    """What counts is the slowest device: that of rank 0, whose collective takes 50 us less behind work."""
    cluster, mesh = load_cluster("cpu:2"), Mesh(shape=(2,))
    pool = FakeGpus(2)
    fits = measure_links(cluster, mesh, pool, store, kinds=("all_reduce",))
    (behind,) = fits.collectives["all_reduce", (0,)]
    (pair,) = fits.pairs.values()
    for size in (1024, 2**20, 64 * 2**20):
        found = behind.time_s(size), pair.time_s(size)
        assert found == pytest.approx([5e-5 + size / 1e9] * 2)
    calls = pool.calls
    assert measure_links(cluster, mesh, pool, store, kinds=("all_reduce",)) == fits
    assert pool.calls == calls
    # Of another way of timing, and of CPU ranks, nothing is known.
    assert load_links(cluster, mesh, store, "gloo").collectives == {}
    assert load_links(cluster, mesh, store, "nccl").collectives == fits.collectives


def test_links_whose_hosts_are_always_late_are_not_measured(store):
    how = {"kinds": ("all_reduce",), "pairs": False}
    fits = measure_links(load_cluster("cpu:2"), Mesh(shape=(2,)), FakeGpus(2, late=1), store, **how)
    assert fits.collectives == {}
    (why,) = fits.failed.values()
    assert "a device had to wait until its host had issued the collective" in why


def test_each_way_to_group_is_measured_once_and_kept(store):
    cluster = load_cluster("local:4")
    flat, square = cluster.meshes()
    pool = FakePool(4)
    fits = measure_links(cluster, square, pool, store)
    assert set(fits.collectives) == {(kind, axes) for kind in COLLECTIVES for axes in ((0,), (1,), (0, 1))}
    assert set(fits.pairs) == {(i, j) for i in range(4) for j in range(i + 1, 4)}
    assert [fit.group for fit in fits.collectives["all_reduce", (0,)]] == [(0, 2), (1, 3)]
    calls = ROUNDS * (3 * 5 + 6)
    assert pool.calls == calls
    for fit in (*fits.collectives["broadcast", (1,)], fits.pairs[0, 3]):
        assert fit.time_s(10**6) == pytest.approx(1.1e-3)
    # The flat mesh's group is the square's both axes: nothing is left to measure.
    assert measure_links(cluster, flat, pool, store).collectives["all_reduce", (0,)][0].group == (0, 1, 2, 3)
    assert pool.calls == calls
    assert load_links(cluster, square, store) == fits
    assert not load_links(load_cluster("local:2"), load_cluster("local:2").meshes()[0], store).collectives
    measure_links(cluster, flat, pool, store, refresh=True, pairs=False)
    assert pool.calls == calls + ROUNDS * 5


class Disturbed(FakePool):
    """Links that somebody else slows down, ten times in all repeats of the rounds that ``quiet`` does not
    name, and in all but the last one of the others."""

    def __init__(self, quiet: set[int]) -> None:
        super().__init__(2)
        self.quiet, self.rounds = quiet, Counter[Any]()

    def run(self, function, *arguments):
        told = super().run(function, *arguments)
        self.rounds[arguments[0]] += 1
        stamps = []
        for starts, ends, behind in told[0]:
            slow = [10 * end for end in ends]
            slow[-1] = ends[-1] if self.rounds[arguments[0]] in self.quiet else slow[-1]
            stamps.append((starts, slow, behind))
        return [stamps, [(starts, [0.0] * len(ends), behind) for starts, ends, behind in stamps]]


@pytest.mark.parametrize("quiet", range(1, ROUNDS + 1))
def test_the_smallest_repeat_of_all_rounds_counts_of_the_slowest_rank(store, quiet):
    cluster = load_cluster("local:2")
    (mesh,) = cluster.meshes()
    fits = measure_links(cluster, mesh, Disturbed({quiet}), store)
    for fit in (*(of_groups[0] for of_groups in fits.collectives.values()), *fits.pairs.values()):
        assert fit.time_s(10**6) == pytest.approx(1.1e-3)


def test_a_measurement_that_fails_is_marked_and_the_rest_goes_on(store):
    cluster = load_cluster("local:2")
    (mesh,) = cluster.meshes()
    seen = []
    fits = measure_links(
        cluster, mesh, FakePool(2, "reduce_scatter"), store, progress=lambda *args: seen.append(args)
    )
    assert fits.failed == {"reduce_scatter 0,1": "rank 1 did not finish reduce_scatter"}
    assert ("reduce_scatter", (0,)) not in fits.collectives
    assert len(fits.collectives) == 4
    assert "not measured: rank 1" in fits.table()
    assert seen[0][:3] == ("links", 0, ROUNDS * 6)
    assert seen[0][3] == "all_reduce 0,1"
    assert seen[-1][:3] == ("links", ROUNDS * 6, ROUNDS * 6)
    seen.clear()
    again = measure_links(cluster, mesh, FakePool(2), store, progress=lambda *args: seen.append(args))
    assert len(again.collectives) == 5  # tried again


def test_a_pool_or_kind_that_does_not_fit_is_refused(store):
    cluster = load_cluster("local:4")
    with pytest.raises(MeasurementError, match="make a pool of 4"):
        measure_links(cluster, cluster.meshes()[0], FakePool(2), store)
    with pytest.raises(MeasurementError, match="valid: all_reduce"):
        measure_links(cluster, cluster.meshes()[0], FakePool(4), store, kinds=["all_redcue"])


@pytest.mark.slow
@pytest.mark.distributed
def test_two_real_ranks(store, ranks):
    cluster = load_cluster("local:2")
    (mesh,) = cluster.meshes()
    sizes = (1024, 16 * 1024, 256 * 1024, 1024**2)
    fits = measure_links(cluster, mesh, ranks, store, sizes=sizes)
    assert not fits.failed
    assert set(fits.collectives) == {(kind, (0,)) for kind in COLLECTIVES}
    assert set(fits.pairs) == {(0, 1)}
    for fit in (*(group[0] for group in fits.collectives.values()), fits.pairs[0, 1]):
        assert [size for size, *_ in fit.points] == list(_PAIR_SIZES if fit.kind == "send" else sizes)
        assert all(1e-6 < seconds < 5 for _, seconds, *_ in fit.points)
        assert 0 < fit.time_s(1024**2) < 5
    assert "all_reduce axes 0" in fits.table()


@pytest.mark.distributed
@pytest.mark.slow
def test_the_fit_follows_a_shaped_link(namespaces):
    cluster = load_cluster("local:2")
    (mesh,) = cluster.meshes()
    prefixes = [["ip", "netns", "exec", name] for name in namespaces]
    sizes = (256 * 1024, 512 * 1024, 1024**2)
    with RankPool(2, timeout_s=600, interface="wire", prefixes=prefixes) as pool:
        fits = measure_links(cluster, mesh, pool, sizes=sizes, kinds=["broadcast"], pairs=False)
    # 20 MB/s, of which 66 bytes of 1,514 are headers. In one direction only: the acknowledgements of a
    # transfer the other way would wait in the same queue.
    expected = 20e6 * 1448 / 1514
    model = CommunicationModel(cluster, mesh, fits)
    assert model.source("broadcast", [0]) == "measured"
    for size in (700_000, 4_000_000):
        # Within 10 % on an idle machine; on a loaded one the burst that gathers makes it look faster.
        # The loopback would be tens of times as fast.
        assert size / model.time_s("broadcast", [0], size) == pytest.approx(expected, rel=0.5)


@pytest.mark.distributed
def test_every_collective_runs_in_every_group_of_a_mesh(four_ranks):
    groups = Mesh(shape=(2, 2)).groups([1])
    for kind in COLLECTIVES:
        stamps = four_ranks.run(time_collective, kind, groups, [(1024, 2)])
        assert all(len(starts) == len(ends) == 2 for [(starts, ends, _)] in stamps)
