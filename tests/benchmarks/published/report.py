"""Medians, words and a picture of predicted runs."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tensoropt.cluster.catalog import _preset
from tests.benchmarks.charts import Chart, figure
from tests.benchmarks.machine import described
from tests.benchmarks.program import Row, page, table
from tests.benchmarks.published import fits
from tests.benchmarks.published.memory import approximated
from tests.benchmarks.published.predict import errors_of

GOAL = 0.15
"""The median error of single-node runs that is aimed at."""


def fitted_sources() -> tuple[str, ...]:
    """The sources whose runs efficiencies were fitted to; all others are held out."""
    return tuple(_preset("efficiencies").get("fitted_to", ()))


def summary(rows: Iterable[Row]) -> dict[str, Any]:
    """How many runs, the median and the worst of their errors, and the median of predicted / published."""
    found = [row for row in rows if row["refused"] is None]
    ratios = [row["predicted_step_s"] / row["published_step_s"] for row in found]
    return {**errors_of(found, "step_s"), "median_ratio": statistics.median(ratios) if ratios else None}


def medians(rows: Sequence[Row]) -> dict[str, Any]:
    """Errors by source, of single-node runs, and apart of those whose source nothing was fitted to."""
    fitted = fitted_sources()
    single, several = ([row for row in rows if row["single_node"] is alone] for alone in (True, False))
    return {
        "fitted_sources": list(fitted),
        "all": summary(rows),
        "single_node": summary(single),
        **{
            f"{name}_{kind}": summary(row for row in of if (row["source"] in fitted) is wanted)
            for name, of in (("single_node", single), ("several_nodes", several))
            for kind, wanted in (("fitted", True), ("held_out", False))
        },
        "by_source": {
            source: {
                "single_node": summary(r for r in single if r["source"] == source),
                "several_nodes": summary(r for r in several if r["source"] == source),
                "refused": sum(r["source"] == source and r["refused"] is not None for r in rows),
            }
            for source in dict.fromkeys(row["source"] for row in rows)
        },
    }


NAMED = {
    "all": "all that can be expressed",
    "single_node": "on a single node",
    "single_node_fitted": "of these, of sources that efficiencies were fitted to",
    "single_node_held_out": "of these, of held-out sources",
    "several_nodes_fitted": "on several nodes, of sources that were fitted to",
    "several_nodes_held_out": "on several nodes, of held-out sources",
}
TITLES = ("runs", "predicted", "median error", "worst", "median of predicted / published")


def markdown(data: Mapping[str, Any], stem: str) -> str:
    found = data["medians"]
    rows = [_cells(words, found[key]) for key, words in NAMED.items()]
    rows += [
        _cells(f"{source}, {words}", of[key])
        for source, of in found["by_source"].items()
        for key, words in (("single_node", "single node"), ("several_nodes", "several nodes"))
        if of[key]["runs"]
    ]
    refused = Counter(row["refused"] for row in data["rows"] if row["refused"] is not None)
    return page(
        f"# Published runs, predicted from data sheets, {data['date']}",
        f"![predicted over published]({stem}.svg)",
        (
            "Runs that other people measured, with their configuration pinned. Nothing was run here. An",
            "error is |predicted / published - 1|. Beside computation run what ZeRO gathers and scatters,",
            "buckets of gradients, and reductions beside products of weights' gradients; others wait.",
            f"Single-node runs are to be within {GOAL:.0%} in the median.",
        ),
        f"Left out of all predictions: the term {data['without']}." if data.get("without") else "",
        f"Taken from {described(data)}.",
        table(TITLES, rows),
        f"{sum(refused.values())} runs were refused:",
        [f"- {count}: {why}" for why, count in refused.most_common()],
        "What was approximated:",
        [*approximated(data["rows"]), f"- {data['depths']}", f"- {data['left_out']}"],
        fits.part(data),
    )


def _cells(words: str, of: Mapping[str, Any]) -> list[str]:
    if not of["runs"]:
        return [words, "0", "", "", ""]
    ratio, errors = f"{of['median_ratio']:.2f}", (f"{of['median_error']:.1%}", f"{of['worst_error']:.0%}")
    return [words, of["runs"], *errors, ratio]


def picture(rows: Sequence[Row]) -> str:
    """Predicted over published seconds, by source; one chart for single nodes and one for several."""
    charts = []
    for single, title in ((True, "single node"), (False, "several nodes")):
        marks: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            if row["refused"] is None and row["single_node"] is single:
                place = (row["published_step_s"], row["predicted_step_s"])
                marks.setdefault(row["source"], []).append(place)
        if marks:
            every = [second for places in marks.values() for place in places for second in place]
            line = [(min(every), min(every)), (max(every), max(every))]
            charts.append(Chart(title, "published step, s", "predicted step, s", {"equal": line}, marks))
    return figure(charts)
