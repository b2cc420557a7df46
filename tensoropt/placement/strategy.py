"""A placed strategy: every operator on one device, in that device's order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

from tensoropt.placement.graph import PlacedGraph, Value, placed_graph
from tensoropt.placement.problem import Placement
from tensoropt.sharding.groups import GroupGraph


class ValueTransfer(NamedTuple):
    """A message between two devices with a tensor or piece or, if ``backward``, with its gradient."""

    value: str
    source: int
    target: int
    backward: bool


@dataclass(frozen=True)
class PlacedStrategy:
    """A placement of a model's operators, with the messages of one micro-batch in a common order."""

    kind: ClassVar[str] = "placed"

    placed_graph: PlacedGraph
    placement: Placement
    transfers: tuple[ValueTransfer, ...]

    schedule = ""

    @property
    def graph(self) -> GroupGraph:
        return self.placed_graph.groups

    @property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """The operators of each device, in the order of forward."""
        return self.placement.forward

    @property
    def devices(self) -> int:
        return len(self.placement.forward)

    @property
    def places(self) -> int:
        return self.devices

    @property
    def micro_batches(self) -> int:
        return self.placed_graph.micro_batches

    @property
    def mesh_text(self) -> str:
        return f"placed on {self.devices}"

    def place_of(self, stage: int) -> int:
        return stage

    def maker(self, name: str) -> int | None:
        return self._makers.get(Value(name))

    @cached_property
    def _makers(self) -> Mapping[Value, int]:
        rows = zip(self.placed_graph.operators, self.placement.device, strict=True)
        return {value: device for op, device in rows for value in op.writes}

    def holders(self, name: str) -> tuple[int, ...]:
        """Return the device of a parameter; all devices if no operator reads it."""
        return self._holders.get(name, tuple(range(self.devices)))

    @cached_property
    def _holders(self) -> Mapping[str, tuple[int]]:
        rows = zip(self.placed_graph.operators, self.placement.device, strict=True)
        device = {op.name: device for op, device in rows}
        return {name: (device[operator],) for name, operator in self.placed_graph.holder.items()}

    @cached_property
    def sent_buffers(self) -> Mapping[str, int]:
        mutations = self.graph.atoms.graph.mutations
        made: dict[tuple[str, int], set[Value]] = {}
        for value, device in self._makers.items():
            made.setdefault((value.tensor, device), set()).add(value)
        makers = {}
        for op, device in zip(self.placed_graph.operators, self.placement.device, strict=True):
            for name in op.group.free if op.group is not None else ():
                if name not in mutations:
                    continue
                assert op.configuration is not None
                new = mutations[name]
                # A piece of an operator needs no more of the new value than its own piece.
                part = Value(new, op.configuration.layout(name)[1], op.count, op.index)
                if made.get((new, device), set()).isdisjoint({Value(new), part}):
                    makers[name] = self._makers[Value(new)]
        return makers

    def to_data(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "micro_batches": self.micro_batches,
            "splits": {name: list(how) for name, how in self.placed_graph.splits.items()},
            "device": list(self.placement.device),
            "forward": [list(order) for order in self.placement.forward],
            "backward": [list(order) for order in self.placement.backward],
            "transfers": [list(route) for route in self.transfers],
        }

    @classmethod
    def from_data(cls, data: Mapping[str, Any], graph: GroupGraph) -> PlacedStrategy:
        forward, backward = (tuple(map(tuple, data[name])) for name in ("forward", "backward"))
        placement = Placement(tuple(data["device"]), forward, backward)
        splits = {name: (label, int(count)) for name, (label, count) in data["splits"].items()}
        transfers = tuple(ValueTransfer(*transfer) for transfer in data["transfers"])
        return cls(placed_graph(graph, splits, int(data["micro_batches"])), placement, transfers)

    @property
    def representatives(self) -> tuple[int, ...]:
        return tuple(range(self.devices))


def needed_routes(graph: PlacedGraph, placement: Placement) -> tuple[ValueTransfer, ...]:
    """Return a placement's messages: values to all other devices that read them, and gradients back."""
    source, device = graph.groups.atoms.graph, placement.device
    readers: dict[str, dict[int, None]] = {}
    for number, op in enumerate(graph.operators):
        for value in op.reads:
            readers.setdefault(value.name, {})[device[number]] = None
    routes: list[ValueTransfer] = []
    for number, op in enumerate(graph.operators):
        for value in op.writes:
            for target in readers.get(value.name, ()):
                if target != device[number]:
                    routes.append(ValueTransfer(value.name, device[number], target, False))
                    if source.training and source.tensors[value.tensor].requires_grad:
                        routes.append(ValueTransfer(value.name, target, device[number], True))
    return tuple(routes)
