"""What stages make for themselves, and what they are sent: whichever takes less."""

from __future__ import annotations

from tensoropt.costs.source import CostSource
from tensoropt.pipeline.stages import Cutter
from tensoropt.profiling.workload import workload
from tensoropt.sharding.configurations import Configuration


def cheaper_again(cutter: Cutter, costs: CostSource) -> frozenset[str]:
    """Of the tensors that any stage can make for itself those that take less to make than to be sent once.

    Making takes as long as its FLOP at the device's peak or its bytes at the memory's bandwidth, whichever is
    longer; sending as long as the bytes over the outermost link. Both are of the whole batch, as splitting it
    divides both, and neither counts launches and latencies, of which each has as many as there are
    micro-batches.
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
