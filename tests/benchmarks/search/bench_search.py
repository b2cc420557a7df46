"""What the search costs, against the published methods. Not a test.

    python -m tests.benchmarks.search.bench_search [--quick] [section ...]

Sections: published, budgets, scaling. Every section runs in this process on
the same cost tables, after a warm-up, and is written as soon as it is done: results of all sections of a run
stand in tests/benchmarks/results/search/DATE-search.{json,md}, those of ``--quick`` in out/search.
"""

from __future__ import annotations

import argparse
import time
import traceback
from pathlib import Path

import numpy as np

from tensoropt.search import track_frontier
from tests.benchmarks.machine import Taking, dated, write
from tests.benchmarks.search.budget_baselines import binned, integer_program, lambda_bisection
from tests.benchmarks.search.graphs import Axis, rnn, transformer
from tests.benchmarks.search.published import FINE_MESH, PLAIN_LIMIT_S, PLAIN_MESH, published, size
from tests.benchmarks.search.report import markdown

PROGRAM_LIMIT_S = 1.6 * PLAIN_LIMIT_S
EIGHT = (Axis(2, 2e10), Axis(4))


def timed(graph, repeats: int = 3, **settings):
    """(seconds of the fastest of some runs, frontier)."""
    best, found = np.inf, None
    for _ in range(repeats):
        start = time.perf_counter()
        found = track_frontier(graph, **settings)
        best = min(best, time.perf_counter() - start)
        if best > 5:
            break
    return best, found


def budgets(quick: bool) -> list[dict]:
    """One integer program per budget (HiGHS), weighted sums, and memory in bins, on the same tables."""
    rows = []
    for layers, mesh, name in ((1, EIGHT, "2x4"),) if quick else ((2, EIGHT, "2x4"), (12, EIGHT, "2x4")):
        graph = transformer(layers, mesh)
        seconds, found = timed(graph)
        row = {"layers": layers, "mesh": name, "ours_s": seconds, "points": len(found)}
        start = time.perf_counter()
        row["bisection_points"] = lambda_bisection(graph, 1e-3)
        row["bisection_s"] = time.perf_counter() - start
        print("  frontier and weighted sums done", flush=True)
        middle = len(found) // 2
        spent, best = integer_program(graph, float(found.memory[middle]) * (1 + 1e-9), PROGRAM_LIMIT_S)
        row["one_budget_highs_s"] = spent if best is not None else f"> {PROGRAM_LIMIT_S:.0f}"
        if best is not None:
            row["highs_same"] = bool(abs(best / found.time[middle] - 1) < 1e-5)
        print("  integer program done", flush=True)
        bins = 256 if quick else 1024
        binned(transformer(1, (Axis(2),)), 1e12, 4, PLAIN_LIMIT_S)  # compile
        start = time.perf_counter()
        coarse = binned(graph, float(found.memory[-1]), bins, PLAIN_LIMIT_S)
        row["bins"] = bins
        row["binned_s"] = f"> {PLAIN_LIMIT_S:.0f}" if coarse is None else time.perf_counter() - start
        if coarse is not None and len(coarse[0]):
            exact = found.time[np.searchsorted(found.memory, coarse[0] * (1 + 1e-12), side="right") - 1]
            slower = coarse[1] / exact - 1
            row |= {"binned_median_slower": float(np.median(slower)), "binned_worst_slower": slower.max()}
            row["binned_least_memory"] = float(coarse[0][0] / found.memory[0])
        rows.append({k: float(v) if isinstance(v, np.floating) else v for k, v in row.items()})
        print(rows[-1], flush=True)
    return rows


def scaling(quick: bool) -> list[dict]:
    """Ours alone: layers at one mesh, then meshes (configurations) at one number of layers."""
    layers = (1, 2) if quick else (2, 4, 8, 16, 32, 64)
    meshes = {"16": (Axis(16, 2e10),), "4x4": PLAIN_MESH, "4x2x2": FINE_MESH}
    jobs = [("layers", n, "4x4") for n in layers]
    jobs += [("mesh", n, mesh) for n in layers[:2] for mesh in list(meshes)[: 2 if quick else None]]
    rows = []
    for swept, n, mesh in jobs:
        graph = transformer(n, meshes[mesh])
        seconds, found = timed(graph)
        row = {"swept": swept, "layers": n, "mesh": mesh, **size(graph), "points": len(found)}
        rows.append({**row, "seconds": seconds, "exact": found.exact})
        print(rows[-1], flush=True)
    return rows


SECTIONS = {f.__name__: f for f in (published, budgets, scaling)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sections", nargs="*", help=f"of {', '.join(SECTIONS)}; default: all")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it works")
    parser.add_argument("--out", type=Path, help="where the results go")
    options = parser.parse_args()
    if unknown := [name for name in options.sections if name not in SECTIONS]:
        parser.error(f"unknown section {unknown[0]!r}; choose from {', '.join(SECTIONS)}")
    stem = dated("search", "search", quick=options.quick, out=options.out)
    taking = Taking()
    results: dict = {**taking.about, "taken": {}}
    track_frontier(rnn(2, PLAIN_MESH))  # compile or load the kernels
    begin = time.perf_counter()
    for name in options.sections or SECTIONS:
        print(f"[{time.perf_counter() - begin:.0f} s] {name}", flush=True)
        try:
            results[name] = SECTIONS[name](options.quick)
        except Exception as error:  # the other sections are worth having
            traceback.print_exc()
            results[name] = [{"error": f"{type(error).__name__}: {error}"}]
        results["taken"][name] = taking.part()
        write(stem, results, markdown(results))
    print(f"[{time.perf_counter() - begin:.0f} s] written to {stem}.json and .md", flush=True)


if __name__ == "__main__":
    main()
