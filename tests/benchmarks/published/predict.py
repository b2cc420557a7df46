"""Runs predicted from data sheets, one by one, with their configuration pinned."""

from __future__ import annotations

import gc
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch

from tensoropt.capture import capture
from tensoropt.cluster import DeviceKind
from tensoropt.cluster.catalog import host_seconds
from tensoropt.costs.prices import NO_WORK, Queues
from tensoropt.costs.source import CostSource
from tensoropt.errors import TensorOptError
from tensoropt.evaluation.problem import prepare
from tensoropt.planners.pinned import (
    PinnedPipelinePoint,
    PinnedPoint,
    simulate_pinned,
    simulate_pinned_pipeline,
)
from tensoropt.profiling.overheads import Overheads, data_sheet_overheads
from tensoropt.profiling.store import ProfileStore
from tensoropt.question.settings import Settings
from tensoropt.sharding.recipes import FULL
from tests.benchmarks.program import Row
from tests.benchmarks.published.decoder import Architecture, build
from tests.benchmarks.published.runs import RefusedRunError, Run, architecture_of, cluster_of, pinned_of

Simulated = TypeVar("Simulated")
DEPTHS = (3, 5)
"""Blocks of the two models from which deeper ones are extended: two apart, as every other block may fill a
bucket of gradients."""
FIGURES = {
    "predicted_step_s": "time_s", "predicted_memory_bytes": "memory_bytes",
    **{name: name for name in ("compute_s", "communication_s", "exposed_s")},
}  # fmt: skip
"""What a row says, and what a simulated point calls it."""


def _none(*_: object) -> float:
    return 0.0


TERMS: dict[str, dict[str, Any]] = {
    "slow-down": {
        f"tensoropt.{module}.slower_beside": _none
        for module in ("costs.prices", "simulate.candidates", "pipeline.costs")
    },
    "host": {"tensoropt.cluster.catalog._host_figures": dict},
}
"""The modelling terms of GPUs that can be left out, to see what they are worth, and what takes their place:
computing that is slower beside collectives; a host that issues kernels beside the device."""


@contextmanager
def without(term: str | None) -> Iterator[None]:
    """Leave a term of :data:`TERMS` out of all predictions while open; none for None."""
    with ExitStack() as stack:
        for name, instead in TERMS[term].items() if term else ():
            stack.enter_context(mock.patch(name, instead))
        host_seconds.cache_clear()
        stack.callback(host_seconds.cache_clear)
        yield


def _not_cast(*_: object) -> Queues:
    return NO_WORK


def _added_in_products(device: DeviceKind) -> Overheads:
    return replace(data_sheet_overheads(device), add_s_per_byte=0.0, accumulate_s=0.0)


@contextmanager
def _kernels_of(run: Run) -> Iterator[None]:
    """Leave out, while open, work that plans here have and the run's kernels do not."""
    with ExitStack() as stack:
        if run.by_hand:
            stack.enter_context(mock.patch("tensoropt.costs.prices.Prices.cast", _not_cast))
        if run.adds_in_products:
            added = mock.patch("tensoropt.costs.source.data_sheet_overheads", _added_in_products)
            stack.enter_context(added)
        yield


def simulate_run(
    run: Run,
    of: Architecture,
    store: ProfileStore,
    *,
    recipe: str | None = None,
    process_memory: bool = False,
) -> PinnedPoint | PinnedPipelinePoint:
    """The run's configuration, simulated.

    Args:
        recipe: as for :func:`~tests.benchmarks.published.runs.pinned_of`.
        process_memory: whether memory counts what the process takes beside tensors.

    Raises:
        RefusedRunError: something of it cannot be expressed.
        TensorOptError: the package refuses it.
    """
    pinned, cluster = pinned_of(run, recipe=recipe), cluster_of(run)
    batch, sequence = run.number("global_batch_seqs"), run.number("seq_len")
    model, inputs = build(of, batch, sequence, run.variant)
    settings = Settings(
        dtype="bfloat16",
        optimizer="adam_fused",
        micro_batches=(pinned.micro_batches or 1,),
        measure="never",
        recompute="never" if recipe is None else "auto",
        process_memory=process_memory,
    )
    captured = capture(model, inputs, {}, mode=settings.mode, dtype=settings.dtype)
    costs = CostSource(cluster, store, settings, fused=run.fused, dated=run.date)
    problem = prepare(captured, store)
    with _kernels_of(run):
        if pinned.places > 1:
            return simulate_pinned_pipeline(problem, settings, costs, pinned)
        return simulate_pinned(problem, costs, pinned)


def figures(
    run: Run, of: Architecture, store: ProfileStore, *, whole: bool = False
) -> tuple[Row, PinnedPoint | PinnedPipelinePoint]:
    """Seconds and bytes of the run's step, and one of the simulations that they come from.

    Of a run that recomputes some of its blocks they lie between those with all blocks and with none, as the
    shares say: a block adds to a step what it adds, whatever the others do.
    """

    def read(found: PinnedPoint | PinnedPipelinePoint) -> Row:
        return {name: getattr(found.point, of_point) for name, of_point in FIGURES.items()}

    # Stages of a pipeline that are equal are searched once.
    whole, shares = whole or run.number("pp") > 1, run.recomputed
    each = [extended(of, partial(simulate_run, run, store=store, recipe=r), read, whole) for r in shares]
    rows = [figures for figures, _ in each]
    mixed = {
        n: sum(share * row[n] for share, row in zip(shares.values(), rows, strict=True)) for n in FIGURES
    }
    return mixed, each[0][1]


def extended(
    of: Architecture, simulated: Callable[..., Simulated], read: Callable[[Simulated], Row], whole: bool
) -> tuple[Row, Simulated]:
    """Figures that are read of a simulated model, and one of the simulations that they come from.

    A decoder's blocks are equal and what a block adds to a step does not depend on how many there are, so
    that two depths say what any other takes. ``whole`` simulates all of the model instead.
    """
    if whole or of.layers <= DEPTHS[-1]:
        found = simulated(of=of)
        return read(found), found
    less, more = (simulated(of=replace(of, layers=layers)) for layers in DEPTHS)
    times = (of.layers - DEPTHS[0]) / (DEPTHS[1] - DEPTHS[0])
    first, second = read(less), read(more)
    return {name: first[name] + times * (second[name] - first[name]) for name in first}, more


def predict(run: Run, models: Mapping[str, Any], store: ProfileStore, left_out: str | None = None) -> Row:
    """The row of a run: its prediction, or why there is none.

    Args:
        left_out: a term that predictions do without (:data:`TERMS`).
    """
    about = ("id", "source", "gpu", "model", "single_node", "core", "published_step_s")
    nothing = dict.fromkeys(("predicted_step_s", "predicted_memory_bytes", "refused"))

    def made() -> Row:
        pinned_of(run)  # refused before the model is looked for
        if run.published_step_s is None or run.outcome != "ok":
            raise RefusedRunError(f"it has no step time: its outcome is {run.outcome}")
        with without(left_out):
            found, of = figures(run, architecture_of(run, models), store)
        notes = [*of.notes, *recompute_notes(run), *fused_notes(run), *other_notes(run)]
        return {**found, "notes": notes}

    return completed_by(made, {name: getattr(run, name) for name in about} | nothing)


def completed_by(made: Callable[[], Row], row: Row) -> Row:
    """A row with what is predicted, or why nothing is."""
    try:
        return {**row, **made()}
    except (RefusedRunError, TensorOptError) as refusal:
        return {**row, "refused": str(refusal)}
    finally:
        gc.collect()  # graphs of thousands of operators lie in cycles


def error(row: Row, what: str) -> float:
    """|predicted / published - 1| of ``step_s`` or ``bytes``."""
    return abs(row[f"predicted_{what}"] / row[f"published_{what}"] - 1)


def errors_of(rows: Sequence[Row], what: str) -> Row:
    """How many rows, the median and the worst of their errors."""
    errors = [error(row, what) for row in rows]
    return {
        "runs": len(rows),
        "median_error": statistics.median(errors) if errors else None,
        "worst_error": max(errors, default=None),
    }


def fused_notes(run: Run) -> list[str]:
    """What is assumed of the run's kernels."""
    notes = ["neighbouring element-wise operators of a group as one kernel"] if run.fused else []
    if run.by_hand:
        notes.append("parameters in 16 bits, not cast for each use")
    if run.adds_in_products:
        notes.append("gradients of micro-batches added up by the products that make them")
    return notes


def other_notes(run: Run) -> list[str]:
    """What else is assumed of a run."""
    notes = []
    if not run.precision.startswith("bf16"):
        notes.append("simulated in bfloat16, where the run computes in other 16 bits")
    if run.seq_parallel.startswith("yes ("):
        notes.append("activations between products are split along the sequence, which the run leaves unsaid")
    if run.number("pp") > 1 and run.row.get("virtual_stages", "") in ("", "unsaid"):
        notes.append(f"{run.schedule[1]} stages to a place, which the run leaves unsaid")
    return notes


def recompute_notes(run: Run) -> list[str]:
    """What was approximated of the run's recomputation."""
    if len(run.recomputed) > 1:
        return ["some blocks are recomputed: between the figures with all and with none"]
    (recipe,) = run.recomputed
    if recipe in (None, FULL):
        return []
    return [f"recomputed by the recipe '{recipe}', where the run says {run.recompute}"]


Work = Callable[[Run, Mapping[str, Any], ProfileStore], Row]


def in_processes(
    runs: Sequence[Run], models: Mapping[str, Any], folder: Path, processes: int, work: Work
) -> Iterator[Row]:
    """The rows of runs, in order, each made by a function that processes can import.

    Args:
        folder: for stores of facts, one per process.
    """
    alone = partial(_alone, models=models, folder=folder, work=work)
    # Not forked, as this process has threads of PyTorch's.
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        yield from pool.map(alone, runs)


def _alone(run: Run, models: Mapping[str, Any], folder: Path, work: Work) -> Row:
    torch.set_num_threads(1)
    # A store of the benchmark's own: nothing that was timed on this machine is to price a GPU.
    with ProfileStore(folder / f"{os.getpid()}.sqlite") as store:
        return work(run, models, store)
