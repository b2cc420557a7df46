"""Seconds of workloads: measured here, or from a data sheet.

Every figure knows its source: ``measured`` (this very workload on these ranks), ``data sheet`` (roofline
with fixed efficiencies).
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tensoropt.cluster import DeviceKind
from tensoropt.costs.facts import Facts
from tensoropt.costs.parameters import OPTIMIZER_STATE
from tensoropt.costs.workload import Workload
from tensoropt.errors import MeasurementError

MEASURED, DATA_SHEET = "measured", "data sheet"

MATRIX_EFFICIENCY = 0.55
"""Share of peak FLOP/s that large matrix products reach in training (fixed until fitted)."""
MEMORY_EFFICIENCY = 0.75
"""Share of peak memory bandwidth that element-wise kernels reach."""
LAUNCH_S = 5e-6
"""Launch of one kernel; forward one per call, backward two."""


def processor_name() -> str:
    """The CPU's model name, for store keys and reports."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def measurement_prefix(ranks: int, threads: int, training: bool) -> str:
    """Says on what and how a workload was timed; the head of its key in the store."""
    mode = "train" if training else "inference"
    return f"{processor_name()}/torch-{torch.__version__}/{ranks}x{threads}/{mode}"


class MeasuredCompute:
    """Records of :func:`tensoropt.costs.measure.measure`, by workload key."""

    def __init__(self, records: Mapping[str, Mapping[str, Any]], optimizer_s_per_element: float):
        self.records = records
        self.optimizer_s_per_element = optimizer_s_per_element

    source = MEASURED

    def source_of(self, work: Workload) -> str:
        return self.source

    def seconds(self, work: Workload, facts: Facts) -> tuple[float, float]:
        """(forward, backward); infinite for a workload that could not run (out of memory)."""
        record = self.records.get(work.key)
        if record is None:
            raise MeasurementError(f"{work.describe()} was not measured; run explore again")
        if "error" in record:
            return float("inf"), float("inf")
        return float(record["forward_s"]), float(record["backward_s"])


class RooflineCompute:
    """The larger of arithmetic and memory time, with efficiencies, plus launches.

    Williams, Waterman, Patterson: Roofline, CACM 2009. FLOP and traffic come from :class:`Facts`.
    """

    source = DATA_SHEET

    def source_of(self, work: Workload) -> str:
        return self.source

    def __init__(self, device: DeviceKind, optimizer: str):
        self.device = device
        self.optimizer = optimizer

    def _seconds(self, dtype: str, flops: float, traffic: float, launches: int) -> float:
        arithmetic = flops / (self.device.flops_of(dtype) * MATRIX_EFFICIENCY)
        memory = traffic / (self.device.memory_bandwidth * MEMORY_EFFICIENCY)
        return max(arithmetic, memory) + launches * LAUNCH_S

    def seconds(self, work: Workload, facts: Facts) -> tuple[float, float]:
        moving = ("view", "reshape", "transpose", "permute", "expand", "split", "slice", "select")
        calls = sum(1 for call, _ in work.calls if call.function.split(".")[1].rstrip("_") not in moving)
        forward = self._seconds(work.dtype, facts.forward_flops, facts.traffic_bytes, calls)
        backward = self._seconds(work.dtype, facts.backward_flops, 2.0 * facts.traffic_bytes, 2 * calls)
        return forward, backward

    @property
    def optimizer_s_per_element(self) -> float:
        """Reads parameter, gradient and state, writes parameter and state (float32)."""
        values = 3 + 2 * OPTIMIZER_STATE[self.optimizer]
        return 4.0 * values / (self.device.memory_bandwidth * MEMORY_EFFICIENCY)
