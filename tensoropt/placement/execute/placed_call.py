"""Run a model call in eval mode by a placed plan, each operator on its planned device or a parameter's."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tensoropt.engine.lowered_call import CallGraph, Collect, LoweredCall, Read, given_result
from tensoropt.engine.runtime import Runtime
from tensoropt.placement.execute.lower import LocalDevices, StepContext, lower_placed
from tensoropt.placement.execute.transport import Transport
from tensoropt.placement.graph import placed_graph
from tensoropt.placement.problem import Placement
from tensoropt.placement.program import schedule_of
from tensoropt.placement.strategy import PlacedStrategy, needed_routes


class PlacedCall(LoweredCall):
    """A call in eval mode by a placed plan; every rank passes in and gets back the whole batch.

    Args:
        local: the devices of this process.
        collect: a function that broadcasts a result from the device that computes it.
    """

    def __init__(
        self,
        plan: PlacedStrategy,
        call: CallGraph,
        local: LocalDevices,
        transport: Transport,
        runtime: Runtime,
        collect: Collect,
    ):
        self.source, self.transport, self.collect = call.source, transport, collect
        self.device = runtime.device
        self.strategy = _placed_like(plan, call)
        self.context = StepContext(self.strategy, local, transport)
        own = Runtime((1,), rank=runtime.rank, seed=runtime.seed, device=runtime.device)
        self.lowered = lower_placed(schedule_of(self.strategy).forward, own, self.context, evaluating=False)
        self.lowered.module.to(self.device)

    def __call__(self, inputs: Sequence[torch.Tensor], read: Read) -> list[torch.Tensor]:
        program = self.lowered.program
        made = self.lowered.module(*inputs, *map(read, (*program.parameters, *program.buffers)))
        own = dict(zip(program.outputs, made, strict=True))
        results = []
        for name in self.source.outputs:
            tensor = self.source.tensors[name]
            if tensor.kind != "activation":
                results.append(given_result(self.source, name, inputs, read))
                continue
            maker = self.strategy.maker(name)
            assert maker is not None, "results are made whole"
            value = own[name].to(self.device) if name in own else None
            results.append(self.collect(tensor, value, maker))
        self.transport.finish()
        return results


def _placed_like(plan: PlacedStrategy, call: CallGraph) -> PlacedStrategy:
    planned: dict[str, int] = {}
    for op, device in zip(plan.placed_graph.operators, plan.placement.device, strict=True):
        if op.group is not None:
            planned.setdefault(op.group.name, device)

    def holder(name: str) -> int:
        # Every device has a copy of a parameter that the plan does not know.
        return plan.holders(call.planned[name])[0] if name in call.planned else 0

    on: dict[str, int] = {}
    made: dict[str, int] = {}
    apart = set[str]()
    for group in call.groups.groups:
        latest = max((made[name] for name in group.reads), default=0)
        device = planned.get(group.name, latest)
        holders = {name: holder(name) for name in group.parameters}
        if holders and device not in holders.values():
            largest = max(holders, key=lambda name: call.source.tensors[name].bytes)
            device = holders[largest]
        # A parameter of another device is sent from there.
        apart.update(name for name, where in holders.items() if where != device)
        on[group.name] = device
        made.update((name, device) for op in group.operators for name in op.outputs)
    graph = placed_graph(call.groups, apart=apart)
    devices = tuple(holder(op.parameters[0]) if op.group is None else on[op.name] for op in graph.operators)
    placement = Placement.in_order(devices, plan.devices)
    return PlacedStrategy(graph, placement, needed_routes(graph, placement))
