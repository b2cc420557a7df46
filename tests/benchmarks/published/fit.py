"""Shares of a data sheet's peaks, fitted to published single-node runs of the sources named in
``presets/efficiencies.yaml``; prints what belongs there.

    python -m tests.benchmarks.published.fit --runs FILE.csv --models FILE.yaml [--every N]

Per compute capability there are three: of matrix products, of attention, of the memory bandwidth. What a step
takes beside operators (collectives, the optimizer, launches) is taken as it is simulated. ``--every N`` takes
each N-th run.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import yaml
from scipy.optimize import least_squares

from tensoropt.cluster import Reached, device_kind, reached_by
from tensoropt.costs.roofline import call_class
from tensoropt.errors import TensorOptError
from tensoropt.ops.registry import launches
from tensoropt.ops.spec import CostClass
from tensoropt.planners.pinned import PinnedPoint
from tests.benchmarks.published.predict import DEPTHS, open_store, simulate_run
from tests.benchmarks.published.report import fitted_sources
from tests.benchmarks.published.runs import (
    RefusedRunError,
    Run,
    architecture_of,
    load_models,
    load_runs,
    pinned_of,
)

CLASSES = (CostClass.MATRIX, CostClass.ATTENTION)
MOST_MEMORY = 0.9
"""Of the bandwidth: copies of GPUs hardly reach more, whatever a fit would like."""
NEAR = 0.05
"""Relative errors beyond which a run counts less, so that few odd ones do not decide."""


@dataclass(frozen=True)
class Parts:
    """A step as rows of (class, seconds at peak FLOP/s, those at peak bandwidth, times), and the rest."""

    classes: Sequence[CostClass]
    numbers: np.ndarray
    rest_s: float
    published_s: float

    def seconds(self, reached: Reached) -> float:
        """The step at these shares of the peaks."""
        share = np.array([reached.of(cls) for cls in self.classes])
        arithmetic, memory, times = self.numbers.T
        return float((np.maximum(arithmetic / share, memory / reached.memory) * times).sum()) + self.rest_s


def computed(point: PinnedPoint, kind: str) -> tuple[list[CostClass], list[tuple[float, float, float]]]:
    """The calls of a step, as :class:`Parts` has them."""
    device, classes, numbers = device_kind(kind), [], []
    for of in point.computed():
        peak, facts = device.flops_of(of.work.dtype), of.facts
        for (call, _), work in zip(of.work.calls, facts.work_of_calls, strict=True):
            if not launches(call.function):
                continue
            cls = call_class(call)
            moved = work.outer_bytes if cls is CostClass.NORM else work.traffic_bytes
            share = work.forward_flops / facts.forward_flops if facts.forward_flops else 0.0
            memory_s = moved / device.memory_bandwidth
            classes += [cls, cls]
            numbers.append((work.forward_flops / peak, memory_s, of.forwards))
            numbers.append((share * facts.backward_flops / peak, 2 * memory_s, of.backwards))
    return classes, numbers


def parts_of(run: Run, models: dict, folder: Path) -> Parts:
    """A run's step in parts, extended from two depths as predictions are."""
    of = architecture_of(run, models)
    times = (of.layers - DEPTHS[0]) / (DEPTHS[1] - DEPTHS[0])
    classes: list[CostClass] = []
    numbers: list[tuple[float, float, float]] = []
    step_s = 0.0
    with open_store(folder / "facts.sqlite") as store:
        for layers, weight in zip(DEPTHS, (1 - times, times), strict=True):
            found = simulate_run(run, replace(of, layers=layers), store)
            names, rows = computed(found, run.gpu)
            classes += names
            numbers += [(flops_s, memory_s, weight * count) for flops_s, memory_s, count in rows]
            step_s += weight * found.point.time_s
    assert run.published_step_s is not None
    parts = Parts(classes, np.array(numbers), 0.0, run.published_step_s)
    return replace(parts, rest_s=step_s - parts.seconds(reached_by(device_kind(run.gpu))))


def fit(found: Sequence[Parts]) -> Reached:
    """The shares at which steps are nearest to what was published, each error relative."""

    def reached(logarithms: np.ndarray) -> Reached:
        *classes, memory = np.exp(logarithms).tolist()
        named = {cls.value: share for cls, share in zip(CLASSES, classes, strict=True)}
        return Reached(reached_by(device_kind("V100-16GB")).arithmetic, memory, named)

    def errors(logarithms: np.ndarray) -> list[float]:
        at = reached(logarithms)
        return [float(np.log(parts.seconds(at) / parts.published_s)) for parts in found]

    start = np.log([0.6, 0.3, 0.8])
    bounds = np.full(3, -4.0), np.log([1.0, 1.0, MOST_MEMORY])
    return reached(least_squares(errors, start, loss="soft_l1", f_scale=NEAR, bounds=bounds).x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--every", type=int, default=1)
    options = parser.parse_args()
    models, by_capability = load_models(options.models), {}
    runs = [r for r in load_runs(options.runs) if r.single_node and r.source in fitted_sources()]
    with tempfile.TemporaryDirectory() as folder:
        for run in runs[:: options.every]:
            try:
                pinned_of(run)
                parts = parts_of(run, models, Path(folder))
            except (RefusedRunError, TensorOptError) as refusal:
                print(f"# {run.id} is left out: {refusal}")
                continue
            by_capability.setdefault(device_kind(run.gpu).capability, []).append(parts)
    for capability, found in sorted(by_capability.items()):
        reached = fit(found)
        missed = [abs(parts.seconds(reached) / parts.published_s - 1) for parts in found]
        shares = {name: round(share, 3) for name, share in reached.classes.items()}
        print(f"# {len(found)} runs, median error {statistics.median(missed):.1%}, worst {max(missed):.0%}")
        print(yaml.safe_dump({capability: {"memory": round(reached.memory, 3), "classes": shares}}))


if __name__ == "__main__":
    main()
