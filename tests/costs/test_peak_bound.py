"""Nothing is faster than the peak of CPU ranks, whatever says how fast it is."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

import tensoropt
from tensoropt.costs.residuals import Residuals, save_residuals
from tensoropt.costs.timings import Timings
from tensoropt.exploration.rates import RatesOf
from tensoropt.profiling.store import ProfileStore
from tensoropt.profiling.workload import Workload

PEAK = 40e9


@pytest.fixture
def store(tmp_path: Path) -> ProfileStore:
    with ProfileStore(tmp_path / "profile.sqlite") as profile:
        yield profile


@pytest.mark.parametrize(
    ("slowest_s", "factor"),
    [(1e-9, 1.0), (1e-3, 0.25), (1e-1, 1.0)],
    ids=["too fast", "faster in steps", "slow"],
)
def test_no_plan_computes_more_than_the_peak_whatever_was_timed(
    store: ProfileStore, monkeypatch: pytest.MonkeyPatch, slowest_s: float, factor: float
) -> None:
    rng = random.Random(1)

    def timed(self: Timings, works: Mapping[str, Workload]) -> None:
        self.peaks = {"float32": PEAK}
        for key in works:
            seconds = {f"{way}_s": slowest_s * 10 ** -rng.uniform(0, 4) for way in ("forward", "backward")}
            self.records.setdefault(key, seconds)
        if factor != 1.0:
            terms = {"matrix product": factor}
            save_residuals(store, self.context.prefix, Residuals(terms))

    monkeypatch.setattr(Timings, "measure", timed)
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256))
    found = tensoropt.explore(
        model, (torch.randn(64, 256),), cluster="local:2", measure="never", placements="never",
        micro_batches=(1,), loss=torch.Tensor.sum, store=store, progress=False,
    )  # fmt: skip
    assert found.report["peak_flops"] == {"float32": PEAK}
    reached = [RatesOf(found).of(index).mfu for index in range(len(found.points))]
    assert 0 < max(reached) <= 1.0 + 1e-9
