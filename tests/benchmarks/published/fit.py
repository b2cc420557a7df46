"""Shares of a data sheet's peaks, fitted to published runs of the sources named in
``presets/efficiencies.yaml``, for the kernels of each time; prints what belongs there.

    python -m tests.benchmarks.published.fit --runs FILE.csv --models FILE.yaml [--every N]

Per compute capability there are three: of matrix products, of attention, of the memory bandwidth. They are
fitted to runs on one node where there are such, else to those on several; to few runs only the share of
products is, beside the others as the file has them. What a step takes beside operators (collectives, the
optimizer, launches) is taken as it is simulated. ``--every N`` takes each N-th run.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import yaml
from scipy.optimize import least_squares

from tensoropt.cluster import Reached, device_kind, reached_by
from tensoropt.cluster.catalog import efficiency_figures
from tensoropt.costs.compute import call_class
from tensoropt.errors import TensorOptError
from tensoropt.ops.calls import CostClass
from tensoropt.ops.registry import launches
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
FEW_RUNS = 12
"""Up to which only products are fitted; an assumption."""


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
    of_depths = zip(DEPTHS, (1 - times, times), strict=True)
    # Of a run that recomputes some of its blocks a mean of all and none, as in predictions.
    ways = run.recomputed.items()
    with open_store(folder / "facts.sqlite") as store:
        for (layers, of_depth), (recipe, share) in itertools.product(of_depths, ways):
            weight = of_depth * share
            found = simulate_run(run, replace(of, layers=layers), store, recipe=recipe)
            names, rows = computed(found, run.gpu)
            classes += names
            numbers += [(flops_s, memory_s, weight * count) for flops_s, memory_s, count in rows]
            step_s += weight * found.point.time_s
    assert run.published_step_s is not None
    parts = Parts(classes, np.array(numbers), 0.0, run.published_step_s)
    return replace(parts, rest_s=step_s - parts.seconds(reached_by(device_kind(run.gpu), run.date)))


def fit(found: Sequence[Parts], known: Reached) -> Reached:
    """The shares at which steps are nearest to what was published, each error relative.

    Args:
        known: what of few runs is not fitted.
    """
    few = len(found) <= FEW_RUNS

    def reached(logarithms: np.ndarray) -> Reached:
        shares = np.exp(logarithms).tolist()
        named = {cls.value: share for cls, share in zip(CLASSES, shares, strict=False)}
        return replace(
            known, classes={**known.classes, **named}, memory=known.memory if few else shares[len(CLASSES)]
        )

    def errors(logarithms: np.ndarray) -> list[float]:
        at = reached(logarithms)
        return [float(np.log(parts.seconds(at) / parts.published_s)) for parts in found]

    free = 1 if few else len(CLASSES) + 1
    start = np.log([0.6, 0.3, 0.8])[:free]
    bounds = np.full(free, -4.0), np.log([1.0, 1.0, MOST_MEMORY])[:free]
    return reached(least_squares(errors, start, loss="soft_l1", f_scale=NEAR, bounds=bounds).x)


def until_of(run: Run) -> str:
    """Until when there were the kernels that a run had; "" for the newest."""
    ends = (str(of.get("until", "")) for of in efficiency_figures()["kernels"])
    return next(end for end in ends if not end or run.date <= end)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--every", type=int, default=1)
    options = parser.parse_args()
    models = load_models(options.models)
    by_kernels: dict[tuple[str, str], list[Parts]] = {}
    known: dict[tuple[str, str], Reached] = {}
    all_runs = [run for run in load_runs(options.runs) if run.source in fitted_sources()]
    on_one_node = {until_of(run) for run in all_runs if run.single_node}
    runs = [run for run in all_runs if run.single_node or until_of(run) not in on_one_node]
    with tempfile.TemporaryDirectory() as folder:
        for run in runs[:: options.every]:
            try:
                pinned_of(run)
                parts = parts_of(run, models, Path(folder))
            except (RefusedRunError, TensorOptError) as refusal:
                print(f"# {run.id} is left out: {refusal}")
                continue
            kind = device_kind(run.gpu)
            of = until_of(run), kind.capability
            by_kernels.setdefault(of, []).append(parts)
            known[of] = reached_by(kind, run.date)
    for (until, capability), found in by_kernels.items():
        reached = fit(found, known[until, capability])
        missed = [abs(parts.seconds(reached) / parts.published_s - 1) for parts in found]
        shares = {name: round(share, 3) for name, share in reached.classes.items()}
        print(f"# kernels {f'until {until}' if until else 'since'}")
        print(f"# {len(found)} runs, median error {statistics.median(missed):.1%}, worst {max(missed):.0%}")
        print(yaml.safe_dump({capability: {"memory": round(reached.memory, 3), "classes": shares}}))


if __name__ == "__main__":
    main()
