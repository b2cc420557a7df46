"""The comparison of a model on several clusters, device counts or batch sizes, as text tables and JSON."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tensoropt.cli.arguments import Answer
from tensoropt.console import columns
from tensoropt.units import format_bytes, format_number, format_seconds


def offers_answer(sweep: Any, asked: dict[str, Any], folder: Path, more: str = "") -> Answer:
    """Return sentences and tables that compare the explorations of a :class:`tensoropt.sweeps.Sweep`.

    Args:
        asked: the fields of a :class:`~tensoropt.exploration.cluster_offers.ClusterQuestion`.
        folder, more: the folder in which the explorations are saved, and a remark on them.
    """
    from tensoropt.exploration.cluster_offers import ClusterQuestion, offers, offers_data

    found = offers(sweep.explorations, ClusterQuestion(**asked), sweep.refused)
    lines = [*found.sentences(), "", _budget_table(found), "", _table(found)]
    lines.append(f"saved: {folder}, one exploration for each{more}")
    best = {
        name: None if row is None else row.cluster
        for name, row in (("cheapest", found.cheapest), ("fastest", found.fastest))
    }
    data = {
        "out": str(folder),
        "refused": [f"{name}: {reason}" for name, reason in sweep.refused.items()],
        "budgets_bytes": list(found.budgets_bytes),
        **best,
        "amount": found.question.amount.words,
        "clusters": offers_data(found),
    }
    return Answer(data, "\n".join(lines))


def _budget_table(offers: Any) -> str:
    """Return a table of the step time on each cluster (or at each batch) within each memory budget."""
    # Of budgets that read alike, the largest.
    places = {f"<= {format_bytes(budget)}": place for place, budget in enumerate(offers.budgets_bytes)}
    rows = [["cluster", *(["batch"] if offers.weak else []), *places]]
    for row in offers.rows:
        if row.within_s:
            cells = [row.within_s[place] for place in places.values()]
            batch = [str(row.batch)] if offers.weak else []
            rows.append([row.cluster, *batch, *(_known(step_s, format_seconds) for step_s in cells)])
    return columns(rows, left=(0,))


def _table(offers: Any) -> str:
    tokens = any(row.rates is not None and row.rates.tokens_per_s is not None for row in offers.rows)
    weak = ["batch", "tokens/s" if tokens else "samples/s"] if offers.weak else []
    head = ["cluster", "devices", *weak, "time/step", "memory", "money/h", "hours", "money", "plan", ""]
    rows = [head]
    for row in offers.rows:
        rates = row.rates
        speed = rates and (rates.tokens_per_s if tokens else rates.samples_per_s)
        work = [_known(row.batch, str), _known(speed)]
        rows.append(
            [
                row.cluster,
                row.devices,
                *(work if offers.weak else []),
                _known(rates and rates.step_s, format_seconds),
                _known(row.memory_bytes, format_bytes),
                _known(rates and rates.per_hour),
                _known(row.hours),
                _known(row.cost),
                row.name,
                _remark(offers, row),
            ]
        )
    caption = f"hours and money are of {offers.question.amount.words}"
    return "\n".join([columns(rows, left=(0, 1, len(head) - 2, len(head) - 1)), caption])


def _known(figure: Any, words: Callable[[Any], str] = format_number) -> str:
    return "-" if figure is None else words(figure)


def _remark(offers: Any, row: Any) -> str:
    if row.reason:
        return str(row.reason)
    marks = [word for word in ("cheapest", "fastest") if getattr(offers, word) is row]
    if row.cost is None:
        marks.append(row.rates.whys["per_hour"])
    return "<- " + ", ".join(marks) if marks and marks[0] in ("cheapest", "fastest") else ", ".join(marks)
