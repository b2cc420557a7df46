"""Placing planners on the papers' clusters: FastT's scaling and order enforcement.

    python -m tests.benchmarks.papers.placing [--quick] [section ...]

Sections: scaling (FastT: strong, one global batch on more devices, and weak, one batch per device; data
parallelism beside DPOS and OS-DPOS), order (FastT: one placement with its order kept, and with every device
taking what is ready first), netsplit (all placing planners on the preset of NetSplit's three cards).
Everything is played by one judge on data-sheet figures; nothing was run on GPUs, so the papers' seconds
are not set beside ours, only FastT's gains (:mod:`.fastt`). Results: tests/benchmarks/results/papers/
DATE-placing.{json,md} and DATE-placing-{scaling,order}.svg.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

from tensoropt import zoo
from tensoropt.api import explore
from tensoropt.capture import capture
from tensoropt.cluster import Cluster, load_cluster
from tensoropt.console import ProgressDisplay
from tensoropt.costs.source import CostSource
from tensoropt.errors import TensorOptError
from tensoropt.evaluation.problem import prepare_graph
from tensoropt.placement import simulate_placement
from tensoropt.placement.prices import PlacedPrices, PricedGraph
from tensoropt.profiling.store import ProfileStore
from tensoropt.question.settings import Settings
from tests.benchmarks.charts import Chart, bars, figure
from tests.benchmarks.machine import Results, described
from tests.benchmarks.papers import fastt

FASTT = "fastt-paper"
DEVICES = (2, 4, 8)
SCALED = ((f"{FASTT}[2]", 2, 1), (f"{FASTT}[4]", 4, 1), (FASTT, 8, 2), ("dgx-v100", 8, 1))
"""Clusters with their GPUs and servers: the paper's has four GPUs per server."""
SCALING = {"alexnet": 256, "vgg19": 64, "inception-v3": 64}
"""Global batch of the strong, batch per device of the weak scaling."""
ORDER = {"alexnet": 256, "vgg19": 64, "inception-v3": 64, "gnmt": 128}
ORDERED = ("dpos", "os_dpos", "m_etf")
POINTS, EPSILON = 50, 0.05
"""Only the frontier's fastest point is shown."""
Row = dict[str, Any]
RATES = {
    "data_parallel": "data parallelism",
    "dpos": "DPOS",
    "os_dpos": "OS-DPOS",
    "frontier": "the frontier's fastest",
}


def scaling(quick: bool) -> Iterator[Row]:
    """Samples per second of data parallelism, DPOS and OS-DPOS."""
    for model, batch in {"lenet": 32}.items() if quick else SCALING.items():
        for kind in ("strong", "weak"):
            for cluster, devices, servers in SCALED[:1] if quick else SCALED:
                samples = batch if kind == "strong" else batch * devices
                row = {"section": "scaling", "key": f"{model}, {kind}, {cluster}", "model": model}
                row |= {"scaling": kind, "devices": devices, "servers": servers, "batch": samples}
                yield row | _scaled(model, cluster, samples)


def _scaled(model: str, cluster: str, samples: int) -> Row:
    built = zoo.build(model, device="meta", batch=samples)
    found = explore(
        built.model, built.args, built.kwargs, cluster=cluster, micro_batches=(1,),
        recompute="never", epsilon=EPSILON, max_points=POINTS, planners=("data_parallel",),
        progress=ProgressDisplay(),
    )  # fmt: skip
    played = {row["planner"]: row for row in found.comparison if row["planner"] != "frontier"}
    with ProfileStore() as store:
        graph = priced(model, samples, load_cluster(cluster), store)
        played |= {name: _played(name, graph) for name in ("dpos", "os_dpos")}
    return {
        "samples_per_s": {
            **{name: samples / row["time_s"] for name, row in played.items() if row.get("time_s")},
            "frontier": samples / found.points[-1].time_s,
        },
        "expected_s": played["os_dpos"].get("expected_s"),
        "busiest": played["os_dpos"].get("busiest"),
        "os_dpos_notes": played["os_dpos"].get("notes", ()),
        "search_s": {name: row["search_s"] for name, row in played.items() if row.get("time_s")},
        "refused": {
            name: row.get("refused") or row["notes"][0]
            for name, row in played.items()
            if not row.get("time_s")
        },
    }


def priced(model: str, batch: int, cluster: Cluster, store: ProfileStore) -> PricedGraph:
    """A model's operators on single devices, from data sheets."""
    built = zoo.build(model, device="meta", batch=batch)
    captured = capture(built.model, built.args, built.kwargs)
    costs = CostSource(cluster, store, Settings(), None)
    return PlacedPrices(prepare_graph(captured.graph).graph, cluster, costs).price()


def placed(name: str, graph: PricedGraph) -> tuple[PricedGraph, Any]:
    """What a placing planner answers, on the graph it leaves; of several answers the fastest."""
    module = importlib.import_module(f"tensoropt.planners.placed.{name}")
    if hasattr(module, "place_split"):
        return module.place_split(graph, None, 0)
    if hasattr(module, "places"):
        return graph, module.places(graph.problem, None, 0)[-1]
    return graph, module.place(graph.problem, None, 0)


def order(quick: bool) -> Iterator[Row]:
    """One placement, played in its order and in the order of readiness."""
    with ProfileStore() as store:
        for model, batch in {"lenet": 32}.items() if quick else ORDER.items():
            for devices in DEVICES:
                graph = priced(model, batch, load_cluster(f"{FASTT}[{devices}]"), store)
                for name in ORDERED:
                    cut, answer = placed(name, graph)
                    kept, free = (
                        simulate_placement(cut.problem, answer.placement, enforced=enforced).time_s
                        for enforced in (True, False)
                    )
                    yield {
                        "section": "order",
                        "key": f"{model}, {devices}, {name}",
                        "model": model,
                        "devices": devices,
                        "planner": name,
                        "enforced_s": kept,
                        "first_ready_s": free,
                    }


def _played(name: str, graph: PricedGraph) -> Row:
    begun = time.perf_counter()
    try:
        graph, answer = placed(name, graph)
    except TensorOptError as error:
        return {"refused": str(error)}
    simulated = simulate_placement(graph.problem, answer.placement)
    spent = time.perf_counter() - begun
    lane, busy_s = simulated.busiest_lane
    return {
        "expected_s": answer.expected_s,
        "busiest": {"lane": lane, "busy_s": busy_s},
        "time_s": simulated.time_s,
        "memory_bytes": simulated.memory_bytes,
        "search_s": spent,
        "notes": answer.notes,
    }


SECTIONS = {"scaling": scaling, "order": order}


def markdown(data: dict[str, Any], stem: str) -> str:
    by_section = {name: [r for r in data["rows"] if r["section"] == name] for name in SECTIONS}
    lines = [
        f"# Placing planners, {data['date']}",
        "",
        "Steps are played by the judge from data-sheet figures. The papers ran theirs on their GPUs, so that",
        "only ratios within a table may be set beside ratios of a paper. Search seconds: see the load.",
        "",
        f"Taken from {described(data)}.",
        "",
        "## Strong and weak scaling (FastT), samples per second",
        "",
        f"![samples per second]({stem}-scaling.svg)",
        "",
        f"Servers of four GPUs (`{FASTT}`), and eight in one (`{SCALED[-1][0]}`). *Expects*: OS-DPOS's own",
        "estimate of its step, in which messages never queue (FastT, section 5.1, equation EST).",
        "*Busiest link*: how long it is occupied in the judge's step, where each device is sent a copy.",
        "",
        "| model | scaling | GPUs | batch | data parallelism | DPOS | OS-DPOS | the frontier's fastest "
        "| OS-DPOS: step | expects | busiest link |",
        "|" + " --- |" * 11,
        *map(_scaling_line, by_section["scaling"]),
        "",
        *_why_slower(by_section["scaling"]),
    ]
    lines += [
        "",
        f"## Order enforcement (FastT), `{FASTT}`",
        "",
        f"![steps without the order, relative to steps with it]({stem}-order.svg)",
        "",
        "| model | GPUs | planner | its order | what is ready first | gain |",
        "|" + " --- |" * 6,
    ]
    for row in by_section["order"]:
        gain = row["first_ready_s"] / row["enforced_s"] - 1
        times = [_ms(row["enforced_s"]), _ms(row["first_ready_s"]), f"{gain:+.1%}"]
        lines.append(_line([row["model"], str(row["devices"]), row["planner"], *times]))
    if gains := [row["first_ready_s"] / row["enforced_s"] - 1 for row in by_section["order"]]:
        lines += ["", f"Under this judge the order is worth between {min(gains):+.1%} and {max(gains):+.1%}."]
    lines += [
        "",
        "## FastT's gains, theirs beside ours",
        "",
        *fastt.beside(by_section["scaling"], by_section["order"]),
    ]
    refused: list[str] = []
    for row in by_section["scaling"]:
        refused += [f"- {row['key']}, {name}: {why}" for name, why in row["refused"].items()]
    return "\n".join([*lines, "", *refused]) + "\n"


def _scaling_line(row: Row) -> str:
    rates = [row["samples_per_s"].get(name) for name in RATES]
    cells = [row["model"], row["scaling"], _gpus(row), str(row["batch"])]
    cells += ["refuses" if rate is None else f"{rate:,.0f}" for rate in rates]
    if rate := row["samples_per_s"].get("os_dpos"):
        step_s, busiest = row["batch"] / rate, row["busiest"]
        cells += [_ms(step_s), _ms(row["expected_s"]), f"{busiest['lane']}, {_ms(busiest['busy_s'])}"]
    else:
        cells += [""] * 3
    return _line(cells)


def _gpus(row: Row) -> str:
    return str(row["devices"]) if row["servers"] == 1 else f"{row['devices']} in {row['servers']} servers"


def _why_slower(rows: Sequence[Row]) -> list[str]:
    """Why OS-DPOS makes less of more GPUs, where it does."""
    queued, uncut = [], []
    for row, before in _grown(rows):
        rates = [r["samples_per_s"].get("os_dpos") for r in (row, before)]
        if rates[0] is None or rates[1] is None or rates[0] >= rates[1]:
            continue
        found = uncut if "model itself" in row["os_dpos_notes"][0] else queued
        found.append(f"{row['model']} ({row['scaling']}, {_gpus(row)})")
    lines = []
    if queued:
        lines += [
            f"OS-DPOS slower than on half the GPUs, since messages queue: {', '.join(queued)}.",
            "It starts from the batch cut for all GPUs, with each parameter on one of them, and expects that",
            "the others fetch it, return its gradients and exchange what is cut otherwise side by side; the",
            "four of the other server share one network card for that. Data parallelism reduces along rings.",
            "",
        ]
    if uncut:
        lines += [
            f"OS-DPOS slower than on half the GPUs, since it cuts too little: {', '.join(uncut)}.",
            "The batch fits on no single GPU, so that algorithm 2 starts from the model itself and cuts",
            "operators of the critical path, the longest first, until one gains nothing.",
            "",
        ]
    return lines


def _grown(rows: Sequence[Row]) -> Iterator[tuple[Row, Row]]:
    """Rows with those of half the GPUs; of eight, four in one server."""
    for row in rows:
        for before in rows:
            same = (row["model"], row["scaling"]) == (before["model"], before["scaling"])
            if same and row["devices"] == 2 * before["devices"]:
                yield row, before


def scaling_picture(rows: Sequence[Row]) -> str:
    """A chart per model and kind of scaling: samples per second against GPUs."""
    charts = []
    for model, kind in dict.fromkeys((row["model"], row["scaling"]) for row in rows):
        all_of = [row for row in rows if (row["model"], row["scaling"]) == (model, kind)]
        of = [row for row in all_of if row["key"].split(", ")[-1].startswith(FASTT)]
        lines = {
            title: [
                (row["devices"], row["samples_per_s"][name]) for row in of if row["samples_per_s"].get(name)
            ]
            for name, title in RATES.items()
        }
        marks = {
            "OS-DPOS, one server": [
                (row["devices"], row["samples_per_s"]["os_dpos"])
                for row in all_of
                if row not in of and row["samples_per_s"].get("os_dpos")
            ]
        }
        charts.append(Chart(f"{model}, {kind} scaling", "GPUs", "samples/s", lines, marks))
    return figure(charts)


def order_picture(rows: Sequence[Row]) -> str:
    """Bars: a placement's step without its order, relative to the step with it."""
    groups: dict[str, dict[str, tuple[float, str]]] = {}
    for row in rows:
        share = row["first_ready_s"] / row["enforced_s"]
        group = groups.setdefault(f"{row['model']}, {row['devices']} GPUs", {})
        group[row["planner"]] = share, _ms(row["first_ready_s"])
    return bars("step when a device takes what is ready first, relative to the plan's order", groups, 140)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("sections", nargs="*", help=f"of {', '.join(SECTIONS)}; default: all")
    parser.add_argument("--quick", action="store_true", help="a small model, written into out/papers")
    options = parser.parse_args()
    if unknown := [name for name in options.sections if name not in SECTIONS]:
        parser.error(f"unknown section {unknown[0]!r}; choose from {', '.join(SECTIONS)}")
    results = Results("papers", "placing", {}, quick=options.quick)
    for name in options.sections or SECTIONS:
        for row in SECTIONS[name](options.quick):
            results.add("key", row)
            save(results)
            print(row, flush=True)
    print(markdown(results.data, results.stem.name))


def save(results: Results) -> None:
    """Tables and both pictures, of what is known by now."""
    results.write(markdown(results.data, results.stem.name))
    for section, draw in (("scaling", scaling_picture), ("order", order_picture)):
        rows = [row for row in results.data["rows"] if row["section"] == section]
        name = f"{results.stem.name}-{section}.svg"
        results.stem.with_name(name).write_text(draw(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
