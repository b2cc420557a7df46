"""NetSplit's Tables 6-3 and 6-4: its four models, at its sizes, placed on its three cards.

    python -m tests.benchmarks.papers.netsplit [--quick] [section ...]

Sections: sizes (Table 6-3: nodes and memory), steps (Table 6-4: samples per second of each planner), tight
(the same in less memory, as the thesis counts more bytes of a model than the simulator). All is simulated
from data-sheet figures of the preset ``netsplit-paper``; nothing was run on GPUs, so that only ratios within
a table may be set beside ratios of the thesis. Results:
tests/benchmarks/results/papers/DATE-netsplit.{json,md}.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace

from tensoropt import zoo
from tensoropt.capture import capture
from tensoropt.cluster import load_cluster
from tensoropt.costs.source import CostSource
from tensoropt.errors import TensorOptError
from tensoropt.evaluation.problem import prepare_graph
from tensoropt.placement import PlacementProblem, simulate_placement
from tensoropt.placement.prices import PlacedPrices
from tensoropt.planners.placed.common.bound import lower_bound_s
from tensoropt.profiling.store import ProfileStore
from tensoropt.question.settings import Settings
from tests.benchmarks.machine import Results
from tests.benchmarks.papers.netsplit_report import CASES, CLUSTER, PLANNERS, Case, Row, markdown
from tests.zoo.statistics import count

SOLVER_S = 120.0
"""The solvers' seconds: more than their defaults, as a clock must not end them on a busy machine."""
SMALL = {"U-Net": replace(CASES["U-Net"], name="unet-tiny", settings={}, batch=4)}


def sizes(cases: Mapping[str, Case], quick: bool) -> Iterator[Row]:
    """Nodes and memory of the models, beside Table 6-3."""
    for title, case in cases.items():
        figures = count(case.name, batch=128, **case.settings)
        yield {
            "section": "sizes",
            "key": f"{title}, sizes",
            "model": title,
            "operators": figures.operators,
            "groups": figures.groups,
            "parameter_bytes": figures.parameter_bytes,
            "kept_bytes": figures.kept_bytes,
            "output_bytes": figures.output_bytes,
        }


def steps(cases: Mapping[str, Case], quick: bool) -> Iterator[Row]:
    """The simulated step of every planner, with all memory of the devices."""
    for title, case in cases.items():
        yield from _steps("steps", title, case, priced(case), None, quick)


def tight(cases: Mapping[str, Case], quick: bool) -> Iterator[Row]:
    """The same within so little memory that the model fills as much of the devices as in the thesis."""
    for title, case in cases.items():
        problem = priced(case)
        held = sum(problem.step_bytes(o) for o in range(problem.size))
        limit = held / case.filled(float(problem.devices.capacity_bytes.sum())) / problem.devices.count
        yield from _steps("tight", title, case, problem, limit, quick)


def _steps(
    section: str, title: str, case: Case, problem: PlacementProblem, limit: float | None, quick: bool
) -> Iterator[Row]:
    for name in PLANNERS:
        key = f"{title}, {name}" if limit is None else f"{title}, tight, {name}"
        row = {"section": section, "key": key, "model": title, "planner": name}
        row |= {"batch": case.batch, "operators": problem.size, "bound_s": lower_bound_s(problem)}
        yield row | {"limit_bytes": limit} | _placed(name, problem, limit, quick)


def priced(case: Case) -> PlacementProblem:
    """A model's operators on single devices, from data sheets."""
    built = zoo.build(case.name, device="meta", batch=case.batch, **case.settings)
    graph = prepare_graph(capture(built.model, built.args, built.kwargs).graph).graph
    cluster = load_cluster(CLUSTER)
    with ProfileStore() as store:
        return (
            PlacedPrices(graph, cluster, CostSource(cluster, store, Settings(process_memory=False), None))
            .price()
            .problem
        )


def _placed(name: str, problem: PlacementProblem, limit: float | None, quick: bool) -> Row:
    module = importlib.import_module(f"tensoropt.planners.placed.{name}")
    defaults = getattr(module, "DEFAULTS", None)
    # Only the planners that solve have settings.
    settings = {} if defaults is None else {"settings": replace(defaults, seconds=2.0 if quick else SOLVER_S)}
    begun = time.perf_counter()
    try:
        answer = module.place(problem, limit, 0, **settings)
    except TensorOptError as error:
        return {"refused": str(error)}
    spent = time.perf_counter() - begun
    simulated = simulate_placement(problem, answer.placement)
    return {
        "time_s": simulated.time_s,
        "memory_bytes": simulated.memory_bytes,
        "search_s": spent,
        "notes": answer.notes,
    }


SECTIONS = {"sizes": sizes, "steps": steps, "tight": tight}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("sections", nargs="*", help=f"of {', '.join(SECTIONS)}; default: all")
    parser.add_argument("--quick", action="store_true", help="a small model, written into out/papers")
    options = parser.parse_args()
    if unknown := [name for name in options.sections if name not in SECTIONS]:
        parser.error(f"unknown section {unknown[0]!r}; choose from {', '.join(SECTIONS)}")
    results = Results("papers", "netsplit", {}, quick=options.quick)
    for name in options.sections or SECTIONS:
        for row in SECTIONS[name](SMALL if options.quick else CASES, options.quick):
            results.add("key", row)
            results.write(markdown(results.data))
            print(row, flush=True)
    print(markdown(results.data))


if __name__ == "__main__":
    main()
