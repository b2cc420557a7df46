"""Collectives behind work, on a GPU that is a fake."""

from __future__ import annotations

import math

import pytest

from tensoropt.profiling import link_timing
from tensoropt.profiling.timers import EventTimer, WallTimer
from tests.profiling.test_timers import WARM_MS, FakeCuda


def in_stream(monkeypatch, cuda: FakeCuda, repeats: int = 9, arrives_ms: float = 0.0) -> list[float]:
    """Seconds of a collective behind work, which the other ranks come to so much later."""
    monkeypatch.setattr(link_timing, "local_timer", lambda: EventTimer("cpu", cuda))
    monkeypatch.setattr("tensoropt.profiling.timers.time.perf_counter", lambda: cuda.host / 1e3)

    def meet() -> None:
        cuda.issue("meet")
        cuda.device += arrives_ms

    return link_timing._in_stream(lambda: cuda.issue("work"), repeats, meet)


def test_what_the_launch_takes_and_whom_it_waits_for_is_not_in_it(monkeypatch):
    found = in_stream(monkeypatch, FakeCuda(host_ms=1.0), arrives_ms=7.0)
    assert len(found) == 9
    assert [s for s in found if not math.isnan(s)] == pytest.approx([WARM_MS / 1e3] * 9)


def test_repeats_for_which_the_host_is_late_have_no_seconds(monkeypatch):
    found = in_stream(monkeypatch, FakeCuda(host_ms=40.0))
    assert len(found) == 9
    assert any(math.isnan(s) for s in found)
    assert [s for s in found if not math.isnan(s)] == pytest.approx(
        [WARM_MS / 1e3] * sum(not math.isnan(s) for s in found)
    )


def test_cpu_ranks_have_no_stream(monkeypatch):
    monkeypatch.setattr(link_timing, "local_timer", WallTimer)
    assert link_timing._in_stream(lambda: None, 9, lambda: None) == []
