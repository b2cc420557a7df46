"""Whether a plan fits a device: the memory that it needs, and the memory that it may use.

A plan needs the step's tensors and constants and, on GPUs, the process's other memory, the driver's, and what
PyTorch's allocator reserves beyond tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np

from tensoropt.costs.process_memory import CONSTANTS
from tensoropt.units import format_bytes, format_number

LEAST, MOST = 0.96, 1.11
"""The range of the ratio of measured to predicted GPU memory for four fifths of 28 published peaks; V100s are
excluded."""

_ALLOCATOR_SHARE = 0.02
"""The allocator's reserve as a share of tensors: the median of replays of published jobs."""
_DRIVER_SHARE = 0.011
"""The driver's share of a GPU: PyTorch reports 79.1 of 80 GiB (A100, H100) and 31.7 of 32 GiB (V100)."""
HEADROOM = 0.05
"""The share of memory left free without a budget; an assumption."""
Verdict = Literal["fits", "tight", "does not fit"]
FITS: Verdict = "fits"
TIGHT: Verdict = "tight"
FAILS: Verdict = "does not fit"
WORDS: Mapping[Verdict, str] = {FITS: "yes", TIGHT: "tight", FAILS: "no"}
"""The verdicts as words of a table's column."""
MARKS: Mapping[Verdict, str] = {FITS: "", TIGHT: " ~", FAILS: " ✕"}
"""The verdicts as marks after a figure."""
_UNUSED = "segments"
"""A term that no plan needs: PyTorch returns unused segments when memory runs short."""
_Size = TypeVar("_Size", float, np.ndarray)


def _process_parts(tensors: _Size, terms: Mapping[str, _Size], device_bytes: float) -> dict[str, _Size]:
    """Return name -> bytes that a plan's process takes on a GPU besides its peak of ``tensors`` (bytes,
    constants included)."""
    own = {name: size for name, size in terms.items() if name not in (CONSTANTS, _UNUSED)}
    return {
        **own,
        "driver": 0.0 * tensors + _DRIVER_SHARE * device_bytes,
        "allocator": _ALLOCATOR_SHARE * tensors,
    }


def needed_bytes(tensors: _Size, process: Mapping[str, _Size]) -> _Size:
    """Return the memory in whole bytes that a plan needs: its tensors and the parts of its process memory."""
    return np.rint(tensors + sum(process.values()))


def room_bytes(device_bytes: float, budget_bytes: float | None = None) -> float:
    """Return the smaller of memory budget and device memory; a plan that needs more bytes does not fit."""
    return device_bytes if budget_bytes is None else min(budget_bytes, device_bytes)


def usable_bytes(
    device_bytes: float, budget_bytes: float | None = None, headroom: float | None = None
) -> float:
    """Return the most bytes that a chosen plan may need: the budget, or device memory less headroom.

    Args:
        headroom: the share of device memory to leave free, also with a budget. None: :data:`HEADROOM` without
            a budget, 0 with one.
    """
    left = device_bytes * (1.0 - (HEADROOM if headroom is None else headroom))
    if budget_bytes is None:
        return left
    return min(budget_bytes, device_bytes if headroom is None else left)


@dataclass(frozen=True)
class DeviceFit:
    """The memory that a plan needs and may use, in bytes of the fullest rank.

    Attributes:
        tensors: the size of the step's tensors, constants included.
        process: name -> size of another part of the process's memory, such as CUDA's context.
        room_bytes: the memory that the plan may use.
        estimated: whether the needed memory is an estimate, as on GPUs; on CPU ranks it is exact.
    """

    tensors: float
    process: Mapping[str, float]
    room_bytes: float
    estimated: bool = True

    @property
    def needed_bytes(self) -> float:
        return float(needed_bytes(self.tensors, self.process))

    @property
    def verdict(self) -> Verdict:
        return verdict_on(self.needed_bytes, self.room_bytes, estimated=self.estimated)

    @property
    def words(self) -> str:
        """The verdict with its figures as text, such as ``81 GiB (tensors 74, process 7.2): tight``."""
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
    if needed_bytes > room:
        return FAILS
    return FITS if not estimated or needed_bytes * MOST <= room else TIGHT


def device_fit(
    tensors: float, terms: Mapping[str, float], device_bytes: float, room: float, *, estimated: bool
) -> DeviceFit:
    """Return the memory that a plan needs and may use, with the verdict whether it fits.

    Args:
        tensors: peak bytes of the step's tensors.
        terms: name -> bytes of the process's other memory.
        room: the usable part of ``device_bytes``.
    """
    tensors += terms.get(CONSTANTS, 0.0)
    if not estimated:
        return DeviceFit(tensors, {}, room, estimated)
    parts = _process_parts(tensors, terms, device_bytes)
    return DeviceFit(tensors, {name: size for name, size in parts.items() if size}, room, estimated)
