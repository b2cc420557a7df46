"""Placing planners on the papers' clusters: FastT's comparison, learned placers.

    python -m tests.benchmarks.papers.placing [--quick] [section ...]

Sections: scaling (FastT, :mod:`.fastt`: strong and weak scaling of its nine models), order (FastT: one
placement with its order kept, and with every device taking what is ready first), learned (Post beside the
heuristics and our search).
Everything is played by one judge on data-sheet figures; nothing was run on GPUs, so the papers' seconds
are not set beside ours, only their gains. Results: tests/benchmarks/results/papers/DATE-placing.{json,md}.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from tensoropt.cluster import load_cluster
from tensoropt.placement import simulate_placement
from tensoropt.profiling.store import ProfileStore
from tests.benchmarks.machine import Results, described
from tests.benchmarks.papers import fastt
from tests.benchmarks.papers.authors import LEARNED
from tests.benchmarks.papers.planned import Row, placed, played, priced

FASTT = fastt.CLUSTER
ORDER_DEVICES = (2, 4)
ORDERED = ("dpos", "os_dpos", "m_etf")
LEARNED_MODELS = ("alexnet", "gnmt", "inception-v3")
LEARNED_BESIDE = ("m_topo", "m_etf", "m_sct", "dpos", "local_search", "post")


def order(quick: bool) -> Iterator[Row]:
    """One placement, played in its order and in the order of readiness."""
    with ProfileStore() as store:
        for model, (batch, options) in (fastt.QUICK if quick else fastt.MODELS).items():
            for devices in ORDER_DEVICES:
                graph = priced(model, batch, load_cluster(f"{FASTT}[{devices}]"), store, options)
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


def learned(quick: bool) -> Iterator[Row]:
    """A learned placer beside heuristics and our search, on four GPUs."""
    with ProfileStore() as store:
        for model in fastt.QUICK if quick else LEARNED_MODELS:
            batch, options = (fastt.QUICK if quick else fastt.MODELS)[model]
            graph = priced(model, batch, load_cluster(f"{FASTT}[4]"), store, options)
            for name in LEARNED_BESIDE:
                key = f"{model}, {name}, 4 GPUs"
                yield {
                    "section": "learned",
                    "key": key,
                    "model": model,
                    "planner": name,
                    **played(name, graph),
                }


SECTIONS = {
    "scaling": fastt.scaling,
    "order": order,
    "learned": learned,
}


def markdown(data: dict[str, Any]) -> str:
    by_section = {name: [r for r in data["rows"] if r["section"] == name] for name in SECTIONS}
    lines = [
        f"# Placing planners, {data['date']}",
        "",
        "Steps are played by the judge from data-sheet figures. The papers ran theirs on their GPUs, so that",
        "only ratios within a table may be set beside ratios of a paper. Search seconds: see the load.",
        "",
        f"Taken from {described(data)}.",
        "",
        *fastt.tables(data["rows"]),
    ]
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
    if gains := [row["first_ready_s"] / row["enforced_s"] - 1 for row in by_section["order"]]:
        lines += ["", f"Under this judge the order is worth between {min(gains):+.1%} and {max(gains):+.1%}."]
    lines += ["", *_learned(by_section["learned"])]
    refused = [f"- {r['key']}: {r['refused']}" for r in by_section["learned"] if "refused" in r]
    for row in by_section["scaling"]:
        refused += [f"- {row['key']}, {name}: {why}" for name, why in row["refused"].items()]
    return "\n".join([*lines, "", *refused]) + "\n"


def _learned(rows: Sequence[Row]) -> list[str]:
    """Our rows of a learned placer, and what learned placers report of themselves."""
    by = {(row["model"], row["planner"]): row for row in rows}
    lines = [
        "## Learned placers",
        "",
        f"Steps on `{FASTT}[4]`. Post is as published but for what its module says, above all: the judge in",
        "the place of runs. The others are not rebuilt.",
        "",
        _line(["model", *LEARNED_BESIDE]),
        "|" + " --- |" * (1 + len(LEARNED_BESIDE)),
    ]
    for model in dict.fromkeys(row["model"] for row in rows):
        found = [by.get((model, name), {}).get("time_s") for name in LEARNED_BESIDE]
        lines.append(_line([model, *("" if s is None else _ms(s) for s in found)]))
    lines += ["", "| placer | what its paper reports, on its authors' machines |", "| --- | --- |"]
    return [*lines, *(_line([placer, what]) for placer, what in LEARNED.items())]


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
            results.data["rows"].sort(key=_place)
            results.write(markdown(results.data))
            print(row, flush=True)
    print(markdown(results.data))


def _place(row: Row) -> tuple[int, str, int]:
    """The place of a row among those of its section, whichever was run first."""
    model = row.get("model")
    known = list(fastt.MODELS)
    return known.index(model) if model in known else len(known), row.get("scaling", ""), row.get("devices", 0)


if __name__ == "__main__":
    main()
