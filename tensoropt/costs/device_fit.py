"""Whether a plan fits a device: what its process is predicted to take, and how far such predictions were off.

Predictions of GPUs' memory are compared with peaks that other people measured
(``tests/benchmarks/results/published``). Their error makes the verdict: a plan *fits* if it does even where
a job needs as much more than predicted as the worst tenth of those did, does *not fit* if it does not even
where a job needs as much less, and is *tight* between the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tensoropt.costs.process_memory import CONSTANTS
from tensoropt.units import format_bytes, format_number

LEAST, MOST = 0.96, 1.11
"""Measured over predicted memory of GPUs, between which four fifths of 28 published peaks lie: what PyTorch
and nvidia-smi show; without V100s, of which nobody said how they were measured (up to 1.7)."""

ALLOCATOR_SHARE = 0.02
"""What PyTorch's allocator reserves beyond tensors, over tensors, where its replay was not made: the middle
of replays of published jobs."""
DRIVER_SHARE = 0.011
"""What the driver keeps of a GPU's memory: of 80 GiB of A100s and H100s PyTorch's messages call 79.1 the
total capacity, of 32 GiB of V100s 31.7."""
Verdict = Literal["fits", "tight", "does not fit"]
FITS: Verdict = "fits"
TIGHT: Verdict = "tight"
FAILS: Verdict = "does not fit"


@dataclass(frozen=True)
class DeviceFit:
    """What a plan is predicted to take of a device, beside what there is; bytes of the fullest rank.

    Attributes:
        tensors: of the step, constants of its graph included.
        process: what else the process takes, each term by its name
            (:data:`~tensoropt.costs.process_memory.TERMS`, ``driver`` and ``allocator``).
        room_bytes: the memory of the device, or the part of it that may be used.
        estimated: whether it is a GPU's memory, whose predictions have an error; tensors of CPU ranks are
            predicted to the byte.
        counted: whether the plan's memory figure has the process's terms, all but driver and allocator.
    """

    tensors: float
    process: Mapping[str, float]
    room_bytes: float
    estimated: bool = True
    counted: bool = False

    @property
    def needed_bytes(self) -> float:
        """What is predicted in all."""
        return self.tensors + sum(self.process.values())

    @property
    def verdict(self) -> Verdict:
        """Whether it fits, by the error of such predictions."""
        least, most = (LEAST, MOST) if self.estimated else (1.0, 1.0)
        if self.needed_bytes * most <= self.room_bytes:
            return FITS
        return FAILS if self.needed_bytes * least > self.room_bytes else TIGHT

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

    @property
    def verb(self) -> str:
        """The verdict on a plan whose memory figure is within the room, before the room's name: ``Just
        fits``."""
        part = "All but driver and allocator fit" if self.counted else "Tensors alone fit"
        return {FITS: "Fits", TIGHT: "Just fits", FAILS: part}[self.verdict]

    def to_data(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "verdict": self.verdict,
            "needed_bytes": round(self.needed_bytes),
            "tensors_bytes": round(self.tensors),
            "process_bytes": {name: round(size) for name, size in self.process.items()},
            "room_bytes": round(self.room_bytes),
            "estimated": self.estimated,
        }


def device_fit(
    tensors: float,
    terms: Mapping[str, float],
    allocator: Mapping[str, float],
    room_bytes: float,
    *,
    estimated: bool,
    counted: bool = False,
) -> DeviceFit:
    """Return whether a plan fits.

    Args:
        tensors: bytes of the step's tensors at their peak.
        terms: what the process takes beside them, by name.
        allocator: the peaks of PyTorch's allocator, by name; empty if it was not replayed.
        room_bytes, estimated, counted: as for :class:`DeviceFit`.
    """
    tensors += terms.get(CONSTANTS, 0.0)
    process = {name: size for name, size in terms.items() if name != CONSTANTS and size}
    if not estimated:
        return DeviceFit(tensors, {}, room_bytes, estimated)
    process.pop("segments", None)
    process["driver"] = DRIVER_SHARE * room_bytes
    process["allocator"] = ALLOCATOR_SHARE * tensors
    if allocator:
        # Where memory runs short PyTorch gives unused segments back before it fails, so that a job fits in
        # what its blocks take without gaps between segments.
        process["allocator"] = max(allocator["reserved_expandable"] - allocator["requested"], 0.0)
    return DeviceFit(tensors, process, room_bytes, estimated, counted)
