"""The overheads of a step beyond operators and collectives, on the device and on its host.

They are the times of copies around collectives, of adding gradients to buckets, of tensors between groups
(edges), of each parameter in the optimizer's step, and of calls in recomputed regions. They follow from the
device's data sheet and ``cluster/presets/host.yaml``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from tensoropt.cluster import DeviceKind, host_seconds

_ISSUE_COLD_S = 1e-4
"""The time, in seconds, to launch one edge on a CPU rank with cold caches, which data sheets lack."""


@dataclass(frozen=True)
class Overheads:
    """The times of the small items of a step, in seconds, on a device or its host.

    Attributes:
        copy_s_per_byte, add_s_per_byte: the time of a local copy, and of an in-place addition.
        call_s: the time of one direction of an edge (a tensor between groups) with one resharding step.
        again_s: the time of a recomputed call besides its second forward; 0 except on a GPU's host.
        step_s: the time of one parameter in the optimizer's step, besides the time for its elements.
        pass_s: the time of one direction of an edge in which nothing moves.
        arrive_s, accumulate_s: the time to copy, or to add, a gradient to its bucket, besides that for its
            bytes.
        of_host: the times on a GPU's host; None for CPU ranks, which are their own hosts.
    """

    copy_s_per_byte: float = 0.0
    add_s_per_byte: float = 0.0
    call_s: float = 0.0
    again_s: float = 0.0
    step_s: float = 0.0
    pass_s: float = 0.0
    arrive_s: float = 0.0
    accumulate_s: float = 0.0
    of_host: Overheads | None = None

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Overheads:
        """Return the overheads of a stored record; figures that only older versions had are ignored."""
        known = {field.name: record[field.name] for field in fields(cls) if field.name in record}
        host = known.get("of_host")
        return cls(**{**known, "of_host": None if host is None else cls.from_record(host)})

    @property
    def host(self) -> Overheads:
        """The overheads of the host; all 0 for CPU ranks, which are their own hosts."""
        return self.of_host or NO_OVERHEADS

    def issuing_s(self, steps: int) -> float:
        """Return the time in seconds of one direction of an edge (a tensor between groups) with ``steps``
        resharding steps, without the time to move its bytes."""
        return self.pass_s + steps * (self.call_s - self.pass_s) if steps else 0.0

    def arrival_s(self, gradient_bytes: float, micro_batches: int = 1, *, copied: bool = True) -> float:
        """Return the time per micro-batch, in seconds, to add a gradient to its bucket.

        Args:
            copied: whether the first micro-batch's gradient is copied to its bucket; if not, it is free.
        """
        first = self.arrive_s + gradient_bytes * self.copy_s_per_byte if copied else 0.0
        other = self.accumulate_s + gradient_bytes * self.add_s_per_byte
        return (first + (micro_batches - 1) * other) / micro_batches


NO_OVERHEADS = Overheads()


def data_sheet_overheads(device: DeviceKind) -> Overheads:
    """Return a device's overheads by data sheet; a copy moves each byte twice, an addition three times."""
    copy, add = 2 / device.memory_bandwidth, 3 / device.memory_bandwidth
    host = host_seconds(device.type)
    if host is None:
        # Half of the issuing time is an assumption: an edge in which nothing moves still passes autograd.
        # Another assumption is that only the bytes of an addition count.
        return Overheads(copy, add, _ISSUE_COLD_S, pass_s=_ISSUE_COLD_S / 2, arrive_s=_ISSUE_COLD_S)
    of_host = Overheads(
        call_s=host.edge_s,
        again_s=host.again_s,
        step_s=host.parameter_s,
        pass_s=host.pass_s,
        arrive_s=host.gradient_s,
        accumulate_s=host.gradient_s,
    )
    kernel_s = host.kernel_s
    return Overheads(copy, add, kernel_s, arrive_s=kernel_s, accumulate_s=kernel_s, of_host=of_host)
