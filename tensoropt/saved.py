"""What a saved exploration answers: a plan to run, why a point costs what it costs, its CSV files."""

from __future__ import annotations

import os

from tensoropt.cluster import Cluster
from tensoropt.errors import TensorOptError
from tensoropt.exploration.cluster_offers import fewest_devices, folders_in, load_sweep, member
from tensoropt.exploration.exploration import Exploration, load_exploration
from tensoropt.exploration.export import write_frontier_csv, write_strategies_csv
from tensoropt.exploration.rates import CLUSTERS_OWN, Amount, Tariff, kinds_of
from tensoropt.exploration.verified import load_verified
from tensoropt.plan.plan import Plan
from tensoropt.report.detail import detail
from tensoropt.report.owners import MomentOwners, point_owners
from tensoropt.report.sheet import SheetOptions, write_sheet
from tensoropt.report.step_parts import Detail
from tensoropt.report.why import Why, why_point

_Saved = Exploration | str | os.PathLike[str]
"""An exploration, or the folder that it was saved in."""


def choose(
    saved: _Saved,
    *,
    memory_bytes: float | None = None,
    time_s: float | None = None,
    knee: bool = False,
    devices: int | str | None = None,
) -> Plan:
    """The plan that fits: the fastest within a budget of memory, the leanest within a time, or the knee.

    Without any of them it is the fastest of all.

    Args:
        saved: an exploration, its folder, or a folder of explorations on several numbers of devices.
        memory_bytes: per device.
        time_s: per step.
        devices: of such a folder the number meant; ``auto`` for the fewest that will do.

    Raises:
        TensorOptError: the folder holds no exploration, or several and ``devices`` is not given.
        InfeasibleError: nothing fits; says what would.
    """
    found, index = chosen_point(saved, memory_bytes=memory_bytes, time_s=time_s, knee=knee, devices=devices)
    return found.plan(index)


def chosen_point(
    saved: _Saved,
    *,
    memory_bytes: float | None = None,
    time_s: float | None = None,
    knee: bool = False,
    devices: int | str | None = None,
) -> tuple[Exploration, int]:
    """The exploration and the index of the point in it that :func:`choose` makes a plan of."""
    found = _exploration_meant(saved, memory_bytes, time_s, knee, devices)
    return found, found.index(memory_bytes=memory_bytes, time_s=time_s, knee_point=knee)


def show(
    saved: _Saved,
    point: int | None = None,
    *,
    memory_bytes: float | None = None,
    time_s: float | None = None,
    knee: bool = False,
) -> Detail:
    """Why a point costs what it costs: its operators, reshardings, timeline and memory curve.

    Args:
        point: its index in ``all_points``, from 0; without it the point that :func:`choose` would take.

    Raises:
        TensorOptError: there is no such point, or the exploration was saved without its costs.
        InfeasibleError: nothing fits; says what would.
    """
    found = opened(saved)
    if point is None:
        point = found.index(memory_bytes=memory_bytes, time_s=time_s, knee_point=knee)
    return detail(found, point)


def owners(
    saved: _Saved,
    point: int | None = None,
    *,
    at_s: float | None = None,
    memory_bytes: float | None = None,
    time_s: float | None = None,
    knee: bool = False,
) -> MomentOwners:
    """Whose a point's memory is at a moment of its step: operators, tensors, bytes, and until when.

    Args:
        point: as of :func:`show`.
        at_s: seconds from the start of the step; the moment of the peak by default.

    Raises:
        TensorOptError: as of :func:`show`, or the step has no such moment.
    """
    found = opened(saved)
    if point is None:
        point = found.index(memory_bytes=memory_bytes, time_s=time_s, knee_point=knee)
    told = point_owners(found, point)
    return told.at(None if at_s is None else told.number_at(at_s))


def why(
    saved: _Saved,
    point: int | None = None,
    *,
    memory_bytes: float | None = None,
    time_s: float | None = None,
    knee: bool = False,
    folder: str | None = None,
) -> Why:
    """Why a point is not faster: what binds it, what a step takes at least, what each change would buy.

    Args:
        point: its index in ``all_points``, from 0; without it the point that :func:`choose` would take.
        memory_bytes: the budget per device; by default what the point needs.
        folder: what commands call the exploration's folder; by default the one that was given.

    Raises:
        TensorOptError: there is no such point.
        InfeasibleError: nothing fits, or not this point; says what would.
    """
    found = opened(saved)
    if folder is None:
        folder = "DIR" if isinstance(saved, Exploration) else os.fspath(saved)
    if point is None:
        point = found.index(memory_bytes=memory_bytes, time_s=time_s, knee_point=knee)
    return why_point(found, point, memory_bytes=memory_bytes, folder=folder)


def export_csv(
    saved: _Saved, csv: str | os.PathLike[str], *, strategies: str | os.PathLike[str] | None = None
) -> Exploration:
    """The exploration, of which CSV files were written.

    Args:
        csv: gets a row per point of the frontier.
        strategies: gets a row per point and operator.

    Raises:
        TensorOptError: there is no exploration, or a file cannot be written.
    """
    found = opened(saved)
    write_frontier_csv(found, csv)
    if strategies:
        write_strategies_csv(found, strategies)
    return found


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
    """The index of the point of which a decision sheet was written: one HTML page, made to be printed.

    Args:
        sheet: the file.
        point: its index in ``all_points``, from 0; without it the fastest within the budget.
        memory_bytes: the budget per device; by default what the devices have.
        headroom: share of a device's memory that is to stay free.
        tariff: prices that replace those of the cluster, and the currency.
        amount: the training that hours and money are of; by default 1,000 steps.
        folder: what commands call the exploration's folder; by default the one that was given.

    Raises:
        TensorOptError: there is no such point, a price is of a kind that the cluster lacks, the amount's
            unit is unknown, or the file cannot be written.
        InfeasibleError: nothing fits; says what would.
    """
    found = opened(saved)
    tariff.check(kinds_of(found))
    on_disk = None if isinstance(saved, Exploration) else os.fspath(saved)
    if point is None:
        usable = Cluster.from_dict(found.cluster).memory_bytes * (1 - headroom)
        point = found.index(memory_bytes=min(usable, memory_bytes or usable))
    place = folder or on_disk
    try:
        told = detail(found, point)
    except TensorOptError:
        told = None  # the sheet leaves out what only the saved costs say
    options = SheetOptions(
        folder=place or "DIR",
        memory_bytes=memory_bytes,
        headroom=headroom,
        tariff=tariff,
        amount=amount,
        verified=load_verified(place) if place else (),
        detail=told,
    )
    write_sheet(found, point, sheet, options)
    return point


def opened(saved: _Saved) -> Exploration:
    """The exploration itself, loaded where a folder is given."""
    return saved if isinstance(saved, Exploration) else load_exploration(saved)


def _exploration_meant(
    saved: _Saved,
    memory_bytes: float | None,
    time_s: float | None,
    knee: bool,
    devices: int | str | None,
) -> Exploration:
    """The exploration itself, or of several in a folder the one on the number of devices that is meant."""
    if isinstance(saved, Exploration):
        return saved
    if devices is None:
        inside = list(folders_in(saved))
        if len(inside) > 1:
            raise TensorOptError(
                f"{saved} holds {len(inside)} explorations; add --devices auto for the fewest devices "
                "that will do, --devices N, or --profile for a table of all"
            )
        return load_exploration(inside[0] if inside else saved)
    sweep = load_sweep(saved)
    if devices == "auto":
        # Every exploration has a knee, so that "the fewest devices with one" would say nothing: that of all
        # devices is meant.
        return sweep[-1] if knee else fewest_devices(sweep, memory_bytes, time_s)
    if not str(devices).isdecimal():
        raise TensorOptError(f"--devices '{devices}' is neither auto nor a number")
    return member(sweep, int(devices))
