"""The choice between making a tensor again in each stage and sending it: whichever takes less time."""

from __future__ import annotations

from tensoropt.costs.source import CostSource
from tensoropt.pipeline.stages import Cutter
from tensoropt.profiling.workload import workload
from tensoropt.sharding.configurations import Configuration


def cheaper_again(cutter: Cutter, costs: CostSource) -> frozenset[str]:
    """Return the tensors that any stage can make for itself in less time than it takes to send them once.

    Making a tensor takes as long as its FLOP at the device's peak or its bytes at the memory's bandwidth,
    whichever is longer; sending it takes as long as its bytes over the outermost link. Both are for the whole
    batch, as splitting it divides both. Neither counts launches and latencies, which occur once per
    micro-batch in both cases.
    """
    device, levels = costs.cluster.device, costs.cluster.levels
    if not levels:
        return cutter.can_be_made_again
    link = levels[0].link
    peak = max(device.flops.values())
    tensors = cutter.source.tensors
    found = set()
    for name in cutter.can_be_made_again:
        makers = cutter.makers_of([name])
        flops = sum(
            costs.facts_of(workload(cutter.graph, Configuration(group, (group.unsplit,)), (1,))).forward_flops
            for group in makers
        )
        making_s = max(flops / peak, cutter.made_again_bytes(name) / device.memory_bandwidth)
        if making_s <= tensors[name].bytes / link.bandwidth_bytes_per_s:
            found.add(name)
    return frozenset(found)
