"""Placing planners on the papers' clusters: FastT's scaling and order enforcement, NetSplit's comparison.

    python -m tests.benchmarks.papers.placing [--quick] [section ...]

Sections: scaling (FastT: strong, one global batch on more devices, and weak, one batch per device; data
parallelism beside DPOS and OS-DPOS), order (FastT: one placement with its order kept, and with every device
taking what is ready first), netsplit (all placing planners on the preset of NetSplit's three cards).
Everything is played by one judge on data-sheet figures; nothing was run on GPUs, so the papers' seconds
are not set beside ours. Results: tests/benchmarks/results/papers/DATE-placing.{json,md}.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
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
from tests.benchmarks.machine import RESULTS, Results, described

FASTT, NETSPLIT = "fastt-paper", "netsplit-paper"
DEVICES = (2, 4, 8)
SCALING = {"alexnet": 256, "vgg19": 64, "inception-v3": 64}
"""Global batch of the strong, batch per device of the weak scaling."""
ORDER = {"inception-v3": 64, "gnmt": 128}
NETSPLIT_MODELS = {"unet": 16, "inception-v3": 64, "gnmt": 128}
POINTS = 50
Row = dict[str, Any]


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
        recompute="never", max_points=POINTS, planners=("data_parallel", "dpos", "os_dpos"),
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
            for devices in DEVICES[:2]:
                graph = priced(model, batch, load_cluster(f"{FASTT}[{devices}]"), store)
                for name in ("dpos", "m_etf"):
                    _, answer = placed(name, graph)
                    kept, free = (
                        play_placement(graph.problem, answer.placement, enforced=enforced).time_s
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


def markdown(data: dict[str, Any]) -> str:
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
        "| model | scaling | GPUs | batch | data parallelism | DPOS | OS-DPOS | fastest of all |",
        "|" + " --- |" * 8,
    ]
    for row in by_section["scaling"]:
        rates = [row["samples_per_s"].get(n) for n in ("data_parallel", "dpos", "os_dpos", "frontier")]
        cells = [row["model"], row["scaling"], str(row["devices"]), str(row["batch"])]
        lines.append(_line([*cells, *("refuses" if r is None else f"{r:,.0f}" for r in rates)]))
    lines += [
        "",
        f"## Order enforcement (FastT), `{FASTT}`",
        "",
        "| model | GPUs | planner | its order | what is ready first | gain |",
        "|" + " --- |" * 6,
    ]
    for row in by_section["order"]:
        gain = row["first_ready_s"] / row["enforced_s"] - 1
        times = [_ms(row["enforced_s"]), _ms(row["first_ready_s"]), f"{gain:+.1%}"]
        lines.append(_line([row["model"], str(row["devices"]), row["planner"], *times]))
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
    return "\n".join(lines) + "\n"


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
    results = Results(Path("out/papers") if options.quick else RESULTS / "papers", "placing", {})
    for name in options.sections or SECTIONS:
        for row in SECTIONS[name](options.quick):
            results.add("key", row)
            results.write(markdown(results.data))
            print(row, flush=True)
    print(markdown(results.data))


if __name__ == "__main__":
    main()
