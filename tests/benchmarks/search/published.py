"""Our search against FT-LDP and FT-Elimination: what is the algorithm, and what is compiled code.

Every frontier is found in seven ways from the same tables, in the same run: by our search with a thread per
core and with one; by the paper's two algorithms on our compiled kernels, with one thread; by the paper's
algorithms in plain numpy, FT-Elimination in two orders (``baselines.py``). Numpy over our kernels at one
algorithm is what compilation gives; the paper's algorithm over ours, both on our kernels and with one thread,
is what the algorithm gives.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from tensoropt.search import CostGraph, track_frontier
from tests.benchmarks.papers.authors import SEARCHES
from tests.benchmarks.program import page, table
from tests.benchmarks.search.baselines import ORDERS, OutOfTimeError, Points, plain_tracking
from tests.benchmarks.search.graphs import Axis, rnn, transformer, wide_resnet

PLAIN_LIMIT_S = float(os.environ.get("TENSOROPT_BENCH_LIMIT_S", "25"))
"""A method that takes longer on one size is not tried on the next."""
RUNS, ENOUGH_S = 5, 10.0
"""Medians are of so many runs, of fewer where these take so long together."""
PLAIN_MESH = (Axis(4, 2e10), Axis(4))
FINE_MESH = (Axis(4, 2e10), Axis(2), Axis(2))
CASES: dict[str, tuple[Callable[[int], CostGraph], tuple[int, ...]]] = {
    "RNN": (lambda n: rnn(n, FINE_MESH), (2, 4, 8)),
    "WideResNet": (lambda n: wide_resnet(n, PLAIN_MESH), (3, 6, 12, 24)),
    "Transformer": (lambda n: transformer(n, PLAIN_MESH), (1, 2, 4, 8, 16)),
}
"""The paper's three shapes at 16 devices, by layers or blocks."""
KERNELS = {"kernels_ldp": "ldp", "kernels_elimination": "elimination"}
COLUMNS = {
    "ours": "ours",
    "ours_one_thread": "ours, one thread",
    "kernels_ldp": "FT-LDP, our kernels",
    "kernels_elimination": "FT-Elimination, our kernels",
    "ldp": "FT-LDP, numpy",
    "elimination": "FT-Elimination, numpy, branches first",
    "elimination_node_first": "FT-Elimination, numpy, nodes first",
}
THEIR_TITLES = (
    "model", "FT-LDP, theirs", "without threads", "here", "FT-Elimination, theirs", "branches first",
    "nodes first", "ours, one thread", "ours",
)  # fmt: skip
RATIOS = {
    "compiled: FT-LDP": ("ldp", "kernels_ldp"),
    "compiled: FT-Elimination": ("elimination", "kernels_elimination"),
    "algorithm: FT-LDP": ("kernels_ldp", "ours_one_thread"),
    "algorithm: FT-Elimination": ("kernels_elimination", "ours_one_thread"),
    "threads": ("ours_one_thread", "ours"),
    "branches first over FT-LDP": ("elimination", "ldp"),
    "nodes first over FT-LDP": ("elimination_node_first", "ldp"),
}


def size(graph: CostGraph) -> dict[str, int]:
    return {
        "operators": len(graph),
        "most_configurations": max(len(v.memory) for v in graph.variables),
    }


def repeated(run: Callable[[], Any]) -> tuple[float, int, Any]:
    """(median seconds, how many runs it is of, what the last one found)."""
    spent: list[float] = []
    while len(spent) < RUNS and sum(spent) < ENOUGH_S:
        start = time.perf_counter()
        found = run()
        spent.append(time.perf_counter() - start)
    return statistics.median(spent), len(spent), found


def ways(graph: CostGraph) -> dict[str, Callable[[], Points]]:
    """Every way to the frontier by its name, as a function that gives memory and time of its points."""

    def tracked(**settings: Any) -> Callable[[], Points]:
        def run() -> Points:
            found = track_frontier(graph, epsilon=0.0, **settings)
            return found.memory, found.time

        return run

    def plain(method: str) -> Callable[[], Points]:
        return lambda: plain_tracking(graph, method, PLAIN_LIMIT_S)

    return {
        "ours": tracked(),
        "ours_one_thread": tracked(threads=1),
        **{name: tracked(method=method, threads=1) for name, method in KERNELS.items()},
        **{method: plain(method) for method in ORDERS},
    }


def published(quick: bool) -> list[dict[str, Any]]:
    """A row per model and size; of each way its seconds, its runs, how many times ours it takes, and whether
    its points are ours."""
    rows = []
    for model, (make, sizes) in CASES.items():
        late: set[str] = set()
        for n in sizes[:1] if quick else sizes:
            graph = make(n)
            row = {"model": model, "layers": n, **size(graph), **compared(ways(graph), late)}
            late |= {name for name in COLUMNS if isinstance(row[f"{name}_s"], str)}
            rows.append(row)
            print(row, flush=True)
    return rows


def compared(of: dict[str, Callable[[], Points]], late: set[str]) -> dict[str, Any]:
    """Seconds and runs of every way, ours first. Those of ``late`` are not run: they have passed the limit on
    a smaller size."""
    row: dict[str, Any] = {}
    points: Points | None = None
    for name, run in of.items():
        try:
            if name in late:
                raise OutOfTimeError
            seconds, runs, found = repeated(run)
        except OutOfTimeError:
            row |= {f"{name}_s": f"> {PLAIN_LIMIT_S:.0f}", f"{name}_runs": int(name not in late)}
            continue
        if points is None:
            points, row["points"] = found, len(found[0])
        row |= {f"{name}_s": seconds, f"{name}_runs": runs}
        row[f"{name}_same"] = all(map(np.array_equal, found, points))
    return row


def ratio(row: dict[str, Any], slow: str, fast: str) -> float | str | None:
    """Seconds of one way over another's; a bound where the slow one ran out of time, None where the other
    did."""
    above, below = row[f"{slow}_s"], row[f"{fast}_s"]
    if isinstance(below, str):
        return None
    return f"> {PLAIN_LIMIT_S / below:.3g}" if isinstance(above, str) else above / below


def told(rows: Sequence[dict[str, Any]]) -> str:
    """Every way and size, what is algorithm and what compilation, and the paper's table."""
    about = ("model", "layers", "operators", "most_configurations", "points")
    return page(
        (
            f"Median seconds of {RUNS} runs, of fewer where these take more than {ENOUGH_S:.0f} s together.",
            "Numpy is interpreted and runs on one thread; our kernels are compiled, and run the paper's",
            "algorithms on one thread. *Branches first*: operators with one neighbour are eliminated before",
            "those with two; *nodes first*: after them. *Same*: all that ended found the same points. *>*: a",
            "limit that was passed on this size or on a smaller one of the model.",
        ),
        table(
            [*about, *COLUMNS.values(), "same"],
            (
                _shown([*(row[key] for key in about), *(row[f"{key}_s"] for key in COLUMNS), _same(row)])
                for row in rows
            ),
        ),
        (
            "How many times as long: *compiled* is numpy over our kernels, at one algorithm and on one",
            "thread; *algorithm* is the paper's over ours, both on our kernels and one thread; *threads* is",
            "ours with one thread over ours with one per core. The last two are FT-Elimination over FT-LDP,",
            "both numpy.",
        ),
        table(
            ["model", "layers", *RATIOS],
            (
                _shown([row["model"], row["layers"], *(ratio(row, *pair) for pair in RATIOS.values())])
                for row in rows
            ),
        ),
        (
            "TensorOpt's Table 3, seconds; *theirs*: the authors' machine, code and model sizes; *without",
            "threads* is its third row. *Here* the same algorithms are numpy, on one thread, on the largest",
            "size on which FT-LDP and FT-Elimination (branches first) end in time. In the paper",
            "FT-Elimination takes 6 to 15 times as long as FT-LDP; here that depends on the order of its",
            "eliminations, and the table above has both.",
        ),
        table(THEIR_TITLES, map(_shown, _theirs(rows))),
    )


def _shown(cells: Iterable[Any]) -> list[str]:
    return ["" if c is None else f"{c:.3g}" if isinstance(c, float) else str(c) for c in cells]


def _same(row: dict[str, Any]) -> str:
    return "yes" if all(value for key, value in row.items() if key.endswith("_same")) else "no"


def _theirs(rows: Sequence[dict[str, Any]]) -> Iterator[list[Any]]:
    """Yield the paper's rows, beside the largest size that its algorithms, as done here, finished."""
    for model, theirs in SEARCHES.items():
        of = [row for row in rows if row["model"] == model]
        done = [row for row in of if all(isinstance(row[k], float) for k in ("ldp_s", "elimination_s"))]
        for row in done[-1:]:
            yield [
                f"{model}, here {row['layers']} layers", theirs.ldp, theirs.ldp_one_thread, row["ldp_s"],
                theirs.elimination, row["elimination_s"], row["elimination_node_first_s"],
                row["ours_one_thread_s"], row["ours_s"],
            ]  # fmt: skip
