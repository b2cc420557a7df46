"""Throughput, MFU, hours and money of every row of a frontier, as arrays; what is unknown says why."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tensoropt.errors import TensorOptError
from tensoropt.plan.amounts import THOUSAND_STEPS, Amount, Tariff, amount_of, prices_of
from tensoropt.plan.rates import HOUR_S, RatesOf

from ..state import View
from .frontier import FrontierData


def tariff_of(view: View) -> Tariff:
    """Return the device prices of a view: the price of all devices, prices of kinds, the currency."""
    everywhere, by_kind = prices_of(view.prices)
    return Tariff(everywhere if view.price is None else view.price, by_kind, view.currency)


def amount_in(view: View) -> Amount:
    """Return the training that a view asks about; 1,000 steps if it names none."""
    return amount_of(view.amount) or THOUSAND_STEPS


@dataclass(frozen=True, eq=False)
class RateArrays:
    """The rates of all rows; None if one is unknown, and then ``whys`` has the reason by its name.

    Attributes:
        unit: what ``rate`` counts: tokens if the model reads them, otherwise samples.
        rate: the rates per second.
        mfu: the MFU, as shares.
        hours, device_hours, cost: those of the amount that the view asks about.
        amount: that amount in words.
    """

    unit: str
    rate: np.ndarray | None
    mfu: np.ndarray | None
    hours: np.ndarray | None
    device_hours: np.ndarray | None
    cost: np.ndarray | None
    amount: str
    whys: dict[str, str]


def rate_arrays(data: FrontierData, view: View) -> RateArrays:
    """Return the rates of all rows of a frontier."""
    table, amount, whys = RatesOf(data.exploration, tariff_of(view)), amount_in(view), dict[str, str]()
    work = table.work
    unit, per_step = ("tokens", work.tokens) if work.tokens is not None else ("samples", work.samples)
    if per_step is None:
        whys["rate"] = work.whys["samples"]
    # A plan's devices decide both; there are few different numbers of them.
    ideal_s, per_hour = np.zeros(len(data)), np.zeros(len(data))
    for count in np.unique(data.devices):
        rows = data.devices == count
        ideal, price, why = table.of_devices(int(count))
        ideal_s[rows] = np.nan if ideal is None else ideal
        per_hour[rows] = np.nan if price is None else price
        whys |= {{"per_hour": "cost"}.get(name, name): said for name, said in why.items()}
    hours = None
    try:
        hours = amount.steps(work) * data.time / HOUR_S
    except TensorOptError as error:
        whys |= dict.fromkeys(("hours", "device_hours", "cost"), str(error))
    return RateArrays(
        unit=unit,
        rate=None if per_step is None else per_step / data.time,
        mfu=None if "mfu" in whys else ideal_s / data.time,
        hours=hours,
        device_hours=None if hours is None else hours * data.devices,
        cost=None if hours is None or "cost" in whys else hours * per_hour,
        amount=amount.words,
        whys=whys,
    )
