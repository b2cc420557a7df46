"""Offers, which compare one model's step across clusters, device counts and global batches.

Each cluster is one row, with its recommended plan: the fastest plan that fits is also the cheapest, since
cost is time times price. Steps of different batches are compared per sample. Each row also has the step time
within several memory budgets (TensorOpt's profiling mode: devices × memory); the fewest devices that fit are
its mini-parallelism.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tensoropt.errors import InfeasibleError, TensorOptError
from tensoropt.exploration.batch_sweep import batch_in
from tensoropt.exploration.exploration import Exploration, load_exploration
from tensoropt.exploration.exploration_files import DESCRIBED
from tensoropt.exploration.rates import CLUSTERS_OWN, THOUSAND_STEPS, Amount, Rates, RatesOf, StepWork, Tariff
from tensoropt.exploration.recommended import recommended
from tensoropt.plan.plan_names import brief_name
from tensoropt.question.settings import settings_fields
from tensoropt.units import format_bytes, format_number, format_seconds


@dataclass(frozen=True)
class _ClusterOffer:
    """One cluster's recommended plan for the requested training, with its duration and cost.

    Attributes:
        cluster: the cluster's name.
        devices, count: its devices in words, and their number; 0 if unknown.
        batch: samples per step; None if unknown.
        index, name: the index and the name of the recommended plan; None and "" if none fits.
        rates: the rates of that plan.
        memory_bytes: the memory that the plan needs on a device.
        hours, device_hours, cost: for the requested amount of training; None if unknown.
        reason: why there is no plan; "" if there is one.
        within_s: step time of the recommended plan within each of :attr:`Offers.budgets_bytes`; None if none
            fits.
    """

    cluster: str
    devices: str = ""
    batch: int | None = None
    index: int | None = None
    rates: Rates | None = None
    memory_bytes: float | None = None
    hours: float | None = None
    device_hours: float | None = None
    cost: float | None = None
    name: str = ""
    reason: str = ""
    count: int = 0
    within_s: tuple[float | None, ...] = ()


@dataclass(frozen=True)
class ClusterQuestion:
    """The request that offers answer: memory limit per device, length of training, prices."""

    memory_bytes: float | None = None
    amount: Amount = THOUSAND_STEPS
    tariff: Tariff = CLUSTERS_OWN


@dataclass(frozen=True)
class Offers:
    """The offers, one row per cluster or batch size in the order given, failed ones last."""

    question: ClusterQuestion
    rows: tuple[_ClusterOffer, ...]
    budgets_bytes: tuple[float, ...] = ()

    @property
    def within(self) -> tuple[_ClusterOffer, ...]:
        """The rows with a plan that fits."""
        return tuple(row for row in self.rows if not row.reason)

    @property
    def weak(self) -> bool:
        """Whether the rows differ in samples per step."""
        return len({row.batch for row in self.rows if row.batch is not None}) > 1

    @property
    def of_batches(self) -> bool:
        """Whether the rows are one cluster at several batch sizes."""
        return self.weak and len({(row.cluster, row.devices) for row in self.rows if row.devices}) == 1

    @property
    def of_counts(self) -> bool:
        """Whether the rows are several numbers of devices of one kind."""
        known = [row for row in self.rows if row.count]
        kinds = {row.devices.partition(" x ")[2] for row in known}
        return len(kinds) == 1 and len({row.count for row in known}) > 1

    @property
    def cheapest(self) -> _ClusterOffer | None:
        """The cheapest offer with a known price; among equals, the fastest."""
        priced = [row for row in self.within if row.cost is not None]
        return min(priced, key=lambda row: (row.cost or 0.0, self._pace(row)), default=None)

    @property
    def fastest(self) -> _ClusterOffer | None:
        """The fastest offer (per sample if batch sizes differ); among equals, the cheapest."""
        return min(
            self.within,
            key=lambda row: (self._pace(row), float("inf") if row.cost is None else row.cost),
            default=None,
        )

    def _pace(self, row: _ClusterOffer) -> float:
        return _seconds(row) / (row.batch or 1) if self.weak else _seconds(row)

    def sentences(self) -> Iterator[str]:
        """Yield sentences on the fewest devices or largest batch, the cheapest and the fastest offer."""
        question = self.question
        limit = f"within {format_bytes(question.memory_bytes)} a device" if question.memory_bytes else ""
        said = limit or "without limits"
        fastest, cheapest = self.fastest, self.cheapest
        if self.of_batches:
            yield from self._largest()
        if self.of_counts:
            yield from self._fewest()
        if fastest is None:
            one = "batch" if self.of_batches else "cluster"
            yield f"No {one} is {said}." if limit else f"No {one} has a plan that fits."
            return
        if cheapest is not None:
            assert cheapest.cost is not None
            yield (
                f"Cheapest {said}: {self._label(cheapest)}, {format_number(cheapest.cost)} for "
                f"{question.amount.words} at {format_seconds(_seconds(cheapest))} a step."
            )
        cost = "of unknown price" if fastest.cost is None else format_number(fastest.cost)
        assert fastest.rates is not None
        named = ((fastest.rates.samples_per_s, "samples/s"), (fastest.rates.tokens_per_s, "tokens/s"))
        speeds = [f"{format_number(rate)} {name}" for rate, name in named if rate is not None]
        by_sample = f" ({', '.join(speeds)})" if self.weak and speeds else ""
        step = f"{format_seconds(_seconds(fastest))} a step{by_sample}"
        yield f"Fastest {said}: {self._label(fastest)}, {step}, {cost}."

    def _label(self, row: _ClusterOffer) -> str:
        return f"{row.cluster} at batch {row.batch}" if self.weak else row.cluster

    def _fewest(self) -> Iterator[str]:
        fitting = [row for row in self.rows if row.index is not None]
        if not fitting:
            return
        least = min(fitting, key=lambda row: row.count)
        assert least.memory_bytes is not None
        needs = f"{brief_name(least.name)}, {format_bytes(least.memory_bytes)} of each"
        said = f"Fewest devices that fit: {least.devices} ({needs})"
        below = [row for row in self.rows if row.index is None and 0 < row.count < least.count]
        if not below:
            yield f"{said}; fewer were not explored." if least.count > 1 else f"{said}."
            return
        most = max(below, key=lambda row: row.count)
        yield f"{said}; {most.devices} {'do' if most.count > 1 else 'does'} not ({most.reason})."

    def _largest(self) -> Iterator[str]:
        fitting = [row.batch for row in self.rows if row.index is not None and row.batch is not None]
        if not fitting:
            return
        largest = max(fitting)
        above = [row for row in self.rows if row.index is None and (row.batch or 0) > largest]
        if not above:
            yield f"Largest batch explored: {largest}. It fits; larger ones may fit, too."
            return
        least = min(above, key=lambda row: row.batch or 0)
        yield f"Largest batch that fits: {largest}; {least.batch} does not ({least.reason})."


def _seconds(row: _ClusterOffer) -> float:
    assert row.rates is not None
    return row.rates.step_s


def offers(
    explorations: Sequence[Exploration],
    question: ClusterQuestion | None = None,
    refused: Mapping[str, str] | None = None,
) -> Offers:
    """Return the offers of several clusters for one model's step.

    If steps differ in samples, an amount of training in steps counts steps of the largest batch.

    Args:
        refused: why clusters could not be explored, by cluster.

    Raises:
        TensorOptError: the step's samples or tokens, in which the amount of training is given, are unknown.
    """
    question = question or ClusterQuestion()
    batches = {batch for found in explorations if (batch := StepWork.of(found).samples) is not None}
    if len(batches) > 1 and question.amount.unit == "steps":
        samples = Amount(question.amount.count * max(batches), "samples")
        question = replace(question, amount=samples)
    budgets = _budgets(explorations)
    rows = [replace(_offer(found, question), within_s=_within(found, budgets)) for found in explorations]
    rows += [_ClusterOffer(name, batch=batch_in(name), reason=why) for name, why in (refused or {}).items()]
    return Offers(question, tuple(rows), budgets)


def _offer(found: Exploration, question: ClusterQuestion) -> _ClusterOffer:
    table, cluster = RatesOf(found, question.tariff), str(found.cluster["name"])
    if table.cluster is None:
        return _ClusterOffer(cluster, reason="its cluster was not saved; explore again")
    devices, count = table.cluster.counts, table.cluster.device_count
    row = _ClusterOffer(cluster, devices, table.work.samples, count=count)
    room = _room(found, question.memory_bytes)
    best = recommended(found, room)
    if best is None:
        least = format_bytes(float(found.needs.min(initial=np.inf)))
        return replace(row, reason=f"does not fit: needs {least}, a device may use {format_bytes(room)}")
    rates, steps = table.of(best.row), question.amount.steps(table.work)
    return replace(
        row,
        index=best.row,
        rates=rates,
        memory_bytes=float(found.needs[best.row]),
        hours=rates.hours(steps),
        device_hours=rates.device_hours(steps),
        cost=rates.cost(steps),
        name=found.names[best.row],
    )


def _room(found: Exploration, memory_bytes: float | None) -> float:
    return found.limit_bytes if memory_bytes is None else found.usable_bytes(memory_bytes)


def fits_within(found: Exploration, memory_bytes: float | None) -> bool:
    """Return whether any plan fits a memory budget per device, or for None the exploration's own limit."""
    return recommended(found, _room(found, memory_bytes)) is not None


_OWN = ("cluster", "devices", "batch", "name", "reason", "hours", "device_hours", "cost")
_OF_RATES = {"time_s": "step_s", "price_per_hour": "per_hour", "samples_per_s": "samples_per_s",
             "tokens_per_s": "tokens_per_s", "mfu": "mfu"}  # fmt: skip


def offers_data(found: Offers) -> list[dict[str, object]]:
    """Return the rows as plain data; None for unknown values. Hours and cost are for the requested amount."""
    return [
        {
            **{name: getattr(row, name) for name in _OWN},
            **{name: getattr(row.rates, attribute, None) for name, attribute in _OF_RATES.items()},
            "point": None if row.index is None else row.index + 1,
            "memory_bytes": None if row.memory_bytes is None else round(row.memory_bytes),
            "within_s": list(row.within_s),
        }
        for row in found.rows
    ]


_BUDGETS = 6
"""The number of memory budgets whose columns fit a terminal's width."""


def _budgets(explorations: Sequence[Exploration]) -> tuple[float, ...]:
    """Return memory budgets, evenly spaced in log memory: from the leanest plan's need to the lesser of the
    largest plan's need and the largest device's memory, or to the former if no plan fits any device."""
    sizes = np.concatenate([np.zeros(0), *(found.needs for found in explorations)])
    if not len(sizes):
        return ()
    largest = max(found.device_bytes for found in explorations)
    most = min(sizes.max(), largest) if sizes.min() <= largest else sizes.max()
    return tuple(np.geomspace(sizes.min(), most, _BUDGETS).tolist())


def _within(found: Exploration, budgets_bytes: Sequence[float]) -> tuple[float | None, ...]:
    # The first and last budgets equal points' memories, which geomspace may round away.
    limits = (min(budget * (1 + 1e-9), found.device_bytes) for budget in budgets_bytes)
    best = [recommended(found, limit) for limit in limits]
    return tuple(None if one is None else float(found.all_points.time[one.row]) for one in best)


def folders_in(folder: str | os.PathLike[str] | None) -> Iterator[Path]:
    """Yield the folder itself if it has an exploration, else its subfolders that have one, by name."""
    if folder is None or not Path(folder).is_dir():
        return
    if (Path(folder) / DESCRIBED).is_file():
        yield Path(folder)
        return
    for child in sorted(Path(folder).iterdir()):
        if (child / DESCRIBED).is_file():
            yield child


def loaded(folder: str | os.PathLike[str]) -> dict[str, Exploration]:
    """Return the explorations of :func:`folders_in`, by folder.

    Raises:
        TensorOptError: there is none, or one is damaged.
    """
    found = {str(path): load_exploration(path) for path in folders_in(folder)}
    if not found:
        raise TensorOptError(
            f"{folder} holds no exploration (no {DESCRIBED} in it or in a subfolder); run `tensoropt "
            "explore` with --out"
        )
    return found


def load_sweep(folder: str | os.PathLike[str]) -> tuple[Exploration, ...]:
    """Return the explorations of a folder, ascending in devices, then batch size; one if the folder itself is
    one.

    Raises:
        TensorOptError: there is none, one is damaged, or they differ in model or settings.
    """
    sweep = list(loaded(folder).values())
    steps = {same_step(exploration.model.fingerprint, exploration.settings) for exploration in sweep}
    if len(steps) > 1 and not of_batches(sweep):
        raise TensorOptError(
            f"{folder} holds explorations of different models or settings, which cannot be compared; name "
            "one of them, or move those of one model and its settings into a separate folder"
        )
    return tuple(sorted(sweep, key=lambda found: (found.devices, found.model.batch or 0)))


def same_step(fingerprint: str, settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a key that is equal for comparable explorations: a hash of the operators, and the step's
    settings."""
    of_step = (setting for setting in settings_fields() if setting.of_step)
    return fingerprint, *(str(settings.get(setting.name, setting.default)) for setting in of_step)


def of_batches(sweep: Sequence[Exploration]) -> bool:
    """Return whether explorations have the same model, settings and cluster, and differ in batch size."""
    batches = {found.model.batch for found in sweep}
    alike = {
        (found.cluster["name"], found.devices, found.model.source, found.model.seed,
         *same_step("", found.settings))
        for found in sweep
    }  # fmt: skip
    return len(batches) > 1 and None not in batches and len(alike) == 1


def fewest_devices(sweep: Sequence[Exploration], limits: Mapping[str, Any]) -> Exploration:
    """Return the exploration on the fewest devices that has a plan within limits (mini-parallelism).

    Args:
        limits: arguments of :meth:`~tensoropt.exploration.exploration.Exploration.index`.

    Raises:
        InfeasibleError: no exploration has such a plan; the message states the leanest and the fastest plan.
    """
    # load_sweep sorts ascending in devices: the first that fits has the fewest.
    for found in sweep:
        try:
            found.index(**limits)
        except InfeasibleError:
            continue
        return found
    leanest = min(sweep, key=lambda found: float(found.needs.min()))
    fastest = min(sweep, key=lambda found: found.points[-1].time_s)
    counts = ", ".join(str(found.devices) for found in sweep)
    raise InfeasibleError(
        f"no plan on {counts} devices is within the limits; the leanest needs "
        f"{format_bytes(float(leanest.needs.min()))} on {leanest.devices} devices, the fastest takes "
        f"{fastest.points[-1].time_s:.3g} s on {fastest.devices}"
    )
