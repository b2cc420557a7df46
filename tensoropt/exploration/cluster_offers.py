"""A table of offers, which compares one model's step across clusters, device counts or global batch sizes.

Each offer (row) is one cluster or batch size with its recommended plan: of the plans that fit, the fastest is
also the cheapest, since cost is time times price. Steps with different numbers of samples are compared per
sample. Each row also has the step time within several memory budgets (TensorOpt's profiling mode). The fewest
devices on which a plan fits are the model's mini-parallelism.
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
    """One cluster's recommended plan for a training, with its duration and cost.

    Attributes:
        cluster: the cluster's name.
        devices, count: the devices in words, such as ``8 x H100-80GB``, and their number; 0 if unknown.
        batch: samples per step; None if unknown.
        index, name: the index and the name of the recommended plan; None and "" if none fits.
        rates: the samples and tokens per second, MFU and price of that plan.
        memory_bytes: the memory in bytes that the plan needs on a device.
        hours, device_hours, cost: for the whole training; None if unknown.
        reason: why there is no plan; "" if there is one.
        within_s: step time in seconds of the recommended plan within each of :attr:`Offers.budgets_bytes`;
            None for budgets within which no plan fits.
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
    """The conditions of a comparison of clusters: memory limit per device, length of the training, prices."""

    memory_bytes: float | None = None
    amount: Amount = THOUSAND_STEPS
    tariff: Tariff = CLUSTERS_OWN


@dataclass(frozen=True)
class Offers:
    """The compared clusters or batch sizes, one per row in the order given; those that failed are last."""

    question: ClusterQuestion
    rows: tuple[_ClusterOffer, ...]
    budgets_bytes: tuple[float, ...] = ()

    @property
    def within(self) -> tuple[_ClusterOffer, ...]:
        return tuple(row for row in self.rows if not row.reason)

    @property
    def weak(self) -> bool:
        """Whether the rows differ in samples per step, as in weak scaling."""
        return len({row.batch for row in self.rows if row.batch is not None}) > 1

    @property
    def of_batches(self) -> bool:
        """Whether all rows are of the same cluster, at several batch sizes."""
        return self.weak and len({(row.cluster, row.devices) for row in self.rows if row.devices}) == 1

    @property
    def of_counts(self) -> bool:
        """Whether the rows are different numbers of devices of one kind."""
        known = [row for row in self.rows if row.count]
        kinds = {row.devices.partition(" x ")[2] for row in known}
        return len(kinds) == 1 and len({row.count for row in known}) > 1

    @property
    def cheapest(self) -> _ClusterOffer | None:
        """The cheapest row with a known price; of several at the same price, the fastest."""
        priced = [row for row in self.within if row.cost is not None]
        return min(priced, key=lambda row: (row.cost or 0.0, self._pace(row)), default=None)

    @property
    def fastest(self) -> _ClusterOffer | None:
        """The row with the shortest step, per sample if batch sizes differ; of several, the cheapest."""
        return min(
            self.within,
            key=lambda row: (self._pace(row), float("inf") if row.cost is None else row.cost),
            default=None,
        )

    def _pace(self, row: _ClusterOffer) -> float:
        return _seconds(row) / (row.batch or 1) if self.weak else _seconds(row)

    def sentences(self) -> Iterator[str]:
        """Yield sentences on the largest batch or fewest devices that fit, the cheapest and the fastest
        row."""
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
    """Return the comparison of one model's step on several clusters.

    If steps differ in samples, a length in steps counts steps of the largest batch.

    Args:
        question: the memory limit, the length of the training, and the prices; by default 1,000 steps.
        refused: why the model could not be explored, by cluster.

    Raises:
        TensorOptError: the length of the training is in samples or tokens, whose number per step is unknown.
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
    """Return whether any plan fits a memory budget per device (None: the exploration's own limit)."""
    return recommended(found, _room(found, memory_bytes)) is not None


_OWN = ("cluster", "devices", "batch", "name", "reason", "hours", "device_hours", "cost")
_OF_RATES = {"time_s": "step_s", "price_per_hour": "per_hour", "samples_per_s": "samples_per_s",
             "tokens_per_s": "tokens_per_s", "mfu": "mfu"}  # fmt: skip


def offers_data(found: Offers) -> list[dict[str, object]]:
    """Return the rows as plain data, with None for unknown values. Hours, device hours and cost are for the
    whole training."""
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
    """Return memory budgets in bytes, evenly spaced in log memory, from the need of the leanest plan to the
    lesser of the largest plan's need and the largest device's memory, or to the former if no plan fits."""
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
    """Yield the folder itself if it holds an exploration, otherwise those subfolders that hold one, by name.
    Yield nothing if it is no folder."""
    if folder is None or not Path(folder).is_dir():
        return
    if (Path(folder) / DESCRIBED).is_file():
        yield Path(folder)
        return
    for child in sorted(Path(folder).iterdir()):
        if (child / DESCRIBED).is_file():
            yield child


def loaded(folder: str | os.PathLike[str]) -> dict[str, Exploration]:
    """Return the exploration saved in a folder or, if there is none, those in its direct subfolders, by path.

    Raises:
        TensorOptError: there is no exploration, or one is damaged.
    """
    found = {str(path): load_exploration(path) for path in folders_in(folder)}
    if not found:
        raise TensorOptError(
            f"{folder} holds no exploration (no {DESCRIBED} in it or in a subfolder); run `tensoropt "
            "explore` with --out"
        )
    return found


def load_sweep(folder: str | os.PathLike[str]) -> tuple[Exploration, ...]:
    """Return the explorations of :func:`loaded`, ascending in devices, then batch size.

    Raises:
        TensorOptError: there is no exploration, one is damaged, or they differ in model or settings.
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
    """Return a key that is equal for explorations whose steps can be compared: a hash of the operators, and
    the settings that change a step."""
    of_step = (setting for setting in settings_fields() if setting.of_step)
    return fingerprint, *(str(settings.get(setting.name, setting.default)) for setting in of_step)


def of_batches(sweep: Sequence[Exploration]) -> bool:
    """Return whether the explorations differ in batch size only, with equal model, settings and cluster."""
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
        sweep: explorations of one model, ascending in devices.
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
