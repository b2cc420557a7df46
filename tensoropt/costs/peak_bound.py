"""The limit of what CPU ranks compute in a second."""

from __future__ import annotations

from collections.abc import Mapping

from tensoropt.costs.compute import weight_gradient_share
from tensoropt.costs.prices import ComputeCosts
from tensoropt.profiling.facts import Facts
from tensoropt.profiling.workload import Workload


class PeakBoundCompute:
    """Costs of a CPU rank bounded below by peak FLOP/s (float32's for dtypes without their own)."""

    def __init__(self, costs: ComputeCosts, peaks: Mapping[str, float]):
        self.costs, self.peaks = costs, peaks

    @property
    def source(self) -> str:
        return self.costs.source

    @property
    def optimizer_s_per_element(self) -> float:
        return self.costs.optimizer_s_per_element

    def source_of(self, work: Workload) -> str:
        return self.costs.source_of(work)

    def seconds(self, work: Workload, facts: Facts) -> tuple[float, float]:
        forward_s, backward_s = self.costs.seconds(work, facts)
        return (
            max(forward_s, self._at_peak_s(work, facts.forward_flops)),
            max(backward_s, self._at_peak_s(work, facts.backward_flops)),
        )

    def host_seconds(self, work: Workload) -> tuple[float, float]:
        return self.costs.host_seconds(work)

    def weight_gradient_s(self, work: Workload, facts: Facts) -> float:
        flops = facts.backward_flops * weight_gradient_share(facts)
        return max(self.costs.weight_gradient_s(work, facts), self._at_peak_s(work, flops))

    def _at_peak_s(self, work: Workload, flops: float) -> float:
        return flops / self.peaks.get(work.dtype, self.peaks["float32"])
