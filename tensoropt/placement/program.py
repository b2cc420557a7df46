"""The program that a process runs for a placed plan: its operators, sends and receives in the global order.

As in NetSplit's Algorithm 2, one node sends each value that another device reads, and one receives it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from tensoropt.errors import PlanError
from tensoropt.ops.layouts import REPLICATE
from tensoropt.placement.graph import OperatorKind, PlacedOperator, Value
from tensoropt.placement.order import Flow, TensorTransfer, ordered
from tensoropt.placement.strategy import PlacedStrategy, ValueTransfer, needed_routes
from tensoropt.sharding.program import ForwardProgram, Lowering, Node
from tensoropt.sharding.strategy import Edge, Strategy

Place = tuple[str, int]
"""The name of a value (a tensor or a piece of one), and the number of a device on which it lies."""

PlacedOrder = tuple[tuple[bool, int], ...]
"""For each operator and message of a micro-batch: whether it is an operator, and its number."""


class PlacedSchedule(NamedTuple):
    """All operators and messages of forward and of backward, in an order in which no device deadlocks."""

    forward: PlacedOrder
    backward: PlacedOrder


def schedule_of(strategy: PlacedStrategy) -> PlacedSchedule:
    """Return the order of a plan's step; PlanError if messages are missing or needless, or deadlock."""
    routes, graph = tuple(strategy.transfers), strategy.placed_graph
    _check(strategy, routes)
    number, tensors = {name: n for n, name in enumerate(graph.values)}, graph.groups.atoms.graph.tensors
    makers = {value.name: n for n, op in enumerate(graph.operators) for value in op.writes}
    flow = Flow(
        [op.name for op in graph.operators],
        [[number[value.name] for value in op.reads] for op in graph.operators],
        [makers[name] for name in graph.values],
        [tensors[value.tensor].requires_grad for value in graph.values.values()],
    )

    def of(*, backward: bool) -> PlacedOrder:
        own = [i for i, route in enumerate(routes) if route.backward is backward]
        ways = [TensorTransfer(number[routes[i].value], *routes[i][1:]) for i in own]
        order = ordered(flow, strategy.placement, ways, backward=backward)
        return tuple((is_operator, n if is_operator else own[n]) for is_operator, n in order)

    training = graph.groups.atoms.graph.training
    return PlacedSchedule(of(backward=False), of(backward=True) if training else ())


def _check(strategy: PlacedStrategy, transfers: Sequence[ValueTransfer]) -> None:
    needed = needed_routes(strategy.placed_graph, strategy.placement)
    missing, more = set(needed) - set(transfers), set(transfers) - set(needed)
    for routes, words in ((missing, "lacks the"), (more, "has a needless")):
        for name, source, target, back in sorted(routes):
            label = f"gradient of {name}" if back else name
            raise PlanError(
                f"the plan {words} transfer of the {label} from device {source} to device {target}; "
                "make the plan again"
            )
    if len(transfers) != len(needed):
        raise PlanError("the plan lists a transfer twice; make the plan again")


@dataclass(frozen=True, eq=False, kw_only=True)
class SendValue(Node):
    """Begin to send a value to another device, as message ``number``."""

    number: int


@dataclass(frozen=True, eq=False, kw_only=True)
class ReceiveValue(Node):
    """Begin to receive a value from another device, as message ``number``."""

    number: int


@dataclass(frozen=True, eq=False, kw_only=True)
class WaitForValue(Node):
    """Wait until a value has been received."""


@dataclass(frozen=True, eq=False, kw_only=True)
class OnDevice(Node):
    """Read an input, a buffer or a constant on one of this process's devices, copied there if necessary."""

    device: int


@dataclass(frozen=True, eq=False, kw_only=True)
class BeginOperator(Node):
    """Mark the start of placed operator ``number``."""

    number: int


@dataclass(frozen=True, eq=False, kw_only=True)
class Enter(Node):
    """Pass a value to the operator that reads it. ``learns``: whether backward returns a gradient for it."""

    place: Place
    learns: bool


@dataclass(frozen=True, eq=False, kw_only=True)
class EndOperator(Node):
    """Mark the end of placed operator ``number``. ``places``: (name, device) of each result."""

    number: int
    places: tuple[Place, ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class Zeros(Node):
    """Make zeros in place of a tensor, such as a bias, that only the first piece of an operator adds."""

    tensor: str


@dataclass(frozen=True, eq=False, kw_only=True)
class SplitTensor(Node):
    """Split a tensor into pieces. ``piece``: one of them, which describes the cut."""

    piece: Value


@dataclass(frozen=True, eq=False, kw_only=True)
class JoinPieces(Node):
    """Join the pieces of a tensor, or add the terms of a sum. ``piece``: one of them."""

    piece: Value


class PlacedLowering(Lowering):
    """The lowering of a placed plan for a process that runs the devices ``own``.

    Attributes:
        strategy: the sharded strategy that the base class lowers, in which no tensor is split over devices.
    """

    def __init__(self, placed: PlacedStrategy, order: PlacedOrder, own: Sequence[int], evaluating: bool):
        graph = placed.placed_graph
        whole = (REPLICATE, REPLICATE)
        strategy = Strategy(
            graph=placed.graph,
            mesh=(graph.micro_batches, 1),
            configurations={
                op.group.name: op.configuration
                for op in graph.operators
                if op.group is not None and op.configuration is not None
            },
            hubs={},
            stored={tensor.name: whole for tensor in placed.graph.atoms.graph.parameters},
        )
        super().__init__(strategy, None, evaluating)
        self.placed, self.order, self.own = placed, order, own
        self.operators, self.device = graph.operators, placed.placement.device
        self._values: dict[Place, Node] = {}
        self._arriving: dict[Place, Node] = {}
        self._on_devices: dict[Place, Node] = {}

    def program(self) -> ForwardProgram:
        """Return the part of forward that this process runs, with its results and new buffers."""
        own = [number for number, device in enumerate(self.device) if device in self.own]
        parameters = tuple(name for number in own for name in self.operators[number].parameters)
        buffers = self.add_arguments(parameters)
        for is_operator, number in self.order:
            if not is_operator:
                self._transfer(number)
            elif self.device[number] in self.own:
                self._placed(self.operators[number], number, self.device[number])
        wanted, changed = set(self.source.outputs), set(self.source.mutations.values())
        results = tuple(
            (value.name, self._values[value.name, self.device[number]])
            for number in own
            for value in self.operators[number].writes
            if value.tensor in (changed if value.code is not None else changed | wanted)
        )
        outputs = tuple(name for name, _ in results)
        return ForwardProgram(tuple(self.nodes), parameters, buffers, outputs, results, {})

    def _transfer(self, number: int) -> None:
        name, source, target, _ = self.placed.transfers[number]
        if source in self.own:
            self.add(SendValue(number=number, reads={name: self._value(name, source)}))
        if target in self.own:
            # This is not the value yet: the wait for it is put before its first reader.
            self._arriving[name, target] = self.add(ReceiveValue(number=number))

    def _value(self, name: str, device: int) -> Node:
        arriving = self._arriving.pop((name, device), None)
        if arriving is not None:
            self._values[name, device] = self.add(WaitForValue(reads={name: arriving}))
        return self._values[name, device]

    # -- operators ----------------------------------------------------------------------------------

    def _placed(self, op: PlacedOperator, number: int, device: int) -> None:
        providers = [(value, self._value(value.name, device)) for value in op.reads]
        free = op.group.free if op.group is not None else ()
        arguments = {name: self._on_device(name, device) for name in free}
        self.add(BeginOperator(number=number))
        read = {
            value: self.add(
                Enter(
                    place=(value.name, device),
                    learns=self.strategy.tensor(value.tensor).requires_grad,
                    reads={value.name: provider},
                )
            )
            for value, provider in providers
        }
        if op.group is not None:
            made = self._of_group(op, arguments, read)
        elif op.kind is OperatorKind.JOIN:
            reads = {value.name: node for value, node in read.items()}
            made = {op.writes[0].name: self.add(JoinPieces(piece=op.reads[0], reads=reads))}
        else:
            made = self._cut(op, read)
        places = tuple((value.name, device) for value in op.writes)
        ended = self.add(EndOperator(number=number, places=places, reads=made))
        self._values.update(dict.fromkeys(places, ended))

    def _on_device(self, name: str, device: int) -> Node:
        if (name, device) not in self._on_devices:
            on_device = OnDevice(device=device, reads={name: self.argument(name)})
            self._on_devices[name, device] = self.add(on_device)
        return self._on_devices[name, device]

    def _of_group(
        self, op: PlacedOperator, arguments: dict[str, Node], read: Mapping[Value, Node]
    ) -> dict[str, Node]:
        group = op.group
        assert group is not None
        lowering = Lowering(replace(self.strategy, mesh=op.mesh), (0, op.index), self.evaluating)
        lowering.nodes, lowering.arguments = self.nodes, arguments
        brought = {value.tensor: node for value, node in read.items()}
        brought |= {name: self._cast(name) for name in op.parameters}
        for name in (*group.parameters, *group.shared):
            # A tensor that is neither read nor the operator's own is a term of a sum (see placement.graph's
            # _read).
            if name not in brought:
                brought[name] = self.add(Zeros(tensor=name))
        lowering.brought = {(group.name, name): node for name, node in brought.items()}
        for each in group.operators:
            lowering.operator(each, group)
        return {value.tensor: lowering.made[value.tensor] for value in op.writes}

    def _cast(self, name: str) -> Node:
        stored = self.strategy.stored[name]
        return self.move(self.argument(name), Edge(name, stored, stored, "", "parameter"))

    def _cut(self, op: PlacedOperator, read: Mapping[Value, Node]) -> dict[str, Node]:
        name = op.writes[0].tensor
        (whole,) = read.values() if read else map(self._cast, op.parameters)
        cuts: dict[tuple[int | None, int], Node] = {(None, 1): whole}
        for value in op.writes:
            if (value.code, value.count) not in cuts:
                cuts[value.code, value.count] = self.add(SplitTensor(piece=value, reads={name: whole}))
        return {value.name: cuts[value.code, value.count] for value in op.writes}
