"""Functions that choose a plan from a saved exploration, or write a point as a launcher's config."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tensoropt.console import shows_progress
from tensoropt.errors import TensorOptError
from tensoropt.exploration.batch_sweep import fastest_batch
from tensoropt.exploration.cluster_offers import fewest_devices, folders_in, load_sweep
from tensoropt.exploration.exploration import Exploration, load_exploration
from tensoropt.exploration.rates import StepWork
from tensoropt.launchers import JobError
from tensoropt.plan.plan import Plan
from tensoropt.types import ProgressChoice, heard
from tensoropt.units import limit_bytes, limit_seconds

if TYPE_CHECKING:
    from tensoropt.session.told import ToldJob

_Saved = Exploration | str | os.PathLike[str]
"""An exploration, or its folder."""


def choose(
    saved: _Saved,
    *,
    memory: float | str | None = None,
    time: float | str | None = None,
    knee: bool = False,
    point: int | None = None,
    fastest: bool = False,
    devices: int | str | None = None,
    batch: int | str | None = None,
    memory_bytes: float | None = None,
    time_s: float | None = None,
) -> Plan:
    """Return the recommended plan within a memory budget: the simplest within 3 % of the fastest that fits.

    The default budget is a device's memory less the usual headroom. Arguments ask for the fastest plan
    instead, for the leanest within a time, or for the knee.

    Args:
        saved: an exploration, its folder, or a folder with explorations on several numbers of devices or at
            several batch sizes (a sweep).
        memory: the budget per device: ``24GiB``, or bytes.
        time: the longest step: ``300ms``, or seconds.
        knee: whether to return the point where saving memory or time costs most.
        point: the point's number, from 1, instead of limits.
        fastest: whether to return the fastest plan that fits.
        devices: which exploration of a sweep: its number of devices, or ``auto`` for the fewest that fit.
        batch: which exploration of a sweep: its batch size, or ``auto`` for the most samples per second.
        memory_bytes, time_s: the budget in bytes and the longest step in seconds, instead of ``memory`` and
            ``time``.

    Raises:
        TensorOptError: the folder holds no exploration, or several and neither ``devices`` nor ``batch``
            selects one; there is no such point; a size or time cannot be read, or a limit is given twice.
        InfeasibleError: nothing fits; the message states the nearest plan.
    """
    exploration, index = chosen_point(
        saved,
        memory_bytes=limit_bytes(memory_bytes, memory),
        time_s=limit_seconds(time_s, time),
        knee_point=knee,
        point=point,
        fastest=fastest,
        devices=devices,
        batch=batch,
    )
    return exploration.plan(index)


def chosen_point(
    saved: _Saved,
    *,
    point: int | None = None,
    devices: int | str | None = None,
    batch: int | str | None = None,
    **limits: Any,
) -> tuple[Exploration, int]:
    """Return the exploration and the index of the point whose plan :func:`choose` returns.

    Args:
        limits: further arguments of :meth:`~tensoropt.exploration.exploration.Exploration.index`.
    """
    if point is not None:
        for name, given in (("devices", devices), ("batch", batch)):
            if given is not None:
                raise TensorOptError(
                    f"a point belongs to one exploration; give its folder instead of --{name}"
                )
    exploration = _exploration_meant(saved, limits, devices, batch)
    return exploration, exploration.index(**limits, point=point)


@shows_progress
def export_job(
    saved: _Saved, launcher: str, point: int, *, nearest: bool = False, progress: ProgressChoice = None
) -> ToldJob:
    """Return the content of a launcher's config that runs a point's plan, with its predicted cost.

    Args:
        launcher: ``torchtitan``, ``megatron``, ``deepspeed`` or ``accelerate``.
        point: the point's number, from 1.
        nearest: whether to return the closest plan that the launcher can express, if it cannot express the
            point.
        progress: as in :func:`tensoropt.explore`.

    Raises:
        JobError: the launcher cannot express the plan; the message has the closest that it can, with its
            cost.
        TensorOptError: there is no such point, or the operator graph was not saved.
    """
    # These load PyTorch, which takes seconds and which choosing does not need.
    from tensoropt.session.launched import job_prices
    from tensoropt.session.told import nearest as nearest_job

    exploration = opened(saved)
    index = exploration.index(point=point)
    with job_prices(exploration, progress=heard(progress)) as prices:
        told = nearest_job(prices, index, launcher)
        if not told.is_the_point and not nearest:
            raise JobError(
                f"{exploration.title(index)} ({told.name}) cannot be expressed by {launcher}: {told.reason}; "
                f"the closest that can is {told.sentence()}; --nearest writes it"
            )
        return told


def opened(saved: _Saved) -> Exploration:
    """Return the exploration itself, or the one saved in a folder."""
    return saved if isinstance(saved, Exploration) else load_exploration(saved)


def _exploration_meant(
    saved: _Saved, limits: Mapping[str, Any], devices: int | str | None, batch: int | str | None
) -> Exploration:
    """Return the exploration; of a sweep's folder, the one with this number of devices or batch size.

    Args:
        limits: arguments of :meth:`~tensoropt.exploration.exploration.Exploration.index`, for ``auto``.
    """
    if isinstance(saved, Exploration):
        return saved
    if devices is None and batch is None:
        inside = list(folders_in(saved))
        if len(inside) > 1:
            raise TensorOptError(
                f"{saved} holds {len(inside)} explorations; select one: --devices auto for the fewest "
                "that fit, --devices N, --batch auto for most samples per second, or --batch N"
            )
        return load_exploration(inside[0] if inside else saved)
    sweep = load_sweep(saved)
    if devices is not None and batch is not None:
        raise TensorOptError(f"--devices {devices} and --batch {batch} both select an exploration; give one")
    flag, value = ("--devices", devices) if batch is None else ("--batch", batch)
    if value != "auto":
        numbers = [e.devices if batch is None else StepWork.of(e).samples for e in sweep]
        if not str(value).isdecimal() or int(str(value)) not in numbers:
            known = ", ".join(map(str, numbers))
            raise TensorOptError(f"there is no exploration of {flag} {value}; give auto or one of {known}")
        return sweep[numbers.index(int(str(value)))]
    if batch is not None:
        return fastest_batch(sweep, limits)
    # Every exploration has a knee, so "the fewest devices with one" is meaningless: take the knee on all
    # devices.
    return sweep[-1] if limits["knee_point"] else fewest_devices(sweep, limits)
