"""The measured seconds of workloads.

Every figure has a source: ``measured`` (exactly this workload on these ranks), ``fitted`` or ``data sheet``
(:mod:`tensoropt.costs.roofline`).
"""

from __future__ import annotations

import platform
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tensoropt.costs.roofline import RooflineCompute, weight_gradient_share
from tensoropt.errors import MeasurementError
from tensoropt.profiling.facts import Facts
from tensoropt.profiling.workload import Workload
from tensoropt.ranks.kernel_settings import KernelSettings
from tensoropt.types import MEASURED, SOURCES


def processor_name() -> str:
    """The CPU's model name, for store keys and reports."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def measurement_prefix(
    ranks: int, threads: int, training: bool, device: str | None = None, kernels: KernelSettings | None = None
) -> str:
    """The head of a workload's key in the store: the hardware it was timed on and how it was timed.

    Args:
        device: a kind of GPU; None for this machine's processor.
        kernels: the PyTorch settings it was timed under; PyTorch's defaults if not given.
    """
    settings = (kernels or KernelSettings()).of("cuda" if device else "cpu").words
    mode = "train" if training else "inference"
    # How each one is timed: tensoropt.ranks.allocator, tensoropt.profiling.timers.
    on = f"{device}/host-ahead" if device else f"{processor_name()}/kept-memory,copies,nodes"
    if settings:
        on += f"/{settings}"
    return f"{on}/torch-{torch.__version__}/{ranks}x{threads}/{mode}"


class MeasuredCompute:
    """Costs from records of :func:`tensoropt.profiling.measure.measure_workloads`, by workload key.

    Args:
        rest: prices workloads without a record; None if everything was measured.
        lost: keys of workloads that must run although they could not be timed: ``rest`` prices them too.
        source: the source of the optimizer's figure; if None, that of ``rest``.
    """

    def __init__(
        self,
        records: Mapping[str, Mapping[str, Any]],
        optimizer_s_per_element: float,
        rest: RooflineCompute | None = None,
        *,
        lost: Container[str] = (),
        source: str | None = None,
    ):
        self.records = records
        self.optimizer_s_per_element = optimizer_s_per_element
        self.rest = rest
        self.lost = lost
        self.source = source or (MEASURED if rest is None else rest.source)

    def _record(self, work: Workload) -> Mapping[str, Any] | None:
        # The record of a lost workload is an "error"; hiding it makes ``rest`` price the workload instead of
        # returning infinity.
        return None if work.key in self.lost else self.records.get(work.key)

    def source_of(self, work: Workload) -> str:
        """The source of this workload's :meth:`seconds`, one of ``SOURCES``."""
        if self.rest is not None and self._record(work) is None:
            return self.rest.source_of(work)
        return MEASURED

    def seconds(self, work: Workload, facts: Facts) -> tuple[float, float]:
        """(forward, backward) seconds; infinite for a workload that could not run (out of memory)."""
        record = self._record(work)
        if record is None:
            if self.rest is not None:
                return self.rest.seconds(work, facts)
            raise MeasurementError(f"{work.describe()} was not measured; run explore again")
        # Infinite seconds tell the search that a configuration is impossible, so no table needs a special
        # case.
        if "error" in record:
            return float("inf"), float("inf")
        return float(record["forward_s"]), float(record["backward_s"])

    def host_seconds(self, work: Workload) -> tuple[float, float]:
        """(forward, backward) seconds of issuing the workload; 0 if the host is the device."""
        record = self._record(work)
        if record is None:
            return (0.0, 0.0) if self.rest is None else self.rest.host_seconds(work)
        return float(record.get("forward_host_s", 0.0)), float(record.get("backward_host_s", 0.0))

    def weight_gradient_s(self, work: Workload, facts: Facts) -> float:
        """The seconds of the product for a weight's gradient; see :func:`weight_gradient_share`."""
        if self._record(work) is None and self.rest is not None:
            return self.rest.weight_gradient_s(work, facts)
        return self.seconds(work, facts)[1] * weight_gradient_share(facts)


class SlowestCompute:
    """The pace of a sharded plan on devices of several kinds: for each operator, that of its slowest kind,
    for which the ranks of the other kinds wait.

    The slowest kind differs by operator: one kind has fewer FLOP/s, another slower memory.
    """

    def __init__(self, kinds: Sequence[MeasuredCompute]):
        self.kinds = tuple(kinds)

    @property
    def source(self) -> str:
        """The source of the figures of the kind with the slowest optimizer."""
        return self._slowest_optimizer.source

    @property
    def optimizer_s_per_element(self) -> float:
        """The seconds per element on the kind whose optimizer is slowest."""
        return self._slowest_optimizer.optimizer_s_per_element

    @property
    def _slowest_optimizer(self) -> MeasuredCompute:
        return max(self.kinds, key=lambda kind: kind.optimizer_s_per_element)

    def source_of(self, work: Workload) -> str:
        """The least trusted of the kinds' sources: measured only if all of them were."""
        # SOURCES is ordered from the most to the least trusted, so the largest index is the least trusted.
        return max((kind.source_of(work) for kind in self.kinds), key=SOURCES.index)

    def seconds(self, work: Workload, facts: Facts) -> tuple[float, float]:
        """(forward, backward) seconds, each of the kind that is slowest at it."""
        forward, backward = zip(*(kind.seconds(work, facts) for kind in self.kinds), strict=True)
        # Forward and backward have separate maxima: the kind that is slowest in forward need not be the
        # slowest in backward.
        return max(forward), max(backward)

    def weight_gradient_s(self, work: Workload, facts: Facts) -> float:
        """The seconds of the product for a weight's gradient, on the kind that is slowest in backward."""
        slowest = max(self.kinds, key=lambda kind: kind.seconds(work, facts)[1])
        return slowest.weight_gradient_s(work, facts)

    def host_seconds(self, work: Workload) -> tuple[float, float]:
        """(forward, backward) seconds of issuing the workload, each on the host of the slowest kind."""
        forward, backward = zip(*(kind.host_seconds(work) for kind in self.kinds), strict=True)
        return max(forward), max(backward)
