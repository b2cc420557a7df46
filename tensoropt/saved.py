"""Functions of a saved exploration: a plan to run, the reasons for a point's costs, CSV files, a decision
sheet."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from tensoropt.cluster import Cluster
from tensoropt.errors import TensorOptError
from tensoropt.exploration.batch import ExplorationBatch, load_batch
from tensoropt.exploration.batch_sweep import at_batch, fastest_batch
from tensoropt.exploration.cluster_offers import fewest_devices, folders_in, load_sweep, member
from tensoropt.exploration.exploration import Exploration, load_exploration
from tensoropt.exploration.export import (
    write_all_strategies_csv,
    write_frontier_csv,
    write_frontiers_csv,
    write_strategies_csv,
)
from tensoropt.exploration.rates import CLUSTERS_OWN, Amount, Tariff, kinds_of
from tensoropt.exploration.verified import load_verified
from tensoropt.launchers import JobError
from tensoropt.plan.plan import Plan
from tensoropt.report.detail import detail
from tensoropt.report.owners import MomentOwners, point_owners
from tensoropt.report.sheet import SheetOptions, write_sheet
from tensoropt.report.step_parts import Detail
from tensoropt.report.why import Why, why_point
from tensoropt.session.launched import job_prices
from tensoropt.session.told import ToldJob
from tensoropt.session.told import nearest as nearest_job
from tensoropt.types import Progress, silent

_Saved = Exploration | str | os.PathLike[str]
"""An exploration, or the folder that it was saved in."""


def choose(
    saved: _Saved,
    *,
    memory_bytes: float | None = None,
    time_s: float | None = None,
    knee: bool = False,
    devices: int | str | None = None,
    batch: int | str | None = None,
) -> Plan:
    """Return the fastest plan within a memory budget, the leanest within a time, or the knee.

    Without any limit, it is the fastest plan of all.

    Args:
        saved: an exploration, its folder, or a folder of explorations on several numbers of devices or at
            several batches.
        memory_bytes: the budget per device.
        time_s: the longest step.
        devices: the number of devices in such a folder; ``auto`` for the fewest that will do.
        batch: the batch in a folder of explorations at several batches; ``auto`` for the one with most
            samples per second.

    Raises:
        TensorOptError: the folder holds no exploration, or several and neither ``devices`` nor ``batch`` says
            which.
        InfeasibleError: nothing fits; the message says what would.
    """
    exploration, index = chosen_point(
        saved, memory_bytes=memory_bytes, time_s=time_s, knee=knee, devices=devices, batch=batch
    )
    return exploration.plan(index)


def chosen_point(
    saved: _Saved,
    *,
    memory_bytes: float | None = None,
    time_s: float | None = None,
    knee: bool = False,
    devices: int | str | None = None,
    batch: int | str | None = None,
) -> tuple[Exploration, int]:
    """Return the exploration, and the index in it, of the point of which :func:`choose` makes a plan."""
    limits = {"memory_bytes": memory_bytes, "time_s": time_s, "knee_point": knee}
    exploration = _exploration_meant(saved, limits, devices, batch)
    return exploration, exploration.index(memory_bytes=memory_bytes, time_s=time_s, knee_point=knee)


def show(
    saved: _Saved,
    point: int | None = None,
    *,
    memory_bytes: float | None = None,
    time_s: float | None = None,
    knee: bool = False,
) -> Detail:
    """Return the detail of a point's costs: its operators, reshardings, timeline and memory curve.

    Args:
        point: its index in ``all_points``, from 0; by default the point that :func:`choose` would select.

    Raises:
        TensorOptError: there is no such point, or the exploration was saved without its costs.
        InfeasibleError: nothing fits; the message says what would.
    """
    exploration = opened(saved)
    if point is None:
        point = exploration.index(memory_bytes=memory_bytes, time_s=time_s, knee_point=knee)
    return detail(exploration, point)


def owners(
    saved: _Saved,
    point: int | None = None,
    *,
    at_s: float | None = None,
    memory_bytes: float | None = None,
    time_s: float | None = None,
    knee: bool = False,
) -> MomentOwners:
    """Return the owners of a point's memory at a moment of its step: operators, tensors, bytes, lifetimes.

    Args:
        point: as in :func:`show`.
        at_s: seconds from the start of the step; by default the moment of the peak.

    Raises:
        TensorOptError: as in :func:`show`, or the step has no such moment.
    """
    exploration = opened(saved)
    if point is None:
        point = exploration.index(memory_bytes=memory_bytes, time_s=time_s, knee_point=knee)
    memory_owners = point_owners(exploration, point)
    return memory_owners.at(None if at_s is None else memory_owners.number_at(at_s))


def why(
    saved: _Saved,
    point: int | None = None,
    *,
    memory_bytes: float | None = None,
    time_s: float | None = None,
    knee: bool = False,
    folder: str | None = None,
) -> Why:
    """Return the reasons why a point is not faster: its bottleneck, lower bounds, and the gain from each
    change.

    Args:
        point: its index in ``all_points``, from 0; by default the point that :func:`choose` would select.
        memory_bytes: the budget per device; by default what the point needs.
        folder: the exploration's folder in commands; by default the given one.

    Raises:
        TensorOptError: there is no such point.
        InfeasibleError: nothing fits, or not this point; the message says what would.
    """
    exploration = opened(saved)
    if folder is None:
        folder = "DIR" if isinstance(saved, Exploration) else os.fspath(saved)
    if point is None:
        point = exploration.index(memory_bytes=memory_bytes, time_s=time_s, knee_point=knee)
    return why_point(exploration, point, memory_bytes=memory_bytes, folder=folder)


def export_csv(
    saved: _Saved, csv: str | os.PathLike[str], *, strategies: str | os.PathLike[str] | None = None
) -> Exploration:
    """Write the frontier as CSV files; return the exploration.

    Args:
        csv: the file with a row per point of the frontier.
        strategies: the file with a row per point and operator.

    Raises:
        TensorOptError: there is no exploration, or a file cannot be written.
    """
    exploration = opened(saved)
    write_frontier_csv(exploration, csv)
    if strategies:
        write_strategies_csv(exploration, strategies)
    return exploration


def export_frontiers(
    folders: Sequence[str | os.PathLike[str]],
    csv: str | os.PathLike[str],
    *,
    strategies: str | os.PathLike[str] | None = None,
) -> ExplorationBatch:
    """Write the frontiers of several explorations as one CSV file; return the explorations, by folder, and
    what else lies in the folders.

    Behind the columns of a single frontier stand ``exploration``, the folder, and ``cluster``; ``devices`` is
    among them.

    Args:
        folders: explorations, sweeps over clusters or numbers of devices, folders of such folders.
        csv: the file with a row per point of each frontier.
        strategies: the file with a row per point and operator, ``exploration``, ``cluster`` and ``devices``
            behind them.

    Raises:
        TensorOptError: a folder holds no exploration that can be read, or a file cannot be written.
    """
    batch = load_batch(folders)
    write_frontiers_csv(batch.explorations, csv)
    if strategies:
        write_all_strategies_csv(batch.explorations, strategies)
    return batch


def export_sheet(
    saved: _Saved,
    sheet: str | os.PathLike[str],
    point: int | None = None,
    *,
    memory_bytes: float | None = None,
    headroom: float = 0.0,
    tariff: Tariff = CLUSTERS_OWN,
    amount: Amount | None = None,
    folder: str | None = None,
) -> int:
    """Write the decision sheet of a point, one HTML page for printing; return the point's index.

    Args:
        sheet: the file.
        point: its index in ``all_points``, from 0; by default the fastest within the budget.
        memory_bytes: the budget per device; by default the devices' memory.
        headroom: the share of a device's memory that must stay free.
        tariff: prices that replace those of the cluster, and the currency.
        amount: the training to which hours and money refer; by default 1,000 steps.
        folder: the exploration's folder in commands; by default the given one.

    Raises:
        TensorOptError: there is no such point, a price is for a kind that the cluster lacks, the amount's
            unit is unknown, or the file cannot be written.
        InfeasibleError: nothing fits; the message says what would.
    """
    exploration = opened(saved)
    tariff.check(kinds_of(exploration))
    on_disk = None if isinstance(saved, Exploration) else os.fspath(saved)
    if point is None:
        usable = Cluster.from_dict(exploration.cluster).memory_bytes * (1 - headroom)
        point = exploration.index(memory_bytes=min(usable, memory_bytes or usable))
    place = folder or on_disk
    try:
        point_detail = detail(exploration, point)
    except TensorOptError:
        point_detail = None  # the sheet leaves out what only the saved costs say
    options = SheetOptions(
        folder=place or "DIR",
        memory_bytes=memory_bytes,
        headroom=headroom,
        tariff=tariff,
        amount=amount,
        verified=load_verified(place) if place else (),
        detail=point_detail,
    )
    write_sheet(exploration, point, sheet, options)
    return point


def export_job(
    saved: _Saved, launcher: str, point: int, *, nearest: bool = False, progress: Progress = silent
) -> ToldJob:
    """Return a point as a launcher is told of it: its config, or a script, with its price.

    Args:
        launcher: ``torchtitan``, ``megatron``, ``deepspeed`` or ``fsdp2``.
        point: its index in ``all_points``.
        nearest: whether another plan may be written, the nearest that the launcher can be told.

    Raises:
        JobError: the launcher cannot be told the plan; the message has the nearest that it can, priced.
        TensorOptError: there is no such point, or the exploration was saved without its operator graph.
    """
    exploration = opened(saved)
    with job_prices(exploration, progress=progress) as prices:
        told = nearest_job(prices, point, launcher)
        if not told.is_the_point and not nearest:
            raise JobError(
                f"{exploration.title(point)} ({told.name}) cannot be told to {launcher}: {told.reason}; the "
                f"nearest that can is {told.sentence()}; --nearest writes it"
            )
        return told


def opened(saved: _Saved) -> Exploration:
    """Return the exploration itself, loaded if a folder is given."""
    return saved if isinstance(saved, Exploration) else load_exploration(saved)


def _exploration_meant(
    saved: _Saved, limits: Mapping[str, Any], devices: int | str | None, batch: int | str | None
) -> Exploration:
    """Return the exploration itself, or the one in a folder of several that has the requested device count or
    batch.

    Args:
        limits: those of :meth:`~tensoropt.exploration.exploration.Exploration.index`.
    """
    if isinstance(saved, Exploration):
        return saved
    if devices is None and batch is None:
        inside = list(folders_in(saved))
        if len(inside) > 1:
            raise TensorOptError(
                f"{saved} holds {len(inside)} explorations; add --devices auto for the fewest devices "
                "that will do, --devices N, --batch auto for most samples per second, --batch N, or "
                "--profile for a table of all"
            )
        return load_exploration(inside[0] if inside else saved)
    sweep = load_sweep(saved)
    for flag, value in (("--devices", devices), ("--batch", batch)):
        if value is not None and value != "auto" and not str(value).isdecimal():
            raise TensorOptError(f"{flag} '{value}' is neither auto nor a number")
    if devices is not None and batch is not None:
        raise TensorOptError(f"--devices {devices} and --batch {batch} each name an exploration; give one")
    if batch is not None:
        return fastest_batch(sweep, limits) if batch == "auto" else at_batch(sweep, int(batch))
    if devices == "auto":
        # Every exploration has a knee, so "the fewest devices with one" would mean nothing: the knee of all
        # devices is meant.
        knee, memory_bytes, time_s = limits["knee_point"], limits["memory_bytes"], limits["time_s"]
        return sweep[-1] if knee else fewest_devices(sweep, memory_bytes, time_s)
    return member(sweep, int(str(devices)))
