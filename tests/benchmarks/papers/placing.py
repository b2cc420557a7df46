"""Placing planners on the papers' clusters: FastT's scaling and order enforcement, NetSplit's comparison.

    python -m tests.benchmarks.papers.placing [--quick] [section ...]

Sections: scaling (FastT: strong, one global batch on more devices, and weak, one batch per device; data
parallelism beside DPOS and OS-DPOS), order (FastT: one placement with its order kept, and with every device
taking what is ready first), netsplit (all placing planners on the preset of NetSplit's three cards).
Everything is played by one judge on data-sheet figures; nothing was run on GPUs, so the papers' seconds
are not set beside ours. Results: tests/benchmarks/results/papers/DATE-placing.{json,md} and
DATE-placing-{scaling,order}.svg.
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
from tensoropt.console import Progress
from tensoropt.costs.source import CostSource
from tensoropt.costs.store import ProfileStore
from tensoropt.errors import TensorOptError
from tensoropt.plan.placed import play_placement
from tensoropt.plan.placed.prices import PlacedPrices, PricedGraph
from tensoropt.plan.problem import Settings, prepare_graph
from tensoropt.planners.registry import ENTRIES
from tests.benchmarks.charts import Chart, bars, figure
from tests.benchmarks.machine import Results, described

FASTT, NETSPLIT = "fastt-paper", "netsplit-paper"
DEVICES = (2, 4, 8)
SCALING = {"alexnet": 256, "vgg19": 64, "inception-v3": 64}
"""Global batch of the strong, batch per device of the weak scaling."""
ORDER = {"alexnet": 256, "vgg19": 64, "inception-v3": 64, "gnmt": 128}
ORDERED = ("dpos", "os_dpos", "m_etf")
NETSPLIT_MODELS = {"unet": 16, "inception-v3": 64, "gnmt": 128}
POINTS, EPSILON = 50, 0.05
"""Only the frontier's fastest point is shown."""
Row = dict[str, Any]
RATES = {
    "data_parallel": "data parallelism", "dpos": "DPOS", "os_dpos": "OS-DPOS", "frontier": "fastest of all",
}  # fmt: skip


def scaling(quick: bool) -> Iterator[Row]:
    """Samples per second of data parallelism, DPOS and OS-DPOS."""
    for model, batch in {"lenet": 32}.items() if quick else SCALING.items():
        for kind in ("strong", "weak"):
            for devices in DEVICES[:1] if quick else DEVICES:
                samples = batch if kind == "strong" else batch * devices
                yield _scaled(model, kind, devices, samples)


def _scaled(model: str, kind: str, devices: int, samples: int) -> Row:
    built = zoo.build(model, device="meta", batch=samples)
    found = explore(
        built.model, built.args, built.kwargs, cluster=f"{FASTT}[{devices}]", micro_batches=(1,),
        recompute="never", epsilon=EPSILON, max_points=POINTS, planners=("data_parallel", "dpos", "os_dpos"),
        progress=Progress(),
    )  # fmt: skip
    rates = {row["planner"]: samples / row["time_s"] if row["time_s"] else None for row in found.comparison}
    return {
        "section": "scaling",
        "key": f"{model}, {kind}, {devices}",
        "model": model,
        "scaling": kind,
        "devices": devices,
        "batch": samples,
        "samples_per_s": rates | {"frontier": samples / found.points[-1].time_s},
        "search_s": {row["planner"]: row["search_s"] for row in found.comparison},
        "refused": {row["planner"]: row["notes"][0] for row in found.comparison if not row["time_s"]},
    }


def priced(model: str, batch: int, cluster: Cluster, store: ProfileStore) -> PricedGraph:
    """A model's operators on single devices, from data sheets."""
    built = zoo.build(model, device="meta", batch=batch)
    captured = capture(built.model, built.args, built.kwargs)
    costs = CostSource(cluster, store, Settings(), None)
    return PlacedPrices(prepare_graph(captured.graph).graph, cluster, costs).price()


def placed(name: str, graph: PricedGraph) -> tuple[PricedGraph, Any]:
    """What a placing planner answers, on the graph it leaves."""
    module = importlib.import_module(f"tensoropt.planners.{name}")
    if hasattr(module, "place_split"):
        return module.place_split(graph, None, 0)
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
                        play_placement(cut.problem, answer.placement, enforced=enforced).time_s
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


def netsplit(quick: bool) -> Iterator[Row]:
    """Every placing planner on three cards with unlike links."""
    names = [name for name, entry in ENTRIES.items() if entry.kind == "placed"]
    with ProfileStore() as store:
        for model, batch in {"lenet": 32}.items() if quick else NETSPLIT_MODELS.items():
            graph = priced(model, batch, load_cluster(NETSPLIT), store)
            for name in names:
                about = {"section": "netsplit", "key": f"{model}, {name}", "model": model, "planner": name}
                yield about | _played(name, graph)


def _played(name: str, graph: PricedGraph) -> Row:
    begun = time.perf_counter()
    try:
        graph, answer = placed(name, graph)
    except TensorOptError as error:
        return {"refused": str(error)}
    play = play_placement(graph.problem, answer.placement)
    spent = time.perf_counter() - begun
    return {
        "time_s": play.time_s,
        "memory_bytes": play.memory_bytes,
        "search_s": spent,
        "notes": answer.notes,
    }


SECTIONS = {"scaling": scaling, "order": order, "netsplit": netsplit}


def markdown(data: dict[str, Any], stem: str) -> str:
    by_section = {name: [r for r in data["rows"] if r["section"] == name] for name in SECTIONS}
    lines = [
        f"# Placing planners, {data['date']}",
        "",
        "Steps are played by the judge from data-sheet figures. The papers ran theirs on their GPUs, so that",
        "only ratios within a table may be set beside ratios of a paper. Search seconds: see the load.",
        "",
        f"Machine: {described(data['machine'])}.",
        "",
        f"## Strong and weak scaling (FastT), `{FASTT}`, samples per second",
        "",
        f"![samples per second]({stem}-scaling.svg)",
        "",
        "| model | scaling | GPUs | batch | data parallelism | DPOS | OS-DPOS | fastest of all |",
        "|" + " --- |" * 8,
    ]
    for row in by_section["scaling"]:
        rates = [row["samples_per_s"].get(name) for name in RATES]
        cells = [row["model"], row["scaling"], str(row["devices"]), str(row["batch"])]
        lines.append(_line([*cells, *("refuses" if r is None else f"{r:,.0f}" for r in rates)]))
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
        f"## NetSplit's comparison, `{NETSPLIT}`",
        "",
        "| model | planner | step | fullest device | found in |",
        "|" + " --- |" * 5,
    ]
    for row in by_section["netsplit"]:
        figures = ["refuses", "", ""] if "refused" in row else [
            _ms(row["time_s"]), f"{row['memory_bytes'] / 2**30:.2f} GiB", f"{row['search_s']:.2f} s"
        ]  # fmt: skip
        lines.append(_line([row["model"], row["planner"], *figures]))
    refused = [f"- {r['key']}: {r['refused']}" for r in by_section["netsplit"] if "refused" in r]
    for row in by_section["scaling"]:
        refused += [f"- {row['key']}, {name}: {why}" for name, why in row["refused"].items()]
    return "\n".join([*lines, "", *refused]) + "\n"


def scaling_picture(rows: Sequence[Row]) -> str:
    """A chart per model and kind of scaling: samples per second against GPUs."""
    charts = []
    for model, kind in dict.fromkeys((row["model"], row["scaling"]) for row in rows):
        of = [row for row in rows if (row["model"], row["scaling"]) == (model, kind)]
        lines = {
            title: [
                (row["devices"], row["samples_per_s"][name]) for row in of if row["samples_per_s"].get(name)
            ]
            for name, title in RATES.items()
        }
        charts.append(Chart(f"{model}, {kind} scaling", "GPUs", "samples/s", lines))
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
