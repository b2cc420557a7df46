"""Lower placed plans to modules that send tensors between devices and run backward operator by operator."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tensoropt.engine.gradients import DeferredStep, Gradients
from tensoropt.engine.lower import Interpretation, Lowered
from tensoropt.engine.parameters import LocalParameters, local_leaves, replicated
from tensoropt.engine.runtime import Runtime
from tensoropt.placement import program
from tensoropt.placement.execute.operators import Cut, Piece, join, split
from tensoropt.placement.execute.transport import Arriving, Transport
from tensoropt.placement.graph import Value
from tensoropt.placement.program import Place
from tensoropt.placement.strategy import PlacedStrategy
from tensoropt.sharding.buckets import Bucket
from tensoropt.sharding.program import Node
from tensoropt.sharding.strategy import Strategy


class _Entry(torch.autograd.Function):
    """The identity on an operator's input, whose backward adds the input's gradient to the tape."""

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
    """A root node above an operator's results, whose backward takes their gradients from the tape."""

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
    """The separate autograd graph of each operator in one micro-batch, and gradients between these graphs."""

    def __init__(self, anchor: torch.Tensor):
        self.anchor = anchor
        self._roots: dict[int, tuple[tuple[Place, ...], torch.Tensor]] = {}
        self._gradients: dict[Place, torch.Tensor] = {}
        self._owned: set[Place] = set()

    def enter(self, place: Place, value: torch.Tensor) -> torch.Tensor:
        # Values come without history, and autograd skips functions without any input that requires a
        # gradient: the anchor does.
        return _Entry.apply(self.anchor, value, weakref.ref(self), place)

    def record(self, operator: int, made: Sequence[tuple[Place, torch.Tensor]]) -> None:
        """Record an operator's results for its backward. Autograd must be enabled."""
        grown = [(place, value) for place, value in made if value.requires_grad]
        if grown:
            places = tuple(place for place, _ in grown)
            root = _Made.apply(weakref.ref(self), places, *(value for _, value in grown))
            self._roots[operator] = (places, root)

    def add(self, place: Place, gradient: torch.Tensor) -> None:
        """Add one reader's share of a gradient. The first is stored without a copy, the second allocates."""
        if place not in self._gradients:
            self._gradients[place] = gradient
        elif place in self._owned:
            self._gradients[place].add_(gradient)
        else:
            self._gradients[place] = self._gradients[place] + gradient
            self._owned.add(place)

    def take(self, place: Place) -> torch.Tensor | None:
        """Return a gradient, summed over readers, and remove it from the tape; None if there is none."""
        self._owned.discard(place)
        return self._gradients.pop(place, None)

    def backward(self, operator: int) -> None:
        """Run an operator's backward, once the gradients of its results are complete."""
        places, root = self._roots.pop(operator, ((), None))
        # Without any gradient, nothing that this operator read can have one.
        if root is not None and any(place in self._gradients for place in places):
            torch.autograd.backward(root, torch.ones_like(root))


class TapedStep(DeferredStep):
    """The state of a step between forward and backward: a tape for each micro-batch."""

    def __init__(self, tapes: Sequence[Tape]):
        super().__init__()
        self.tapes = list(tapes)


@dataclass(frozen=True)
class LocalDevices:
    """The devices of a plan that this process runs.

    Attributes:
        own: the numbers of this process's devices among the plan's devices.
        devices: the PyTorch device of each of the plan's devices.
    """

    own: tuple[int, ...]
    devices: tuple[torch.device, ...]

    @property
    def first(self) -> torch.device:
        """The PyTorch device of this process's first device, for values that belong to no operator."""
        return self.devices[self.own[0]]


class PlacedParameters(LocalParameters):
    """The unsplit parameters on this process's devices. Those that no operator reads are on every device."""

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
        return [device for device in self.strategy.holders(name) if device in self.local.own]

    def _device(self, name: str) -> int:
        return self._local_holders(name)[0]

    def copies(self, name: str) -> int:
        return len(self.strategy.holders(name))

    def shard(self, name: str, value: torch.Tensor) -> torch.Tensor:
        device = self.local.devices[self._device(name)]
        dtype = getattr(torch, self.source.tensors[name].stored_dtype)
        return value.detach().to(device=device, dtype=dtype, copy=True).contiguous()

    def _device_buckets(self) -> tuple[Bucket, ...]:
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
        return True

    @property
    def gathers_state(self) -> bool:
        return self.runtime.distributed

    def in_own_shape(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Return a state dict's value on all ranks, broadcast from the rank that stores it (collective)."""
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
    """State of a step for all nodes of a lowered plan. ``tape``: the micro-batch's; None without backward."""

    def __init__(self, strategy: PlacedStrategy, local: LocalDevices, transport: Transport):
        self.strategy, self.local, self.transport = strategy, local, transport
        self.tape: Tape | None = None
        self._earlier = 0

    def begin(self, micro_batch: int) -> None:
        """Begin a micro-batch. Its messages get other numbers than those of earlier micro-batches."""
        self._earlier = micro_batch * len(self.strategy.transfers)

    def send(self, number: int, value: torch.Tensor) -> None:
        target = self.strategy.transfers[number].target
        self.transport.send(self._earlier + number, target, value)

    def receive(self, number: int) -> Arriving:
        """Begin to receive message ``number`` of the plan, a value or gradient of the micro-batch."""
        name, source, target, _ = self.strategy.transfers[number]
        where = self.local.devices[target]
        return self.transport.receive(self._earlier + number, source, *self.form(name), where)

    def form(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Return a value's shape and dtype in one micro-batch."""
        graph = self.strategy.placed_graph
        value = graph.values[name]
        dtype = graph.groups.atoms.graph.tensors[value.tensor].dtype
        return graph.shape(value), getattr(torch, dtype)

    def enter(self, place: Place, value: torch.Tensor) -> torch.Tensor:
        return value if self.tape is None else self.tape.enter(place, value)

    def end(self, number: int, places: tuple[Place, ...], *made: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Record an operator's results (``places``: name, device) on the tape, and return them detached."""
        if self.tape is None:
            return made
        self.tape.record(number, list(zip(places, made, strict=True)))
        # Without history: each operator has a graph of its own.
        return tuple(value.detach() for value in made)


def _wait_for(arriving: Arriving) -> torch.Tensor:
    return arriving()


class _Interpretation(Interpretation):
    def __init__(self, strategy: Strategy, runtime: Runtime, step: StepContext):
        super().__init__(strategy, runtime)
        self.step, self.placed = step, step.strategy.placed_graph

    def node(self, node: Node, reads: Mapping[str, fx.Node]) -> Any:
        match node:
            case program.SendValue():
                return self.function(self.step.send, "send", reads.values(), node.number)
            case program.ReceiveValue():
                return self.function(self.step.receive, "receive", reads.values(), node.number)
            case program.WaitForValue():
                return self.function(_wait_for, "wait", reads.values())
            case program.OnDevice():
                return self._on_device(node, *reads.values())
            case program.BeginOperator():
                device = self.step.local.devices[self.step.strategy.placement.device[node.number]]
                self.context = Piece(self.runtime, self.placed.operators[node.number], device)
                return None
            case program.Enter(learns=False):
                return next(iter(reads.values()))
            case program.Enter():
                return self.function(self.step.enter, "enter", reads.values(), node.place)
            case program.EndOperator():
                made = self.function(self.step.end, "end", reads.values(), node.number, node.places)
                names = (name for name, _ in node.places)
                return {name: self.item(made, index) for index, name in enumerate(names)}
            case program.Zeros():
                tensor = self.source.tensors[node.tensor]
                options = {"dtype": getattr(torch, tensor.dtype), "device": self.context.device}
                return self.graph.call_function(torch.zeros, (tensor.shape,), options)
            case program.SplitTensor():
                pieces = self.function(split, "split", reads.values(), self._cut(node.piece))
                return {piece.name: self.item(pieces, i) for i, piece in enumerate(node.piece.pieces)}
            case program.JoinPieces():
                return self.function(join, "join", reads.values(), self._cut(node.piece))
        return super().node(node, reads)

    def _on_device(self, node: program.OnDevice, value: fx.Node) -> fx.Node:
        devices = self.step.local.devices
        # All devices of this process are the same, so nothing has to be copied.
        if len({devices[device] for device in self.step.local.own}) == 1:
            return value
        return self.graph.call_method("to", (value, devices[node.device]))

    def _cut(self, piece: Value) -> Cut:
        assert piece.code is not None
        return Cut(self.strategy.atoms(piece.tensor), piece.code, piece.count)


def lower_placed(
    order: program.PlacedOrder, runtime: Runtime, step: StepContext, *, evaluating: bool
) -> Lowered:
    """Lower the part of forward that this process's devices run.

    Args:
        order: all operators and messages of forward, in order.
        evaluating: whether to lower a training graph in eval mode.
    """
    lowering = program.PlacedLowering(step.strategy, order, step.local.own, evaluating)
    return _Interpretation(lowering.strategy, runtime, step).lowered(lowering.program())
