"""What a plan needs of a device, how much of the device it may use, and whether it fits.

*Need* is one number: the tensors of a step with the constants of its graph, what a process takes beside them,
what the driver keeps, and what PyTorch's allocator reserves beyond tensors. On CPU ranks it is tensors and
constants. It does not depend on a budget.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np

from tensoropt.costs.process_memory import CONSTANTS
from tensoropt.units import format_bytes, format_number

LEAST, MOST = 0.96, 1.11
"""Measured over predicted memory of GPUs, between which four fifths of 28 published peaks lie: what PyTorch
and nvidia-smi show; without V100s, of which nobody said how they were measured (up to 1.7)."""

ALLOCATOR_SHARE = 0.02
"""What PyTorch's allocator reserves beyond tensors, over tensors: the middle of replays of published jobs."""
DRIVER_SHARE = 0.011
"""What the driver keeps of a GPU's memory: of 80 GiB of A100s and H100s PyTorch's messages call 79.1 the
total capacity, of 32 GiB of V100s 31.7."""
HEADROOM = 0.05
"""The share of a device's memory that stays free unless a budget or another share is asked for; an
assumption."""
Verdict = Literal["fits", "tight", "does not fit"]
FITS: Verdict = "fits"
TIGHT: Verdict = "tight"
FAILS: Verdict = "does not fit"
WORDS: Mapping[Verdict, str] = {FITS: "yes", TIGHT: "tight", FAILS: "no"}
"""The verdicts in a word, as a column has them."""
MARKS: Mapping[Verdict, str] = {FITS: "", TIGHT: " ~", FAILS: " ✕"}
"""The verdicts as a mark behind a figure."""
_UNUSED = "segments"
"""The term that no plan needs: where memory runs short PyTorch gives unused segments back before it fails."""
_Size = TypeVar("_Size", float, np.ndarray)


def process_parts(tensors: _Size, terms: Mapping[str, _Size], device_bytes: float) -> dict[str, _Size]:
    """Return what a process on a GPU takes beside tensors, by name, of one plan or of many.

    Args:
        tensors: bytes of the step's tensors at their peak, constants included.
        terms: what the process takes of itself (:data:`~tensoropt.costs.process_memory.TERMS`).
        device_bytes: the memory of the device.
    """
    own = {name: size for name, size in terms.items() if name not in (CONSTANTS, _UNUSED)}
    return {
        **own,
        "driver": 0.0 * tensors + DRIVER_SHARE * device_bytes,
        "allocator": ALLOCATOR_SHARE * tensors,
    }


def needed_bytes(tensors: _Size, process: Mapping[str, _Size]) -> _Size:
    """Return what a plan needs of a device in whole bytes, of one plan or of many."""
    found: _Size = np.rint(tensors + sum(process.values()))
    return found


def room_bytes(device_bytes: float, budget_bytes: float | None = None) -> float:
    """Return the bytes that the verdict on a plan is about: the budget, but no more than a device has."""
    return device_bytes if budget_bytes is None else min(budget_bytes, device_bytes)


def usable_bytes(
    device_bytes: float, budget_bytes: float | None = None, headroom: float | None = None
) -> float:
    """Return the bytes that a chosen plan may need of a device: the budget, but no more than a device has;
    without one what the headroom leaves.

    Args:
        headroom: the share that was asked for, which also holds beside a budget; None for the usual one,
            which does not.
    """
    left = device_bytes * (1.0 - (HEADROOM if headroom is None else headroom))
    if budget_bytes is None:
        return left
    return min(budget_bytes, device_bytes if headroom is None else left)


@dataclass(frozen=True)
class DeviceFit:
    """What a plan is predicted to need of a device, beside what there is; bytes of the fullest rank.

    Attributes:
        tensors: of the step, constants of its graph included.
        process: what else the process takes, each term by its name
            (:data:`~tensoropt.costs.process_memory.TERMS`, ``driver`` and ``allocator``).
        room_bytes: the memory of the device, or the part of it that may be used.
        estimated: whether it is a GPU's memory, whose predictions have an error; tensors of CPU ranks are
            predicted to the byte.
    """

    tensors: float
    process: Mapping[str, float]
    room_bytes: float
    estimated: bool = True

    @property
    def needed_bytes(self) -> float:
        """What is predicted in all."""
        return float(needed_bytes(self.tensors, self.process))

    @property
    def verdict(self) -> Verdict:
        """Whether it fits, by the error of such predictions."""
        return verdict_on(self.needed_bytes, self.room_bytes, estimated=self.estimated)

    @property
    def words(self) -> str:
        """All of it for people: ``81 GiB (tensors 74, process 7.2): tight``."""
        whole = format_bytes(self.needed_bytes)
        if not self.process:
            return f"{whole}: {self.verdict}"
        unit = whole.rpartition(" ")[2]
        factor = 1024.0 ** (("B", "KiB", "MiB", "GiB", "TiB").index(unit))
        tensors, process = (
            format_number(size / factor) for size in (self.tensors, sum(self.process.values()))
        )
        return f"{whole} (tensors {tensors}, process {process}): {self.verdict}"

    def to_data(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "needed_bytes": round(self.needed_bytes),
            "tensors_bytes": round(self.tensors),
            "process_bytes": {name: round(size) for name, size in self.process.items()},
            "room_bytes": round(self.room_bytes),
            "estimated": self.estimated,
        }


def verdict_on(needed_bytes: float, room: float, *, estimated: bool) -> Verdict:
    """Return the verdict on so many bytes of need in so much room."""
    if needed_bytes > room:
        return FAILS
    return FITS if not estimated or needed_bytes * MOST <= room else TIGHT


def device_fit(
    tensors: float, terms: Mapping[str, float], device_bytes: float, room: float, *, estimated: bool
) -> DeviceFit:
    """Return whether a plan fits.

    Args:
        tensors: bytes of the step's tensors at their peak.
        terms: what the process takes beside them, by name.
        device_bytes: the memory of the device.
        room: the part of it that may be used.
        estimated: as for :class:`DeviceFit`.
    """
    tensors += terms.get(CONSTANTS, 0.0)
    if not estimated:
        return DeviceFit(tensors, {}, room, estimated)
    parts = process_parts(tensors, terms, device_bytes)
    return DeviceFit(tensors, {name: size for name, size in parts.items() if size}, room, estimated)
