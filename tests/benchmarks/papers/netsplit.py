"""NetSplit's Tables 6-3 and 6-4: its four models, at its sizes, placed on its three cards.

    python -m tests.benchmarks.papers.netsplit [--quick] [section ...]

Sections: sizes (Table 6-3: nodes and memory), steps (Table 6-4: samples per second of each planner). One
judge simulates every placement from data-sheet figures of the preset ``netsplit-paper``; nothing was run on
GPUs, so that only ratios within a table may be set beside ratios of the thesis. Results:
tests/benchmarks/results/papers/DATE-netsplit.{json,md}.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tensoropt import zoo
from tensoropt.capture import capture
from tensoropt.cluster import load_cluster
from tensoropt.costs.source import CostSource
from tensoropt.errors import TensorOptError
from tensoropt.evaluation.problem import prepare_graph
from tensoropt.placement import PlacementProblem, simulate_placement
from tensoropt.placement.prices import PlacedPrices
from tensoropt.planners.placed.exact.variables import lower_bound_s
from tensoropt.profiling.store import ProfileStore
from tensoropt.question.settings import Settings
from tests.benchmarks.machine import Results, described
from tests.zoo.statistics import count

CLUSTER = "netsplit-paper"
BASELINES = ("pesto_extended", "m_topo", "m_etf", "m_sct")
"""The thesis' own baselines, in the order of its table."""
PLANNERS = (*BASELINES, "netsplit_published", "netsplit")
TITLES = ("Pesto, extended", "m-TOPO", "m-ETF", "m-SCT", "NetSplit as published", "NetSplit, ours")
SOLVER_S = 120.0
"""The solvers' seconds: more than their defaults, as a clock must not end them on a busy machine."""
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model of the thesis.

    Attributes:
        name, settings: its model of the zoo, and the builder's settings.
        batch: its batch in Table 6-4; in Table 6-3 all have 128.
        nodes, megabytes: Table 6-3.
        rates: Table 6-4, average samples per second: the four baselines, then NetSplit.
        seconds: Table 6-4, seconds of a batch, in the same order.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    batch: int
    nodes: int
    megabytes: float
    rates: tuple[float, ...]
    seconds: tuple[float, ...]


CASES = {
    "AmoebaNet-D": Case(
        name="amoebanet-d",
        batch=64,
        nodes=784,
        megabytes=117_756.06,
        rates=(30.17, 36.46, 19.59, 28.82, 41.83),
        seconds=(2.13, 1.75, 3.26, 2.22, 1.55),
    ),
    "Wide ResNet-152": Case(
        name="wide-resnet-152",
        settings={"width": 2},
        batch=64,
        nodes=388,
        megabytes=115_179.77,
        rates=(38.66, 39.81, 34.15, 32.26, 42.34),
        seconds=(1.66, 1.59, 1.87, 1.98, 1.53),
    ),
    "U-Net": Case(
        name="unet",
        settings={"image": 224},
        batch=128,
        nodes=134,
        megabytes=50_121.92,
        rates=(38.66, 33.35, 37.69, 37.60, 40.36),
        seconds=(3.31, 3.84, 3.40, 3.40, 3.11),
    ),
    "DeepLab-V3": Case(
        name="deeplab-v3",
        settings={"depth": 152, "encoder_width": 2, "image": 224},
        batch=48,
        nodes=417,
        megabytes=168_094.43,
        rates=(11.58, 16.18, 14.00, 12.80, 18.39),
        seconds=(4.15, 2.97, 3.43, 3.73, 2.79),
    ),
}
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
    """The simulated step of every planner."""
    for title, case in cases.items():
        problem = priced(case)
        for name in PLANNERS:
            row = {"section": "steps", "key": f"{title}, {name}", "model": title, "planner": name}
            row |= {"batch": case.batch, "operators": problem.size, "bound_s": lower_bound_s(problem)}
            yield row | _placed(name, problem, quick)


def priced(case: Case) -> PlacementProblem:
    """A model's operators on single devices, from data sheets."""
    built = zoo.build(case.name, device="meta", batch=case.batch, **case.settings)
    graph = prepare_graph(capture(built.model, built.args, built.kwargs).graph).graph
    cluster = load_cluster(CLUSTER)
    with ProfileStore() as store:
        return PlacedPrices(graph, cluster, CostSource(cluster, store, Settings(), None)).price().problem


def _placed(name: str, problem: PlacementProblem, quick: bool) -> Row:
    module = importlib.import_module(f"tensoropt.planners.placed.{name}")
    defaults = getattr(module, "DEFAULTS", None)
    # Only the planners that solve have settings.
    settings = {} if defaults is None else {"settings": replace(defaults, seconds=2.0 if quick else SOLVER_S)}
    begun = time.perf_counter()
    try:
        answer = module.place(problem, None, 0, **settings)
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


SECTIONS = {"sizes": sizes, "steps": steps}


def markdown(data: dict[str, Any]) -> str:
    rows = data["rows"]
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        if row["section"] == "steps":
            found.setdefault(row["model"], {})[row["planner"]] = row
    lines = [
        f"# NetSplit's comparison, {data['date']}",
        "",
        f"Steps on `{CLUSTER}`, simulated by the judge from data-sheet figures. The thesis ran its own on",
        "its cards: only ratios within a table may be set beside ratios of the thesis.",
        "",
        f"Taken from {described(data)}.",
        "",
        "## Table 6-4: samples per second",
        "",
        "| model | batch | | " + " | ".join(TITLES) + " |",
        "|" + " --- |" * (3 + len(TITLES)),
    ]
    for title, of in found.items():
        case = CASES[title]
        ours = [_rate(of.get(name)) for name in PLANNERS]
        lines.append(_line([title, str(next(iter(of.values()))["batch"]), "here", *ours]))
        paper = [f"{rate:.2f}" for rate in case.rates]
        lines.append(_line(["", str(case.batch), "paper", *paper, ""]))
    lines += [
        "",
        "## Ours over the best baseline",
        "",
        "*At most* is what a step that no placement beats would give: the longest chain of operators, or all",
        "work spread evenly, beside the same baseline. *Closed* is our share of that gap.",
        "",
        "| model | best baseline | ours: samples/s | seconds | at most | closed "
        "| paper's best baseline | paper: samples/s | seconds | reached |",
        "|" + " --- |" * 10,
        *(line for title, of in found.items() if (line := _ratio(title, of))),
        "",
        "## Table 6-3: nodes and memory at batch 128",
        "",
        "The thesis says neither what a node is nor whose bytes its memory counts. Here: operators after",
        "decomposition, and the groups that are placed; parameters, what backward keeps, and all outputs.",
        "",
        "| model | operators | groups | paper: nodes | parameters, MB | kept | outputs | paper: MB "
        "| paper over outputs |",
        "|" + " --- |" * 9,
    ]
    for row in rows:
        if row["section"] == "sizes":
            case = CASES[row["model"]]
            size = {name: row[f"{name}_bytes"] / 2**20 for name in ("parameter", "kept", "output")}
            cells = [row["model"], f"{row['operators']:,}", f"{row['groups']:,}", str(case.nodes)]
            cells += [f"{each:,.0f}" for each in (*size.values(), case.megabytes)]
            lines.append(_line([*cells, f"{case.megabytes / size['output']:.2f}"]))
    lines += ["", "## Notes of the planners", ""]
    for of in found.values():
        for name, row in of.items():
            said = row["refused"] if "refused" in row else "; ".join(row["notes"])
            lines.append(
                f"- {row['model']}, {name}" + (f" ({row['search_s']:.0f} s)" if "notes" in row else "")
            )
            lines[-1] += f": {said}" if said else ""
    return "\n".join(lines) + "\n"


def _ratio(title: str, of: Mapping[str, Row]) -> str:
    """Ours over the best baseline, what is possible at all, and the thesis' own ratio."""
    case = CASES[title]
    known = {name: of[name]["time_s"] for name in BASELINES if "time_s" in of.get(name, {})}
    if not known or "time_s" not in of.get("netsplit", {}):
        return ""
    best = min(known, key=lambda name: known[name])
    ours_s, bound_s = of["netsplit"]["time_s"], of["netsplit"]["bound_s"]
    paper_best = max(range(len(BASELINES)), key=lambda i: case.rates[i])
    paper_rate = case.rates[-1] / case.rates[paper_best]
    paper_s = case.seconds[-1] / min(case.seconds[:-1])
    reached = [
        word
        for word, is_reached in (
            ("samples/s", known[best] / ours_s >= paper_rate),
            ("seconds", ours_s / known[best] <= paper_s),
        )
        if is_reached
    ]
    return _line(
        [
            title,
            TITLES[PLANNERS.index(best)],
            f"{known[best] / ours_s:.3f}",
            f"{ours_s / known[best]:.3f}",
            f"{known[best] / bound_s:.3f}",
            f"{(known[best] - ours_s) / (known[best] - bound_s):.0%}",
            TITLES[paper_best],
            f"{paper_rate:.3f}",
            f"{paper_s:.3f}",
            " and ".join(reached) or "no",
        ]
    )


def _rate(row: Row | None) -> str:
    if row is None:
        return ""
    return "refuses" if "refused" in row else f"{row['batch'] / row['time_s']:.2f}"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


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
