"""Lowering of placed plans: the graph cut by device, with nodes that move values between the parts.

After NetSplit's Algorithm 2. A process gets the part of the devices it plays: its operators in the plan's
order, one node each, and for every value that crosses a border a ``move`` node where it plays both ends,
else a ``send`` or a ``receive`` node. Received values are waited for in front of the operator that reads them
first, not where they are asked for.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from tensoropt.engine.runtime import Runtime
from tensoropt.errors import PlanError
from tensoropt.placement.execute.operators import Body, body_of
from tensoropt.placement.execute.order import Schedule, Transfer
from tensoropt.placement.execute.parameters import Placing
from tensoropt.placement.execute.tape import Place, Tape
from tensoropt.placement.execute.transport import Arriving, Transport
from tensoropt.placement.graph import PlacedOperator, Value
from tensoropt.placement.plans import PlacedStrategy


class Running:
    """What the nodes of a running graph share.

    Attributes:
        tape: of this step; None where no backward follows.
        moved: bytes of every value and gradient moved inside this process so far.
    """

    def __init__(self, transport: Transport, keeper: Any):
        self.transport = transport
        self.keeper = keeper
        self.tape: Tape | None = None
        self.moved: list[int] = []

    def move(self, value: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A copy on another device."""
        self.moved.append(value.numel() * value.element_size())
        return value.detach().to(device, copy=True)


class Stage(nn.Module):
    """One placed operator: its body, run under autograd on its own."""

    def __init__(
        self,
        running: Running,
        number: int,
        operator: PlacedOperator,
        device: int,
        grows: tuple[bool, ...],
        body: Body,
        casts: bool,
    ):
        super().__init__()
        self.body = body.module
        self.running, self.number, self.casts = running, number, casts
        self.reads = tuple(((v, device), g) for v, g in zip(operator.reads, grows, strict=True))
        self.writes: tuple[Place, ...] = tuple((v, device) for v in operator.writes)

    def forward(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        tape = self.running.tape
        if tape is None:
            with torch.no_grad():
                return self.body.forward(*given)
        rest = given[len(self.reads) :]
        values = [
            tape.enter(place, value) if grows else value
            for (place, grows), value in zip(self.reads, given, strict=False)
        ]
        with torch.enable_grad():
            if self.casts:
                keeper = self.running.keeper
                with torch.autograd.graph.saved_tensors_hooks(keeper.pack, keeper.unpack):
                    made = self.body.forward(*values, *rest)
            else:
                made = self.body.forward(*values, *rest)
            tape.record(self.number, list(zip(self.writes, made, strict=True)))
        return tuple(value.detach() for value in made)


@dataclass
class Part:
    """What one process runs forward.

    Attributes:
        module: called with the model's inputs, the parameters and the buffers that are here; returns
            ``results``.
        parameters, buffers: names of the arguments after the inputs.
        results: values in the order in which the module returns them: outputs of the model and new values of
            buffers, as far as they are made here.
        moves, sends, receives: how many such nodes there are.
    """

    module: fx.GraphModule
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    results: tuple[Value, ...]
    counts: bool
    moves: int
    sends: int
    receives: int


def _named(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    function.__name__ = name
    return function


def _arrived(arriving: Arriving) -> torch.Tensor:
    return arriving.wait()


class _Lowering:
    def __init__(
        self,
        strategy: PlacedStrategy,
        schedule: Schedule,
        placing: Placing,
        runtime: Runtime,
        running: Running,
        evaluating: bool,
    ):
        self.strategy, self.schedule, self.placing = strategy, schedule, placing
        self.runtime, self.running, self.evaluating = runtime, running, evaluating
        self.groups = strategy.graph.groups
        self.source = self.groups.atoms.graph
        self.graph = fx.Graph()
        self.root = nn.Module()
        self.places: dict[str, fx.Node] = {}
        self.free: dict[tuple[str, int], fx.Node] = {}
        self.values: dict[Place, fx.Node] = {}
        self.arriving: dict[Place, fx.Node] = {}
        self.found = {"moves": 0, "sends": 0, "receives": 0}
        self.counts = False

    def run(self) -> Part:
        placement, here = self.strategy.placement, self.placing.here
        own = {o for o, d in enumerate(placement.device) if d in here}
        parameters = tuple(p for o in sorted(own) for p in self.strategy.graph.operators[o].parameters)
        buffers = tuple(t.name for t in self.source.tensors.values() if t.kind == "buffer")
        for name in (*self.source.inputs, *parameters, *buffers):
            self.places[name] = self.graph.placeholder(name)
        for instruction in self.schedule.forward:
            if isinstance(instruction, Transfer):
                self._transfer(instruction)
            elif instruction in own:
                self._operator(instruction)
        results = [
            value
            for number in sorted(own)
            for value in self.strategy.graph.operators[number].writes
            if self._leaves(value)
        ]
        device = placement.device
        makers = {v: o for o in own for v in self.strategy.graph.operators[o].writes}
        self.graph.output(tuple(self.values[v, device[makers[v]]] for v in results))
        self.graph.lint()
        module = fx.GraphModule(self.root, self.graph, class_name="PlacedPart")
        return Part(module, parameters, buffers, tuple(results), self.counts, **self.found)

    def _leaves(self, value: Value) -> bool:
        """Whether the step needs it after forward: an output, or a part of a buffer's new value."""
        if value.tensor in self.source.mutations.values():
            return True
        return value.code is None and value.tensor in self.source.outputs

    # -- operators --------------------------------------------------------------------------------

    def _operator(self, number: int) -> None:
        op = self.strategy.graph.operators[number]
        device = self.strategy.placement.device[number]
        where = self.placing.devices[device]
        body = body_of(op, self.groups, self.runtime, where, evaluating=self.evaluating)
        self.counts |= body.counts
        tensors = self.source.tensors
        grows = tuple(tensors[v.tensor].requires_grad for v in op.reads)
        casts = any(tensors[p].master_dtype is not None for p in op.parameters) and op.kind != "variable"
        name = f"stage_{number}"
        self.root.add_module(name, Stage(self.running, number, op, device, grows, body, casts))
        args = [self._value(v, device) for v in op.reads]
        args += [self.places[p] for p in op.parameters]
        args += [self._whole(f, device) for f in body.free]
        node = self.graph.create_node("call_module", name, tuple(args), name=op.name)
        node.meta["placed"] = op.name
        for index, value in enumerate(op.writes):
            self.values[value, device] = self.graph.call_function(operator.getitem, (node, index))

    def _value(self, value: Value, device: int) -> fx.Node:
        place = (value, device)
        if place in self.arriving:
            self.values[place] = self.graph.call_function(_arrived, (self.arriving.pop(place),))
        return self.values[place]

    def _whole(self, name: str, device: int) -> fx.Node:
        """An input, constant or buffer, which every process has, on a device."""
        if name not in self.places:
            attribute = f"constant_{name.replace('.', '_')}"
            self.root.register_buffer(attribute, self._constant(name), persistent=False)
            self.places[name] = self.graph.get_attr(attribute)
        if len({self.placing.devices[d] for d in self.placing.here}) == 1:
            return self.places[name]
        if (name, device) not in self.free:
            where = self.placing.devices[device]
            self.free[name, device] = self.graph.call_method("to", (self.places[name], where))
        return self.free[name, device]

    def _constant(self, name: str) -> torch.Tensor:
        """The folded value; a graph captured without data may lack it."""
        if name in self.source.constants:
            constant: torch.Tensor = self.source.constants[name]
            return constant
        tensor = self.source.tensors[name]
        return torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device="meta")

    # -- borders ----------------------------------------------------------------------------------

    def _transfer(self, transfer: Transfer) -> None:
        here = self.placing.here
        starts, ends = transfer.source in here, transfer.target in here
        place = (transfer.value, transfer.target)
        if starts and ends:
            move = functools.partial(self.running.move, device=self.placing.devices[transfer.target])
            self.values[place] = self._border(move, "move", transfer)
        elif starts:
            self._border(functools.partial(self.running.transport.send, transfer), "send", transfer)
        elif ends:
            receive = functools.partial(
                self.running.transport.receive,
                transfer,
                self.strategy.graph.shape(transfer.value),
                getattr(torch, self.source.tensors[transfer.value.tensor].dtype),
                self.placing.devices[transfer.target],
            )
            node = self.graph.call_function(_named(receive, "receive"), ())
            node.meta["transfer"] = transfer
            self.arriving[place] = node
            self.found["receives"] += 1

    def _border(self, function: Callable[..., Any], name: str, transfer: Transfer) -> fx.Node:
        value = self._value(transfer.value, transfer.source)
        node = self.graph.call_function(_named(function, name), (value,))
        node.meta["transfer"] = transfer
        self.found[f"{name}s"] += 1
        return node


def lower_part(
    strategy: PlacedStrategy,
    schedule: Schedule,
    placing: Placing,
    runtime: Runtime,
    running: Running,
    *,
    evaluating: bool = False,
) -> Part:
    """The forward graph of the devices that this process plays.

    Args:
        evaluating: as ``model.eval()`` computes, though the graph was captured for training.
    """
    return _Lowering(strategy, schedule, placing, runtime, running, evaluating).run()


def check_buffers(strategy: PlacedStrategy) -> None:
    """Raise :class:`PlanError` where a buffer that a step changes is read on a device that does not see the
    change."""
    graph, placement = strategy.graph, strategy.placement
    mutations: Mapping[str, str] = graph.groups.atoms.graph.mutations
    made: dict[tuple[str, int], list[Value]] = {}
    for number, op in enumerate(graph.operators):
        for value in op.writes:
            made.setdefault((value.tensor, placement.device[number]), []).append(value)
    for number, op in enumerate(graph.operators):
        for name in op.group.free if op.group is not None else ():
            if name not in mutations:
                continue
            device = placement.device[number]
            known = made.get((mutations[name], device), [])
            assert op.configuration is not None
            part = Value(mutations[name], op.configuration.layout(name)[1], op.count, op.index)
            if Value(mutations[name]) not in known and part not in known:
                raise PlanError(
                    f"operator {op.name} on device {device} reads the buffer {name}, which a step changes on "
                    "another device; place both on one device"
                )
