"""A point's rates in words: throughput, MFU, and the cost of a training by them."""

from __future__ import annotations

from typing import Any

from tensoropt.plan.amounts import CLUSTERS_OWN, THOUSAND_STEPS, Amount, Tariff
from tensoropt.plan.findings import Findings
from tensoropt.plan.rates import HOUR_S, Rates, RatesOf
from tensoropt.plan.step_work import StepWork
from tensoropt.units import format_number

TERA = 1e12


def rate_facts(
    found: Findings, index: int, tariff: Tariff = CLUSTERS_OWN, amount: Amount | None = None
) -> list[tuple[str, str]]:
    """Return (label, words) of point ``index`` of ``all_points``; for what is unknown, the words say why.

    Args:
        amount: the length of the training; without one, money is given for 1,000 steps.

    Raises:
        TensorOptError: the amount is in a unit of which a step's is unknown.
    """
    return facts_of(RatesOf(found, tariff), index, amount)


def facts_of(table: RatesOf, index: int, amount: Amount | None = None) -> list[tuple[str, str]]:
    """Return :func:`rate_facts` of an exploration whose rates are at hand."""
    one = table.of(index)
    return [
        ("throughput", _throughput(one, table.work)),
        ("MFU", _mfu(one)),
        _spent(one, table.work, table.tariff, amount),
    ]


def rate_lines(table: RatesOf, index: int, amount: Amount | None = None) -> list[str]:
    """Return the facts of a point as lines below its others (:func:`tensoropt.report.table.point_lines`)."""
    return [f"  {label}: {words}" for label, words in facts_of(table, index, amount)]


def _throughput(one: Rates, work: StepWork) -> str:
    parts = []
    for name, rate in (("tokens", one.tokens_per_s), ("samples", one.samples_per_s)):
        if rate is not None:
            each = f" ({format_number(rate / one.devices)} per device)" if one.devices > 1 else ""
            parts.append(f"{format_number(rate)} {name}/s{each}")
    if not parts:
        return f"unknown: {work.whys['samples']}"
    sizes = ((work.samples, "samples"), (work.tokens, "tokens"))
    return ", ".join(parts) + "; a step reads " + ", ".join(f"{n:,} {w}" for n, w in sizes if n is not None)


def _mfu(one: Rates) -> str:
    if one.mfu is None:
        return f"unknown: {one.whys['mfu']}"
    assert one.flops_per_s is not None
    each = one.flops_per_s / one.devices / TERA
    return f"{100 * one.mfu:.3g} % ({format_number(each)} TFLOP/s of the model per device)"


def _spent(one: Rates, work: StepWork, tariff: Tariff, amount: Amount | None) -> tuple[str, str]:
    amount = amount or THOUSAND_STEPS
    steps = amount.steps(work)
    parts = [f"{hours_words(one.hours(steps))}, {format_number(one.device_hours(steps))} device-hours"]
    cost = one.cost(steps)
    parts.append(f"money unknown: {one.whys['per_hour']}" if cost is None else f"costs {tariff.words(cost)}")
    return amount.words, "; ".join(parts)


def hours_words(hours: float) -> str:
    """Format hours as people read them: ``12.5 h``, ``34.0 min``, ``8.2 s``."""
    if hours >= 1:
        return f"{format_number(hours)} h"
    minutes = 60 * hours
    return f"{format_number(minutes)} min" if minutes >= 1 else f"{format_number(HOUR_S * hours)} s"


def rates_data(table: RatesOf, index: int, amount: Amount | None = None) -> dict[str, Any]:
    """Return the same as plain data, numbers unrounded and None for what is unknown; ``unknown`` says why.

    Raises:
        TensorOptError: the amount is in a unit of which a step's is unknown.
    """
    one, work = table.of(index), table.work
    amount = amount or THOUSAND_STEPS
    steps = amount.steps(work)
    return {
        "samples_per_step": work.samples,
        "tokens_per_step": work.tokens,
        "model_flops_per_step": None if work.flops is None else sum(work.flops.values()),
        "samples_per_s": one.samples_per_s,
        "tokens_per_s": one.tokens_per_s,
        "mfu": one.mfu,
        "price_per_hour": one.per_hour,
        "currency": table.tariff.currency,
        "amount": amount.words,
        "steps": steps,
        "hours": one.hours(steps),
        "device_hours": one.device_hours(steps),
        "cost": one.cost(steps),
        "unknown": dict(one.whys),
    }
