"""NetSplit's Tables 6-3 and 6-4: its four models, at its sizes, placed on its three cards.

    python -m tests.benchmarks.papers.netsplit [--quick] [section ...]

Sections: sizes (Table 6-3: nodes and memory), steps (Table 6-4: samples per second of each planner), tight
(the same in less memory, as the thesis counts more bytes of a model than the simulator). All is simulated
from data-sheet figures of the preset ``netsplit-paper``; nothing was run on GPUs, so that only ratios within
a table may be set beside ratios of the thesis. Results:
tests/benchmarks/results/papers/DATE-netsplit.{json,md}.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace

from tensoropt.cluster import load_cluster
from tensoropt.placement import PlacementProblem
from tensoropt.planners.placed.common.bound import lower_bound_s
from tensoropt.profiling.store import ProfileStore
from tests.benchmarks.papers.netsplit_report import CASES, CLUSTER, PLANNERS, Case, markdown
from tests.benchmarks.papers.planned import played, priced
from tests.benchmarks.program import Row, run_parts
from tests.zoo.statistics import count

COUNTED = ("operators", "groups", "parameter_bytes", "kept_bytes", "output_bytes")
SOLVER_S = 120.0
"""The solvers' seconds: more than their defaults, as a clock must not end them on a busy machine."""
SMALL = {"U-Net": replace(CASES["U-Net"], name="unet-tiny", settings={}, batch=4)}


def sizes(quick: bool) -> Iterator[Row]:
    """Nodes and memory of the models, beside Table 6-3."""
    for title, case in (SMALL if quick else CASES).items():
        figures = count(case.name, batch=128, **case.settings)
        yield {
            "section": "sizes",
            "key": f"{title}, sizes",
            "model": title,
            **{name: getattr(figures, name) for name in COUNTED},
        }


def steps(quick: bool) -> Iterator[Row]:
    """The simulated step of every planner, with all memory of the devices."""
    for title, case in (SMALL if quick else CASES).items():
        yield from _steps("steps", title, case, problem_of(case), None, quick)


def tight(quick: bool) -> Iterator[Row]:
    """The same within so little memory that the model fills as much of the devices as in the thesis."""
    for title, case in (SMALL if quick else CASES).items():
        problem = problem_of(case)
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


def problem_of(case: Case) -> PlacementProblem:
    """A model's operators on single devices, from data sheets."""
    with ProfileStore() as store:
        options = tuple(case.settings.items())
        return priced(case.name, case.batch, load_cluster(CLUSTER), store, options).problem


def _placed(name: str, problem: PlacementProblem, limit: float | None, quick: bool) -> Row:
    module = importlib.import_module(f"tensoropt.planners.placed.{name}")
    defaults = getattr(module, "DEFAULTS", None)
    # Only the planners that solve have settings.
    settings = {} if defaults is None else {"settings": replace(defaults, seconds=2.0 if quick else SOLVER_S)}
    return played(lambda: (problem, module.place(problem, limit, 0, **settings)))


SECTIONS = {"sizes": sizes, "steps": steps, "tight": tight}


if __name__ == "__main__":
    run_parts(
        __doc__,
        "a small model, written into out/papers",
        ("papers", "netsplit"),
        SECTIONS,
        lambda data: (markdown(data), None),
        key="key",
    )
