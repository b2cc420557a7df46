"""Models with branches: what the search over placements gains, and whether planners beat explorations.

    python -m tests.benchmarks.planners.bench_branching [--quick] [--section placing|dominance ...]
        [--models NAME ...] [--clusters NAME ...] [--seconds S]
        [--planners NAME ...] [--planner-option NAME.OPTION=VALUE ...]

placing: the published heuristics that place operators, and beside them the local and the cut search, with a
third and two thirds of so many seconds of effort, all by the simulator. dominance: an exploration, then
planners on its very tables, without a limit and within amounts of memory along the frontier: whether a plan
of theirs beats a point, and by how much.

Rows of a day are kept, so that the grid may be run in parts, one model after another.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import cached_property
from statistics import median
from typing import Any

from tensoropt import zoo
from tensoropt.api import _evaluated, _model_info
from tensoropt.capture import Capture, capture
from tensoropt.cluster import load_cluster
from tensoropt.costs.source import CostSource
from tensoropt.errors import TensorOptError
from tensoropt.evaluation.problem import prepare_graph
from tensoropt.placement import SimulatedPlacement, simulate_placement
from tensoropt.placement.prices import PlacedPrices, PricedGraph
from tensoropt.plan.point import Point, beats
from tensoropt.planners.compare import requested_planners
from tensoropt.planners.placed.common.bound import lower_bound_s
from tensoropt.planners.placed.common.starting import heuristics
from tensoropt.planners.placed.cut_search import CutSearch
from tensoropt.planners.placed.cut_search import placements as cut_placements
from tensoropt.planners.placed.local_search import LocalSearch
from tensoropt.planners.registry import ENTRIES, Entry
from tensoropt.profiling.store import ProfileStore
from tensoropt.question.model_source import LoadedModel, load_model
from tensoropt.question.settings import Settings
from tensoropt.session.comparing import planning_task
from tensoropt.session.searched import search
from tensoropt.session.session import Session
from tensoropt.units import format_seconds
from tests.benchmarks.machine import Results, described, rows_described
from tests.planners.placed.placements import places

PAPER = ("inception-v3", "amoebanet-d", "deeplab-v3", "unet", "two-tower", "clip")
MODELS = (*(f"{name}-tiny" for name in PAPER), *PAPER)
CLUSTERS = ("dgx-a100[2]", "dgx-a100[4]", "netsplit-paper", "local:2")
"""``local:2`` is priced from data sheets, too: this is about plans, not about this machine."""
BATCHES = {"inception-v3": 16, "amoebanet-d": 16}
"""Batches that fit clusters whose devices together have 24 GiB; else the zoo's own."""
SLOW = ("flexflow", "ilp", "pesto", "netsplit", "netsplit_shared")
"""Planners that are run only if named: they take minutes for a model of the zoo at laptop size."""
SETTINGS = Settings(measure="never", process_memory=False)
LIMITS = (0.25, 0.5, 0.75)
"""The shares of an exploration's points that lie within the limits given to planners, leanest first."""
Row = dict[str, Any]


class Model:
    """A model of the zoo, captured once for all clusters."""

    def __init__(self, name: str):
        self.batch = BATCHES.get(name, zoo.entry(name).batch)
        self.loaded: LoadedModel = load_model(f"zoo:{name}", batch=self.batch, device="meta", seed=0)

    @cached_property
    def captured(self) -> Capture:
        return capture(self.loaded.model, self.loaded.args, self.loaded.kwargs, mode=SETTINGS.mode)


def spent(run: Callable[[], Any]) -> tuple[Any, float]:
    """(what it gives, or how it refuses; seconds of the process)."""
    start = time.process_time()
    try:
        found = run()
    except TensorOptError as refusal:
        found = refusal
    return found, round(time.process_time() - start, 1)


def placing(model: Model, cluster: str, seconds: float) -> Row:
    """The fastest published heuristic, and what the searches over placements find, in one micro-batch."""
    where = load_cluster(cluster)
    with ProfileStore() as store:
        costs = CostSource(where, store, SETTINGS, None)
        problem = prepare_graph(model.captured.graph, kept=None)
        return placed_row(PlacedPrices(problem.graph, where, costs).price(), seconds)


def placed_row(whole: PricedGraph, seconds: float) -> Row:
    """What heuristics and searches make of a priced graph."""
    graph = whole.problem
    alone, fitting = {}, {}
    for name, placement in heuristics(graph, 0):
        simulated = simulate_placement(graph, placement)
        if simulated.fits():
            (alone if name.endswith("alone") else fitting)[name] = simulated
    row: Row = {"operators": graph.size, "devices": graph.devices.count}
    row["fastest_alone_s"] = min((s.time_s for s in alone.values()), default=None)
    if fitting:
        row["heuristic"] = name = min(fitting, key=lambda n: (fitting[n].time_s, fitting[n].memory_bytes))
        best = fitting[name]
        row |= {"heuristic_s": best.time_s, "heuristic_bytes": best.memory_bytes}
    row["bound_s"] = lower_bound_s(graph)
    answers, row["seconds"] = spent(lambda: places(graph, None, 0, LocalSearch(seconds=seconds / 3)))
    if isinstance(answers, TensorOptError):
        return row | {"refused": str(answers)}
    found = [simulate_placement(graph, answer.placement) for answer in answers]
    cut, row["cut_seconds"] = spent(
        lambda: cut_placements(whole, None, 0, CutSearch(seconds=2 * seconds / 3))
    )
    if isinstance(cut, TensorOptError):
        row["cut_refused"] = str(cut)
    else:
        placed = [simulate_placement(each.problem, answer.placement) for each, answer in cut]
        row |= {"cut_s": placed[-1].time_s, "cut_bytes": placed[-1].memory_bytes}
        found += placed
    fastest_found = min(found, key=lambda each: each.time_s)
    row |= {"search_s": fastest_found.time_s, "search_bytes": fastest_found.memory_bytes}
    if fitting:
        row["gain"] = 1 - fastest_found.time_s / best.time_s
        row["gain_within"] = 1 - _within(found, best.memory_bytes) / best.time_s
    return row


def _within(found: Sequence[SimulatedPlacement], memory_bytes: float) -> float:
    return min((s.time_s for s in found if s.memory_bytes <= memory_bytes), default=float("inf"))


def dominance(model: Model, cluster: str, entries: Sequence[Entry]) -> Row:
    """What planners find beside an exploration, and whether that beats one of its points."""
    with ProfileStore() as store:
        session = Session(load_cluster(cluster), SETTINGS, store)
        searched = search(session, prepare_graph(model.captured.graph, kept=None))
        info = _model_info(session, model.captured, model.loaded)
        explored, seconds = spent(lambda: _evaluated(session, searched, info))
        points = explored.points
        limits = [None, *(points[int(share * (len(points) - 1))].memory_bytes for share in LIMITS)]
        rows: dict[str, Row] = {}
        with ExitStack() as stack:
            kinds = {entry.kind for entry in entries}
            task = planning_task(session, searched, explored, kinds, stack)
            for entry in entries:
                started = time.process_time()
                found: list[Point] = []
                refusals = []
                for limit in limits:
                    try:
                        found += [each.point for each in entry.points(task, limit, 0)]
                    except TensorOptError as refusal:
                        refusals.append(str(refusal))
                rows[entry.name] = {
                    "seconds": round(time.process_time() - started, 1),
                    **beside(points, found),
                    **({} if found else {"refused": refusals[0]}),
                }
                print(f"    {entry.name}: {rows[entry.name]}", flush=True)
    beaten = {name: row["beaten"] for name, row in rows.items() if row["beaten"]}
    return {
        "groups": len(searched.problem.graph.groups),
        "points": len(points),
        "fastest_s": points[-1].time_s,
        "leanest_bytes": points[0].memory_bytes,
        "fastest_of": points[-1].planner,
        "seconds": round(sum(explored.report["seconds"].values()), 1),
        "judged_s": seconds,
        "planners": rows,
        "beaten_by": beaten,
    }


def beside(points: Sequence[Point], found: Sequence[Point]) -> Row:
    """How many points are beaten, and by what share of their time, or of their memory, at most."""
    pairs = [(point, other) for point in points for other in found if beats(other, point)]
    fastest = min(found, key=lambda p: p.time_s, default=None)
    return {
        "plans": len(found),
        "fastest_s": None if fastest is None else fastest.time_s,
        "beaten": len({id(point) for point, _ in pairs}),
        "faster": max((1 - other.time_s / point.time_s for point, other in pairs), default=0.0),
        "leaner": max((1 - other.memory_bytes / point.memory_bytes for point, other in pairs), default=0.0),
    }


def cells(options: argparse.Namespace) -> Iterator[Row]:
    """A row per model, cluster and section; the model is captured once."""
    names = options.planners or [name for name in ENTRIES if name not in SLOW]
    entries = requested_planners(names, options.planner_option)
    for name in options.models:
        model = Model(name)
        for cluster in options.clusters:
            for section in options.section:
                row: Row = {"key": f"{section}, {name}, {cluster}", "section": section}
                row |= {"model": name, "batch": model.batch, "cluster": cluster}
                try:
                    if section == "placing":
                        row |= {"effort_s": options.seconds, **placing(model, cluster, options.seconds)}
                    else:
                        row |= dominance(model, cluster, entries)
                except TensorOptError as refusal:
                    row["refused"] = str(refusal)
                yield row


ABOUT = {
    "placing": (
        "*heuristic*: the fastest of m-TOPO, m-ETF, m-SCT and DPOS that fits. *search*: the fastest plan of"
        " the local search, of whole operators, and of the cut search, which also cuts the batch of some;"
        " *s*: the seconds of the process, of both. *gain*: by how much its step is shorter; *within*: of"
        " their plans that need no more memory than the heuristic's; *at most*: what a step of whole"
        " operators as long as their longest chain, or as their work spread evenly, would gain. *cut*: the"
        " step of the cut search. *alone*: the step of the fastest device alone, where the model fits."
    ),
    "dominance": (
        "*points*: of the exploration. *fastest*: its fastest point, and whose that is. *beaten by*: planners"
        " of which a plan beats a point; so many points, and by what share of a point's time and memory at"
        " most. Planners run without a limit, and within the memory of the points a quarter, a half and"
        " three quarters along."
    ),
}


def markdown(results: Results) -> str:
    """A table per section, and the median gain of the search."""
    data = results.data
    lines = [
        f"# Models with branches, {data['date']}",
        "",
        f"Taken from {described(data)}; each row below says its own. Figures are of data sheets.",
    ]
    of_section = {section: [row for row in data["rows"] if row["section"] == section] for section in ABOUT}
    if placed := of_section["placing"]:
        lines += ["", "## The search over placements beside heuristics", "", ABOUT["placing"], ""]
        gains = [(row["gain"], row["gain_within"]) for row in placed if "gain" in row]
        if gains:
            gain, within = (median(of_kind) for of_kind in zip(*gains, strict=True))
            lines += [
                f"Over {len(gains)} cells the median gain is {gain:.1%}, {within:.1%} within the heuristic's"
                f" memory; at least 5 % in {sum(gain >= 0.05 for gain, _ in gains)}.",
                "",
            ]
        lines += _table([_placing_cells(row) for row in placed])
    if tried := of_section["dominance"]:
        lines += ["", "## Explorations beside planners", "", ABOUT["dominance"], ""]
        lines += _table([_dominance_cells(row) for row in tried])
        names = list(dict.fromkeys(name for row in tried for name in row.get("planners", ())))
        lines += ["", f"Planners: {', '.join(names)}."]
    return "\n".join([*lines, "", "## Taken", "", *rows_described(data["rows"], "key")])


def _table(rows: Sequence[dict[str, str]]) -> list[str]:
    columns = list(dict.fromkeys(column for row in rows for column in row))
    head = [f"| {' | '.join(columns)} |", "|" + " --- |" * len(columns)]
    return [*head, *(f"| {' | '.join(row.get(column, '') for column in columns)} |" for row in rows)]


def _placing_cells(row: Row) -> dict[str, str]:
    cells = {"model": row["model"], "batch": str(row["batch"]), "cluster": row["cluster"]}
    if "search_s" not in row:
        return {**cells, "search": row["refused"]}
    alone = row["fastest_alone_s"]
    cells |= {
        "operators": str(row["operators"]),
        "alone": "does not fit" if alone is None else format_seconds(alone),
        "heuristic": f"{row['heuristic']} {format_seconds(row['heuristic_s'])}" if "gain" in row else "none",
        "search": format_seconds(row["search_s"]),
    }
    if "gain" in row:
        cells |= {"gain": f"{row['gain']:.1%}", "within": f"{row['gain_within']:.1%}"}
        cells["at most"] = f"{1 - row['bound_s'] / row['heuristic_s']:.1%}"
    cells["cut"] = format_seconds(row["cut_s"]) if "cut_s" in row else "none"
    seconds = row["seconds"] + row["cut_seconds"]
    return {**cells, "effort": f"{row['effort_s']:g}", "s": f"{seconds:.1f}"}


def _dominance_cells(row: Row) -> dict[str, str]:
    cells = {"model": row["model"], "batch": str(row["batch"]), "cluster": row["cluster"]}
    if "planners" not in row:
        return {**cells, "beaten by": row["refused"]}
    beaten = [
        f"{name}: {p['beaten']}, {p['faster']:.2%} time, {p['leaner']:.2%} memory"
        for name, p in row["planners"].items()
        if p["beaten"]
    ]
    return {
        **cells,
        "groups": str(row["groups"]),
        "points": str(row["points"]),
        "fastest": f"{format_seconds(row['fastest_s'])} of {row['fastest_of']}",
        "beaten by": "; ".join(beaten) or "none",
        "s": f"{row['seconds']:g}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one small model, to see that it works")
    parser.add_argument("--section", nargs="*", default=["placing", "dominance"], choices=tuple(ABOUT))
    parser.add_argument("--models", nargs="*", default=MODELS)
    parser.add_argument("--clusters", nargs="*", default=CLUSTERS)
    parser.add_argument("--seconds", type=float, default=60.0, help="effort of both searches")
    parser.add_argument("--planners", nargs="*", help=f"default: all but {', '.join(SLOW)}")
    parser.add_argument("--planner-option", nargs="*", default=[], help="such as netsplit.seconds=10")
    options = parser.parse_args()
    if options.quick:
        options.models, options.clusters, options.seconds = ("two-tower-tiny",), CLUSTERS[:1], 0.1
    results = Results("planners", "branching", {}, quick=options.quick)
    for row in cells(options):
        print({key: value for key, value in row.items() if key != "planners"}, flush=True)
        results.add("key", row)
        results.write(markdown(results))
    print(f"written to {results.stem}.json and .md")


if __name__ == "__main__":
    main()
