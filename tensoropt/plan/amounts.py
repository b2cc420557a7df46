"""How long a training is, and what devices cost."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tensoropt.cluster.devices import DeviceKind
from tensoropt.errors import TensorOptError, suggest
from tensoropt.plan.step_work import StepWork
from tensoropt.units import format_number, parse_count

AMOUNTS = ("steps", "samples", "tokens", "epochs")


@dataclass(frozen=True)
class Tariff:
    """What devices cost.

    Attributes:
        price: money per device-hour of every device whose kind has no price of its own in ``by_kind``; None
            for what the cluster says.
        by_kind: money per device-hour by the name of a kind.
        currency: what the money is called; "" leaves it without a name, as cluster files do.

    Raises:
        TensorOptError: a price is not more than nothing.
    """

    price: float | None = None
    by_kind: Mapping[str, float] = field(default_factory=dict)
    currency: str = ""

    def __post_init__(self) -> None:
        for name, price in (("all devices", self.price), *self.by_kind.items()):
            if price is not None and not (math.isfinite(price) and price > 0):
                raise TensorOptError(f"the price of {name} is {price:g} per hour; give more than 0")

    def of(self, kind: DeviceKind) -> float | None:
        """Money per hour of one device of a kind; None where unknown."""
        return self.of_named(kind.name, kind.price_per_hour)

    def of_named(self, kind: str, own: float | None) -> float | None:
        """The same of a kind by its name, whose own price is given."""
        said = self.by_kind.get(kind, self.price)
        return own if said is None else said

    def check(self, kinds: Iterable[str]) -> None:
        """Raise :class:`TensorOptError` for a price of a kind that is not among those given."""
        known = dict.fromkeys(kinds)
        for name in self.by_kind:
            if name not in known:
                raise TensorOptError(
                    f"there is a price for {name}, but no such device; {suggest(name, known)}"
                )

    def words(self, amount: float) -> str:
        """Three significant figures and the currency."""
        return f"{format_number(amount)} {self.currency}".rstrip()


CLUSTERS_OWN = Tariff()


def prices_of(text: str) -> tuple[float | None, dict[str, float]]:
    """(the price of all devices, prices by kind) in ``2.5``, ``H100-80GB=2.5, A100-80GB=1.6`` or both.

    Raises:
        TensorOptError: a price is no number, or two are given for the same devices.
    """
    everywhere: float | None = None
    by_kind: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        kind, _, number = part.rpartition("=")
        kind = kind.strip()
        try:
            price = float(number)
        except ValueError:
            raise TensorOptError(
                f"'{part}' is no price; write 2.5 for all devices or H100-80GB=2.5 for a kind of them"
            ) from None
        if kind in by_kind or (not kind and everywhere is not None):
            raise TensorOptError(f"there are two prices for {kind or 'all devices'}; give one")
        if kind:
            by_kind[kind] = price
        else:
            everywhere = price
    return everywhere, by_kind


@dataclass(frozen=True)
class Amount:
    """How long a training is.

    Attributes:
        count: how many.
        unit: one of :data:`AMOUNTS`.
        samples_per_epoch: the size of the data set; only of epochs.

    Raises:
        TensorOptError: there is no such unit, a count is not more than nothing, or an epoch has no size.
    """

    count: float
    unit: str = "steps"
    samples_per_epoch: float | None = None

    def __post_init__(self) -> None:
        if self.unit not in AMOUNTS:
            raise TensorOptError(f"'{self.unit}' is no amount of training; use one of {', '.join(AMOUNTS)}")
        if not (math.isfinite(self.count) and self.count > 0):
            raise TensorOptError(f"{self.count:g} {self.unit} are no amount of training; give more than 0")
        size = self.samples_per_epoch
        if (self.unit == "epochs") != (size is not None):
            raise TensorOptError(
                "epochs need the size of the data set, and nothing else does; give the samples of an epoch"
            )
        if size is not None and not (math.isfinite(size) and size > 0):
            raise TensorOptError(f"an epoch of {size:g} samples is none; give more than 0")

    def steps(self, work: StepWork) -> float:
        """How many steps that are, as a fraction: the last one need not be full.

        Raises:
            TensorOptError: what a step has of the unit is not known; says why.
        """
        if self.unit == "steps":
            return self.count
        name = "tokens" if self.unit == "tokens" else "samples"
        per_step = work.tokens if name == "tokens" else work.samples
        if per_step is None:
            raise TensorOptError(f"{name} of a step are unknown: {work.whys[name]}")
        return self.count * (self.samples_per_epoch or 1.0) / per_step

    @property
    def words(self) -> str:
        """``1,000 steps``, ``300B tokens``, ``3 epochs of 50,000 samples``."""
        of = f" of {_count(self.samples_per_epoch)} samples" if self.samples_per_epoch is not None else ""
        unit = self.unit[:-1] if self.count == 1 else self.unit
        return f"{_count(self.count)} {unit}{of}"


THOUSAND_STEPS = Amount(1000.0)


_AMOUNT = re.compile(r"(\S+)\s*(steps?|samples?|tokens?|epochs?)(?:\s+of\s+(\S+)(?:\s+samples)?)?")


def amount_of(text: str) -> Amount | None:
    """The amount in ``1e9 tokens``, ``1.5T tokens`` or ``3 epochs of 50000 samples``; None in an empty text.

    Raises:
        TensorOptError: it is no amount.
    """
    if not text.strip():
        return None
    match = _AMOUNT.fullmatch(text.strip().lower())
    if match is None:
        raise TensorOptError(
            f"'{text.strip()[:60]}' is no amount of training; write for example 1e9 tokens, 50000 samples or "
            "3 epochs of 50000 samples"
        )
    count, unit, size = match.groups()
    of_epoch = None if size is None else parse_count(size.replace(",", ""), "the samples of an epoch")
    return Amount(parse_count(count.replace(",", ""), "the amount"), unit.rstrip("s") + "s", of_epoch)


def _count(value: float) -> str:
    """A count as ``parse_count`` reads it: grouped, from a hundred million on as ``300B``."""
    if value < 1e8:
        return f"{value:,.12g}"
    letter, unit = next((one for one in (("T", 1e12), ("B", 1e9)) if value >= one[1]), ("M", 1e6))
    return f"{value / unit:,.6g}{letter}"
