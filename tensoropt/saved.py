"""Functions of a saved exploration: a plan to run, a point as a launcher is told of it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tensoropt.console import shows_progress
from tensoropt.errors import TensorOptError
from tensoropt.exploration.answer import baseline_row
from tensoropt.exploration.batch_sweep import at_batch, fastest_batch
from tensoropt.exploration.cluster_offers import fewest_devices, folders_in, load_sweep, member
from tensoropt.exploration.exploration import Exploration, load_exploration
from tensoropt.launchers import JobError
from tensoropt.plan.plan import Plan
from tensoropt.types import ProgressChoice, heard
from tensoropt.units import limit_bytes, limit_seconds

if TYPE_CHECKING:
    from tensoropt.session.told import ToldJob

_Saved = Exploration | str | os.PathLike[str]
"""An exploration, or the folder that it was saved in."""


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
    """Return the recommended plan, within a memory budget or what the usual headroom leaves of a device: the
    simplest within 3 % of the fastest that fits. Or the fastest, the one that needs least within a time, or
    the knee.

    Args:
        saved: an exploration, its folder, or a folder of explorations on several numbers of devices or at
            several batches.
        memory: the budget per device: ``24GiB``, or bytes.
        time: the longest step: ``300ms``, or seconds.
        knee: the point from which both directions cost most.
        point: the point's number, from 1, instead of a limit.
        fastest: the fastest plan that fits.
        devices: the number of devices in such a folder; ``auto`` for the fewest that will do.
        batch: the batch in a folder of explorations at several batches; ``auto`` for the one with most
            samples per second.
        memory_bytes, time_s: the same limits as numbers alone.

    Raises:
        TensorOptError: the folder holds no exploration, or several and neither ``devices`` nor ``batch`` says
            which; there is no such point; a text is no size or time, or one thing is given twice.
        InfeasibleError: nothing fits; the message says what would.
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
    baseline: str | None = None,
    devices: int | str | None = None,
    batch: int | str | None = None,
    **limits: Any,
) -> tuple[Exploration, int]:
    """Return the exploration, and the index in it, of the point of which :func:`choose` makes a plan.

    Args:
        baseline: the plan that people make by hand, one of :data:`~tensoropt.exploration.answer.BASELINES`.
        limits: the others of :meth:`~tensoropt.exploration.exploration.Exploration.index`.
    """
    if point is not None:
        for name, given in (("devices", devices), ("batch", batch)):
            if given is not None:
                raise TensorOptError(
                    f"a point is of one exploration; name its folder instead of giving --{name}"
                )
    exploration = _exploration_meant(saved, limits, devices, batch)
    if baseline is None:
        return exploration, exploration.index(**limits, point=point)
    if point is not None or limits["time_s"] is not None or limits["knee_point"] or limits["fastest"]:
        raise TensorOptError(
            f"baseline {baseline} is asked for, and a point, a time, the knee or the fastest as well; "
            "give one of them"
        )
    return exploration, baseline_row(exploration, baseline, limits["memory_bytes"], limits["headroom"])


@shows_progress
def export_job(
    saved: _Saved, launcher: str, point: int, *, nearest: bool = False, progress: ProgressChoice = None
) -> ToldJob:
    """Return a point as a launcher is told of it: its config, with its price.

    Args:
        launcher: ``torchtitan``, ``megatron``, ``deepspeed`` or ``accelerate``.
        point: its number, from 1.
        nearest: whether another plan may be written, the nearest that the launcher can be told.
        progress: as in :func:`tensoropt.explore`.

    Raises:
        JobError: the launcher cannot be told the plan; the message has the nearest that it can, priced.
        TensorOptError: there is no such point, or the exploration was saved without its operator graph.
    """
    # These load PyTorch, for which nobody who chooses waits.
    from tensoropt.session.launched import job_prices
    from tensoropt.session.told import nearest as nearest_job

    exploration = opened(saved)
    index = exploration.index(point=point)
    with job_prices(exploration, progress=heard(progress)) as prices:
        told = nearest_job(prices, index, launcher)
        if not told.is_the_point and not nearest:
            raise JobError(
                f"{exploration.title(index)} ({told.name}) cannot be told to {launcher}: {told.reason}; the "
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
                "that will do, --devices N, --batch auto for most samples per second, or --batch N"
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
        return sweep[-1] if limits["knee_point"] else fewest_devices(sweep, limits)
    return member(sweep, int(str(devices)))
