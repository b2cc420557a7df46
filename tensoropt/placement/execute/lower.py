"""Lowering of placed plans: the graph cut by device, with nodes that move values between the parts.

This follows NetSplit's Algorithm 2. A process gets the part of the devices it runs: its operators in the
plan's order, one node each, and for every value that crosses a border a ``move`` node if it runs both ends,
otherwise a ``send`` or a ``receive`` node. The wait for a received value comes just before the operator that
reads it first, not where it is requested.

Backward runs one placed operator at a time.

Every operator runs under autograd on its own: the values that it reads pass through :class:`_Entry`, whose
backward hands the gradient to the tape instead of to the maker of the value. An operator's backward is then a
separate call, made when the plan says. In between, only what autograd saved and the gradients that wait on
the tape are alive.

The parameters of a placed plan are whole, each on the device of the operator to which it belongs.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from tensoropt.engine.gradients import DeferredStep, Gradients
from tensoropt.engine.lower import Lowered, add_constant, add_function
from tensoropt.engine.parameters import LocalParameters, local_leaves, replicated
from tensoropt.engine.recompute import RegatheredParameters
from tensoropt.engine.runtime import Runtime
from tensoropt.placement.execute.operators import Body, body_of
from tensoropt.placement.execute.transport import Arriving, PlacedSchedule, Transfer, Transport
from tensoropt.placement.graph import PlacedOperator, Value
from tensoropt.placement.strategy import PlacedStrategy
from tensoropt.sharding.buckets import Bucket

Place = tuple[Value, int]
"""A value as it is on a device."""


class _Entry(torch.autograd.Function):
    """The function through which a value enters an operator; it keeps nothing."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, value: torch.Tensor, tape: Any, place: Place) -> torch.Tensor:
        ctx.tape, ctx.place = tape, place
        # A function that returns its input as it is would hand out the input itself. A view costs no memory.
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        tape = ctx.tape()  # a tape holds its operators' graphs, so they must not hold it
        if tape is not None:
            tape.add(ctx.place, gradient)
        return None, None, None, None


class _Made(torch.autograd.Function):
    """The function that joins an operator's results under one root, whose backward takes the gradients off
    the tape and releases them: autograd then frees each as soon as it is used up.
    """

    @staticmethod
    def forward(ctx: Any, tape: Any, places: tuple[Place, ...], *made: torch.Tensor) -> torch.Tensor:
        ctx.tape, ctx.places = tape, places
        # An empty root: the gradients come from the tape, not from above.
        return made[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:  # type: ignore[override]
        tape = ctx.tape()
        return None, None, *(tape.take(place) for place in ctx.places)


class Tape:
    """The graphs and gradients of one micro-batch, from forward to backward."""

    def __init__(self, anchor: torch.Tensor):
        self.anchor = anchor
        self._roots: dict[int, tuple[tuple[Place, ...], torch.Tensor]] = {}
        self._gradients: dict[Place, torch.Tensor] = {}
        self._owned: set[Place] = set()

    def enter(self, place: Place, value: torch.Tensor) -> torch.Tensor:
        """Return a value as an operator reads it."""
        # Values come without history, and autograd skips functions without any input that requires a
        # gradient: the anchor does.
        return _Entry.apply(self.anchor, value, weakref.ref(self), place)

    def record(self, operator: int, made: Sequence[tuple[Place, torch.Tensor]]) -> None:
        """Record an operator's results; called where gradients are enabled."""
        grown = [(place, value) for place, value in made if value.requires_grad]
        if grown:
            places = tuple(place for place, _ in grown)
            root = _Made.apply(weakref.ref(self), places, *(value for _, value in grown))
            self._roots[operator] = (places, root)

    def add(self, place: Place, gradient: torch.Tensor) -> None:
        """Add a reader's share of a gradient. The first share is taken as the sum; it may belong to something
        else, too, so a second one makes a sum that is the tape's own."""
        if place not in self._gradients:
            self._gradients[place] = gradient
        elif place in self._owned:
            self._gradients[place].add_(gradient)
        else:
            self._gradients[place] = self._gradients[place] + gradient
            self._owned.add(place)

    def take(self, place: Place) -> torch.Tensor | None:
        """Return the sum of all shares, and release it; None if no reader had one."""
        self._owned.discard(place)
        return self._gradients.pop(place, None)

    def backward(self, operator: int) -> None:
        """Run an operator's backward with the gradients of its results, all of which are there."""
        places, root = self._roots.pop(operator, ((), None))
        # Without any gradient, nothing that this operator read can have one.
        if root is not None and any(place in self._gradients for place in places):
            torch.autograd.backward(root, torch.ones_like(root))


class TapedStep(DeferredStep):
    """A step from forward to backward: a tape for each micro-batch."""

    def __init__(self, tapes: Sequence[Tape]):
        super().__init__()
        self.tapes = list(tapes)


@dataclass(frozen=True)
class LocalDevices:
    """The devices of the plan that this process runs, and their PyTorch devices.

    Attributes:
        own: their positions among the plan's devices.
        devices: for each device of the plan, where its tensors lie; only those in ``own`` matter.
    """

    own: tuple[int, ...]
    devices: tuple[torch.device, ...]

    @property
    def first(self) -> torch.device:
        """The device for values that belong to no operator."""
        return self.devices[self.own[0]]


class PlacedParameters(LocalParameters):
    """The parameters on this process's devices, whole; one that no operator reads is on every process."""

    def __init__(
        self,
        strategy: PlacedStrategy,
        local: LocalDevices,
        runtime: Runtime,
        transport: Transport,
        values: Mapping[str, torch.Tensor],
    ):
        self.source = strategy.graph.atoms.graph
        self.strategy, self.local, self.runtime, self.transport = strategy, local, runtime, transport
        own = [t for t in self.source.parameters if self._local_holders(t.name)]
        self.leaves = local_leaves(own, values, self.shard)
        # After the leaves: the buckets put hooks on them.
        self.accumulated = Gradients(runtime, self._device_buckets(), self.leaves)
        self.buckets = (self.accumulated,)

    def _local_holders(self, name: str) -> list[int]:
        """Return the devices of this process that hold a parameter."""
        return [device for device in self.strategy.holders(name) if device in self.local.own]

    def _device(self, name: str) -> int:
        return self._local_holders(name)[0]

    def copies(self, name: str) -> int:
        """Return the number of devices that hold a parameter."""
        return len(self.strategy.holders(name))

    def shard(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Return a copy of a parameter's whole value on its device, in the type in which it is stored."""
        device = self.local.devices[self._device(name)]
        dtype = getattr(torch, self.source.tensors[name].stored_dtype)
        return value.detach().to(device=device, dtype=dtype, copy=True).contiguous()

    def _device_buckets(self) -> tuple[Bucket, ...]:
        """Return one bucket per device and type; nothing reduces them, as each parameter is on one device
        only."""
        names: dict[tuple[int, str], list[str]] = {}
        for name, leaf in self.leaves.items():
            if leaf.requires_grad:
                # A bucket is one flat tensor, which lies on one device and has one type.
                key = self._device(name), self.source.tensors[name].stored_dtype
                names.setdefault(key, []).append(name)
        return tuple(
            Bucket((), dtype, tuple(of_bucket), sum(self.leaves[n].numel() for n in of_bucket))
            for (_, dtype), of_bucket in names.items()
        )

    def in_state(self, name: str) -> bool:
        """Return True: a state dict has whole parameters on every rank."""
        return True

    @property
    def gathers_state(self) -> bool:
        """Whether several processes have the parameters."""
        return self.runtime.distributed

    def in_own_shape(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Return, on every rank, the value on the rank that holds the parameter; all ranks must call it."""
        mesh = self.runtime.device_mesh
        if mesh is None:
            return value
        if name in self.leaves:
            whole = value.detach().clone(memory_format=torch.contiguous_format)
        else:
            # A buffer for the broadcast; its contents do not matter.
            whole = torch.empty(self.source.tensors[name].shape, dtype=value.dtype, device=value.device)
        holders = self.strategy.holders(name)
        if len(holders) < self.strategy.devices:
            whole = self.transport.broadcast(whole, holders[0])
        return replicated(whole, mesh)


class StepContext:
    """The state that the nodes of a lowered part share while they run.

    Attributes:
        transport: carries values to other processes.
        regathered: keeps autograd from saving cast parameters.
        tape: the tape of the running micro-batch; None if no backward follows.
        numbered: the number of transfers before those of the running micro-batch.
    """

    def __init__(self, transport: Transport, regathered: RegatheredParameters):
        self.transport = transport
        self.regathered = regathered
        self.tape: Tape | None = None
        self.numbered = 0

    def send(self, transfer: Transfer, value: torch.Tensor) -> None:
        """Begin to send a value, or a gradient, of the running micro-batch."""
        self.transport.send(transfer.later(self.numbered), value)

    def receive(
        self, transfer: Transfer, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Arriving:
        """Begin to receive a value, or a gradient, of the running micro-batch."""
        return self.transport.receive(transfer.later(self.numbered), shape, dtype, device)

    def move(self, value: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return a copy on another device."""
        # Always a copy, also where two devices of a plan are one (all are the CPU): what a plan sends is a
        # tensor of its own on the other side.
        return value.detach().to(device, copy=True)


class OperatorCall(nn.Module):
    """One placed operator: its body, run under autograd on its own.

    Args:
        number: the operator's position in the placed graph.
        device: the device where it is placed.
        learns: for each value that it reads, whether a gradient goes back to it.
        casts: whether its body casts master weights, which backward casts once more.
    """

    def __init__(
        self,
        context: StepContext,
        number: int,
        operator: PlacedOperator,
        device: int,
        learns: tuple[bool, ...],
        body: Body,
        casts: bool,
    ):
        super().__init__()
        self.body = body.module
        self.context, self.number, self.casts = context, number, casts
        self.reads = tuple(((v, device), g) for v, g in zip(operator.reads, learns, strict=True))
        self.writes: tuple[Place, ...] = tuple((v, device) for v in operator.writes)

    def forward(self, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        tape = self.context.tape
        if tape is None:
            with torch.no_grad():
                return self.body.forward(*operands)
        rest = operands[len(self.reads) :]
        values = [
            tape.enter(place, value) if learns else value
            for (place, learns), value in zip(self.reads, operands, strict=False)
        ]
        with torch.enable_grad():
            with self.context.regathered.hooks() if self.casts else nullcontext():
                made = self.body.forward(*values, *rest)
            tape.record(self.number, list(zip(self.writes, made, strict=True)))
        # Readers get the values without history: each operator has a graph of its own.
        return tuple(value.detach() for value in made)


@dataclass
class LoweredPart(Lowered):
    """The part of a placed plan's forward that one process runs.

    Attributes:
        results: the values in the order in which the module returns them: those outputs of the model and new
            values of buffers that are made here.
        counts: whether any operator needs the counts of mean losses beforehand.
    """

    results: tuple[Value, ...]
    counts: bool


def _wait_for(arriving: Arriving) -> torch.Tensor:
    return arriving.wait()


class _Lowering:
    def __init__(
        self,
        strategy: PlacedStrategy,
        schedule: PlacedSchedule,
        local: LocalDevices,
        runtime: Runtime,
        context: StepContext,
        evaluating: bool,
    ):
        self.strategy, self.schedule, self.local = strategy, schedule, local
        self.runtime, self.context, self.evaluating = runtime, context, evaluating
        self.groups = strategy.graph
        self.source = self.groups.atoms.graph
        self.graph = fx.Graph()
        self.root = nn.Module()
        self.places: dict[str, fx.Node] = {}
        self.free: dict[tuple[str, int], fx.Node] = {}
        self.values: dict[Place, fx.Node] = {}
        self.arriving: dict[Place, fx.Node] = {}
        self.counts = False

    def lowered(self) -> LoweredPart:
        """Return the part of this process."""
        placement = self.strategy.placement
        own = {o for o, d in enumerate(placement.device) if d in self.local.own}
        parameters = tuple(p for o in sorted(own) for p in self.strategy.placed_graph.operators[o].parameters)
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
            for value in self.strategy.placed_graph.operators[number].writes
            if self._leaves(value)
        ]
        device = placement.device
        makers = {v: o for o in own for v in self.strategy.placed_graph.operators[o].writes}
        self.graph.output(tuple(self.values[v, device[makers[v]]] for v in results))
        self.graph.lint()
        module = fx.GraphModule(self.root, self.graph, class_name="PlacedPart")
        return LoweredPart(module, parameters, buffers, tuple(results), self.counts)

    def _leaves(self, value: Value) -> bool:
        """Return whether the step needs a value after forward: an output, or a part of a buffer's new
        value.
        """
        if value.tensor in self.source.mutations.values():
            return True
        return value.code is None and value.tensor in self.source.outputs

    # -- operators --------------------------------------------------------------------------------

    def _operator(self, number: int) -> None:
        op = self.strategy.placed_graph.operators[number]
        device = self.strategy.placement.device[number]
        where = self.local.devices[device]
        body = body_of(op, self.groups, self.runtime, where, evaluating=self.evaluating)
        self.counts |= body.counts
        tensors = self.source.tensors
        learns = tuple(tensors[v.tensor].requires_grad for v in op.reads)
        casts = any(tensors[p].master_dtype is not None for p in op.parameters) and op.kind != "variable"
        name = f"operator_{number}"
        self.root.add_module(name, OperatorCall(self.context, number, op, device, learns, body, casts))
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
            self.values[place] = self.graph.call_function(_wait_for, (self.arriving.pop(place),))
        return self.values[place]

    def _whole(self, name: str, device: int) -> fx.Node:
        """Return an input, constant or buffer, which every process has, on a device."""
        if name not in self.places:
            self.places[name] = add_constant(self.graph, self.root, self.source, name)
        # All devices of this process are the same, so nothing has to be copied.
        if len({self.local.devices[d] for d in self.local.own}) == 1:
            return self.places[name]
        if (name, device) not in self.free:
            where = self.local.devices[device]
            self.free[name, device] = self.graph.call_method("to", (self.places[name], where))
        return self.free[name, device]

    # -- borders ----------------------------------------------------------------------------------

    def _transfer(self, transfer: Transfer) -> None:
        own = self.local.own
        starts, ends = transfer.source in own, transfer.target in own
        place = (transfer.value, transfer.target)
        if starts and ends:
            move = functools.partial(self.context.move, device=self.local.devices[transfer.target])
            self.values[place] = self._border(move, "move", transfer)
        elif starts:
            self._border(functools.partial(self.context.send, transfer), "send", transfer)
        elif ends:
            receive = functools.partial(
                self.context.receive,
                transfer,
                self.strategy.placed_graph.shape(transfer.value),
                getattr(torch, self.source.tensors[transfer.value.tensor].dtype),
                self.local.devices[transfer.target],
            )
            node = add_function(self.graph, receive, "receive", ())
            node.meta["transfer"] = transfer
            # Not a value yet: the wait is put before its first reader.
            self.arriving[place] = node

    def _border(self, function: functools.partial[Any], name: str, transfer: Transfer) -> fx.Node:
        value = self._value(transfer.value, transfer.source)
        node = add_function(self.graph, function, name, (value,))
        node.meta["transfer"] = transfer
        return node


def lower_part(
    strategy: PlacedStrategy,
    schedule: PlacedSchedule,
    local: LocalDevices,
    runtime: Runtime,
    context: StepContext,
    *,
    evaluating: bool = False,
) -> LoweredPart:
    """Return the forward graph of the devices that this process runs.

    Args:
        evaluating: whether to compute as ``model.eval()`` does, though the graph was captured for training.
    """
    return _Lowering(strategy, schedule, local, runtime, context, evaluating).lowered()
