"""``shop``: offers of several clusters, device counts or batches for one model, and which one to take.

``explore --devices``, ``--also-on`` and ``--batch``, and ``choose --profile`` end with the same answer.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tensoropt.cli.arguments import Answer, Verb, add_amount, amount_option, tariff_option
from tensoropt.console import ProgressDisplay, columns
from tensoropt.errors import TensorOptError
from tensoropt.units import (
    format_bytes,
    format_number,
    format_seconds,
    parse_bytes,
    parse_seconds,
    read_number,
)


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    verb.add_argument(
        "dir",
        metavar="DIR",
        help="the folder given to explore --out with --also-on, --devices or several --batch",
    )
    verb.add_argument("--time", metavar="300ms", help="the cheapest cluster within this time per step")
    verb.add_argument("--cost", metavar="5", help="the fastest within this cost of the training below")
    verb.add_argument("--memory", metavar="24GiB", help="use at most this much of every device")
    verb.add_argument(
        "--headroom",
        metavar="5%",
        help="share of devices' memory to keep free; default: 5%, of a budget none",
    )
    verb.add_argument("--csv", metavar="FILE", help="write the table")
    add_amount(verb)


def answer(options: argparse.Namespace, progress: ProgressDisplay) -> Answer:
    """Return the table devices x memory -> time, a row per exploration, and which one to take."""
    return offers_answer(options.dir, _limits(options), options.csv)


def offers_answer(saved: Any, limits: dict[str, Any], csv: str | None = None) -> Answer:
    """Return the sentences and tables about explorations on several clusters, or device counts.

    Args:
        saved: :data:`tensoropt.shopping.SavedOnClusters`.
    """
    from tensoropt.exploration.cluster_offers import offers_data, write_offers_csv
    from tensoropt.shopping import OnClusters, shop

    explorations = OnClusters.of(saved)
    offers, profile = shop(explorations, **limits), explorations.profile
    per_device = explorations.batch_per_device
    tables = _profile_table(profile, explorations.explorations), "", _table(offers)
    lines = [*offers.sentences(), "", *tables]
    if csv:
        write_offers_csv(offers, csv)
        lines.append(f"{len(offers.rows)} clusters written to {csv}")
    best = {
        name: None if row is None else row.cluster
        for name, row in (("cheapest", offers.cheapest), ("fastest", offers.fastest))
    }
    data = {
        "profile": asdict(profile),
        "batch_per_device": per_device,
        **best,
        "amount": offers.question.amount.words,
        "currency": offers.question.tariff.currency,
        "clusters": offers_data(offers),
        "csv": csv,
    }
    return Answer(data, "\n".join(lines))


def _profile_table(profile: Any, explorations: Sequence[Any]) -> str:
    """Return devices × memory → time; at several batches on the same devices, batch × memory → tokens or
    samples per second, as steps differ in their work."""
    from tensoropt.exploration.rates import StepWork

    # Of budgets that read alike, the largest.
    places = {f"<= {format_bytes(budget)}": place for place, budget in enumerate(profile.budgets_bytes)}
    work = StepWork.of(explorations[0])
    per_sample = (work.tokens or 0) / (work.samples or 1) or 1.0

    def words(cell: Any, batch: int | None) -> str:
        if cell is None:
            return "-"
        if profile.of_batches and batch is not None:
            return format_number(per_sample * batch / cell.time_s)
        return format_seconds(cell.time_s)

    rows = [["devices", "kind", *(["batch"] if profile.weak else []), *places]]
    for row in profile.rows:
        batch = [str(row.batch)] if profile.weak else []
        rows.append(
            [str(row.devices), row.kind, *batch, *(words(row.cells[at], row.batch) for at in places.values())]
        )
    unit = f"{'tokens' if work.tokens else 'samples'}/s\n" if profile.of_batches else ""
    return unit + columns(rows, left=(1,))


def _limits(options: argparse.Namespace) -> dict[str, Any]:
    from tensoropt.exploration.rates import THOUSAND_STEPS

    return {
        "time_s": None if options.time is None else parse_seconds(options.time),
        "cost": None if options.cost is None else _money(options.cost),
        "memory_bytes": None if options.memory is None else parse_bytes(options.memory),
        "headroom": _share(options.headroom),
        "amount": amount_option(options) or THOUSAND_STEPS,
        "tariff": tariff_option(options),
    }


def _money(text: str) -> float:
    try:
        amount = read_number(text)
    except TensorOptError:
        raise TensorOptError(f"--cost '{text}' is not a number; write for example 5") from None
    if not 0 < amount < float("inf"):
        raise TensorOptError(f"--cost {text} buys nothing; give more than 0")
    return amount


def _share(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        share = read_number(text) if "%" in text else -1.0
    except TensorOptError:
        share = -1.0
    if not 0 <= share < 1:
        raise TensorOptError(f"--headroom '{text}' is not a share of a device's memory; write for example 5%")
    return share


def _table(offers: Any) -> str:
    currency = offers.question.tariff.currency or "money"
    tokens = any(row.rates is not None and row.rates.tokens_per_s is not None for row in offers.rows)
    weak = ["batch", "tokens/s" if tokens else "samples/s"] if offers.weak else []
    head = [
        "cluster",
        "devices",
        *weak,
        "time/step",
        "memory",
        f"{currency}/h",
        "hours",
        currency,
        "plan",
        "",
    ]
    rows = [head]
    for row in offers.rows:
        rates = row.rates
        speed = None if rates is None else rates.tokens_per_s if tokens else rates.samples_per_s
        told = ["-" if row.batch is None else str(row.batch), "-" if speed is None else format_number(speed)]
        rows.append(
            [
                row.cluster,
                row.devices,
                *(told if offers.weak else []),
                "-" if rates is None else format_seconds(rates.step_s),
                "-" if row.memory_bytes is None else format_bytes(row.memory_bytes),
                "-" if rates is None or rates.per_hour is None else format_number(rates.per_hour),
                "-" if row.hours is None else format_number(row.hours),
                "-" if row.cost is None else format_number(row.cost),
                row.name,
                _remark(offers, row),
            ]
        )
    caption = f"hours and {currency} are of {offers.question.amount.words}"
    return "\n".join([columns(rows, left=(0, 1, len(head) - 2, len(head) - 1)), caption])


def _remark(offers: Any, row: Any) -> str:
    if row.reason:
        return str(row.reason)
    marks = [word for word in ("cheapest", "fastest") if getattr(offers, word) is row]
    if row.cost is None:
        marks.append(row.rates.whys["per_hour"])
    return "<- " + ", ".join(marks) if marks and marks[0] in ("cheapest", "fastest") else ", ".join(marks)


VERB = Verb(
    "shop",
    "say which cluster, how many devices or which batch to take for a model explored on several",
    add_arguments,
    answer,
)
