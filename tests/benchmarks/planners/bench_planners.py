"""What placing planners take: large random graphs, and OS-DPOS on the Transformer.

    python -m tests.benchmarks.planners.bench_planners [--quick] [--out FOLDER]

Seconds are of the process, so that they hold on a busy machine. A row with a limit books memory and includes
every attempt that the judge sent back, and the judge itself.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tensoropt.capture import capture
from tensoropt.cluster import load_cluster
from tensoropt.costs.source import CostSource
from tensoropt.errors import TensorOptError
from tensoropt.evaluation.problem import prepare_graph
from tensoropt.placement import simulate_placement
from tensoropt.placement.prices import PlacedPrices, PricedGraph
from tensoropt.planners.placed.os_dpos import placements
from tensoropt.profiling.store import ProfileStore
from tensoropt.question.model_source import load_model
from tensoropt.question.settings import Settings
from tests.benchmarks.machine import Taking, dated, described, part_described, write
from tests.planners.placed.placements import random_problem

METHODS = ("m_topo", "m_etf", "m_sct", "dpos")
SHAPES = ({"width": 10, "transfer": 2.0}, {"width": 200}, {"width": 200, "mixed": True}, {"width": 2000})


def spent(run: Callable[[], Any]) -> tuple[Any, float]:
    """(what it gives or how it refuses, seconds of the process)."""
    start = time.process_time()
    try:
        found = run()
    except TensorOptError as refusal:
        found = refusal
    return found, round(time.process_time() - start, 2)


def large(quick: bool) -> list[dict[str, Any]]:
    """5,000 operators on 64 devices, without a limit and within 1.1 times what the method then needed."""
    operators, devices = (500, 8) if quick else (5000, 64)
    rows = []
    for shape in SHAPES:
        problem = random_problem(0, operators, devices, **shape)
        for name in METHODS:
            place = importlib.import_module(f"tensoropt.planners.placed.{name}").place
            answer, seconds = spent(lambda p=problem, place=place: place(p, None, 0))
            simulated, judge_s = spent(lambda p=problem, a=answer: simulate_placement(p, a.placement))
            limit = 1.1 * simulated.memory_bytes
            within, limited_s = spent(lambda p=problem, place=place, m=limit: place(p, m, 0))
            rows.append(
                {
                    "method": name,
                    "operators": operators,
                    "devices": devices,
                    "width": shape["width"],
                    "mixed": shape.get("mixed", False),
                    "seconds": seconds,
                    "seconds_with_memory": limited_s,
                    "fits": not isinstance(within, TensorOptError),
                    "judge_s": judge_s,
                    "step_s": round(simulated.time_s, 4),
                }
            )
            print(rows[-1], flush=True)
    return rows


def priced(model: str, cluster: str) -> PricedGraph:
    loaded = load_model(model, device="meta", seed=0)
    found = capture(loaded.model, loaded.args, loaded.kwargs, loss=None, mode="train")
    where = load_cluster(cluster)
    costs = CostSource(where, ProfileStore(":memory:"), Settings(process_memory=False), None)
    return PlacedPrices(prepare_graph(found.graph).graph, where, costs).price()


def transformer(quick: bool) -> list[dict[str, Any]]:
    """OS-DPOS with 8 devices (FastT, table 4: more than an hour), from both of its starts."""
    rows = []
    graph = priced("zoo:transformer-tiny" if quick else "zoo:transformer-base", "dgx-v100")
    alone = simulate_placement(
        graph.problem,
        importlib.import_module("tensoropt.planners.placed.dpos").place(graph.problem, None, 0).placement,
    )
    for limit in (None, 0.55 * alone.memory_bytes):
        found, seconds = spent(lambda m=limit: placements(graph, m, 0))
        row: dict[str, Any] = {"limit_gib": limit and round(limit / 2**30, 3), "seconds": seconds}
        if isinstance(found, TensorOptError):
            row["refused"] = str(found)
        else:
            ((split, answer),) = found
            step = simulate_placement(split.problem, answer.placement).time_s
            row |= {
                "operators": split.problem.size,
                "step_s": round(step, 4),
                "dpos_step_s": round(alone.time_s, 4),
            }
            row["notes"] = "; ".join(answer.notes)
        rows.append(row)
        print(row, flush=True)
    return rows


SECTIONS = {"large graphs": large, "OS-DPOS on the Transformer": transformer}
ABOUT = {
    "large graphs": (
        "Random. width: how far back an operator may read; mixed: devices and links of different speed;"
        " seconds: without a limit of memory; seconds_with_memory: within 1.1 times what that one needs,"
        " the judge's corrections included; judge_s: the judge alone; step_s: its step."
    ),
    "OS-DPOS on the Transformer": (
        "Eight GPUs (`dgx-v100`), without a limit and within 0.55 times what DPOS needs on one of them."
        " FastT's Table 4 reports more than an hour, on its authors' machine."
    ),
}


def markdown(results: dict[str, Any]) -> str:
    """A table per section."""
    lines = [
        f"# Placing planners on large graphs, {results['date']}",
        "",
        f"Taken from {described(results)}. Seconds are of the process.",
    ]
    for section in (name for name in SECTIONS if name in results):
        columns = list(dict.fromkeys(column for row in results[section] for column in row))
        lines += ["", f"## {section}", "", ABOUT[section], ""]
        lines += [f"Taken: {part_described(results['taken'][section])}.", ""]
        lines += [f"| {' | '.join(columns)} |", "|" + " --- |" * len(columns)]
        lines += [f"| {' | '.join(str(row.get(c, '')) for c in columns)} |" for row in results[section]]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it works")
    parser.add_argument("--out", type=Path, help="where the results go")
    options = parser.parse_args()
    stem = dated("planners", "planners", quick=options.quick, out=options.out)
    taking = Taking()
    results: dict[str, Any] = {**taking.about, "taken": {}}
    for name, section in SECTIONS.items():
        results[name] = section(options.quick)
        results["taken"][name] = taking.part()
        write(stem, results, markdown(results))
    print(f"written to {stem}.json and .md")


if __name__ == "__main__":
    main()
