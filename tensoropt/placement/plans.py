"""Conversion of placements to plan files and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from tensoropt.errors import PlanError
from tensoropt.placement.graph import PlacedGraph, PlacedOperator, Value, placed_graph
from tensoropt.placement.problem import Placement
from tensoropt.placement.simulate import SimulatedPlacement
from tensoropt.plan.plan import OperatorPlan, ParameterPlan, PlacedInfo, Plan, TransferPlan
from tensoropt.plan.point_records import PlacedRecord
from tensoropt.sharding.groups import GroupGraph


class ValueTransfer(NamedTuple):
    """A message: a value, given by name, or with ``backward`` its gradient, that goes from one device to
    another."""

    value: str
    source: int
    target: int
    backward: bool


@dataclass(frozen=True)
class PlacedStrategy:
    """A placement of a model's operators.

    Attributes:
        graph: the operators and the values between them.
        placement: the placement; operator ``i`` of the graph is operator ``i`` here.
        transfers: the transfers of one micro-batch, in an order that agrees with the orders of all devices.
    """

    graph: PlacedGraph
    placement: Placement
    transfers: tuple[ValueTransfer, ...]

    @property
    def devices(self) -> int:
        """The number of devices that the placement is for."""
        return len(self.placement.forward)

    @property
    def micro_batches(self) -> int:
        """The number of pieces in which the batch is run, one after another."""
        return self.graph.micro_batches

    def device_of(self, operator: PlacedOperator) -> int:
        """Return the device that an operator lies on."""
        return self.placement.device[self.graph.operators.index(operator)]

    @cached_property
    def sent_buffers(self) -> Mapping[str, int]:
        """The buffers that a step changes on one device and others read, each with the device that makes its
        new value, which the step sends to all."""
        mutations = self.graph.groups.atoms.graph.mutations
        made: dict[tuple[str, int], set[Value]] = {}
        device_of: dict[Value, int] = {}
        for op, device in zip(self.graph.operators, self.placement.device, strict=True):
            for value in op.writes:
                made.setdefault((value.tensor, device), set()).add(value)
                device_of[value] = device
        found = {}
        for op, device in zip(self.graph.operators, self.placement.device, strict=True):
            for name in op.group.free if op.group is not None else ():
                if name not in mutations:
                    continue
                assert op.configuration is not None
                new = mutations[name]
                # A piece of an operator needs no more of the new value than its own piece.
                part = Value(new, op.configuration.layout(name)[1], op.count, op.index)
                if made.get((new, device), set()).isdisjoint({Value(new), part}):
                    found[name] = device_of[Value(new)]
        return found


def needed_routes(graph: PlacedGraph, placement: Placement) -> tuple[ValueTransfer, ...]:
    """Return what has to be sent, in no particular order: a value once to every other device that reads it,
    and its gradient once back from there."""
    source, device = graph.groups.atoms.graph, placement.device
    readers: dict[str, dict[int, None]] = {}
    for number, op in enumerate(graph.operators):
        for value in op.reads:
            readers.setdefault(value.name, {})[device[number]] = None
    found: list[ValueTransfer] = []
    for number, op in enumerate(graph.operators):
        for value in op.writes:
            for target in readers.get(value.name, ()):
                if target != device[number]:
                    found.append(ValueTransfer(value.name, device[number], target, False))
                    if source.training and source.tensors[value.tensor].requires_grad:
                        found.append(ValueTransfer(value.name, target, device[number], True))
    return tuple(found)


def placed_to_dict(strategy: PlacedStrategy) -> dict[str, Any]:
    """Return the strategy as plain data, for other processes."""
    placement = strategy.placement
    return {
        "micro_batches": strategy.micro_batches,
        "splits": {name: list(how) for name, how in strategy.graph.splits.items()},
        "device": list(placement.device),
        "forward": [list(order) for order in placement.forward],
        "backward": None if placement.backward is None else [list(order) for order in placement.backward],
        "transfers": [list(route) for route in strategy.transfers],
    }


def placed_from_dict(data: Mapping[str, Any], groups: GroupGraph) -> PlacedStrategy:
    """Return the strategy that :func:`placed_to_dict` wrote; its inverse."""
    backward = data["backward"]
    placement = Placement(
        tuple(data["device"]),
        tuple(map(tuple, data["forward"])),
        None if backward is None else tuple(map(tuple, backward)),
    )
    splits = {name: (label, int(count)) for name, (label, count) in data["splits"].items()}
    transfers = tuple(ValueTransfer(*transfer) for transfer in data["transfers"])
    graph = placed_graph(groups, splits, int(data["micro_batches"]))
    return PlacedStrategy(graph, placement, transfers)


def plan_part(graph: PlacedGraph, simulated: SimulatedPlacement) -> PlacedRecord:
    """Return the plan of a simulated placement, without a recording of its step."""
    place, tensors = simulated.placement, graph.groups.atoms.graph.tensors
    order = {o: i for row in place.forward for i, o in enumerate(row)}
    backward = {o: i for row in place.backward_orders for i, o in enumerate(row)}
    training = simulated.problem.training
    at = {op.name: place.device[i] for i, op in enumerate(graph.operators)}
    return PlacedRecord(
        operators={
            op.name: OperatorPlan(
                axes={},
                micro="none",
                members=tuple(o.name for o in op.group.operators) if op.group else (),
                device=place.device[i],
                order=order[i],
                backward_order=backward[i] if training else None,
            )
            for i, op in enumerate(graph.operators)
        },
        parameters={
            name: ParameterPlan(key=str(tensors[name].key), device=at[holder])
            for name, holder in graph.holder.items()
        },
        info=PlacedInfo(
            splits={name: tuple(how) for name, how in graph.splits.items()},
            transfers=tuple(
                TransferPlan(
                    value=simulated.problem.tensors[t].name, source=source, target=target, backward=back
                )
                for t, source, target, back in simulated.transfers
            ),
            peak_bytes=simulated.peak_bytes,
        ),
    )


def placed_strategy(plan: Plan, groups: GroupGraph) -> PlacedStrategy:
    """Return the placement that a plan describes, for the grouped graph of its model.

    Raises:
        PlanError: the plan is not a placed one, or is for another model; the message names the first
            difference.
    """
    if plan.placed is None:
        raise PlanError(f"this plan of {plan.planner} splits operators over a mesh; it places none")
    graph = placed_graph(groups, plan.placed.splits, plan.micro_batches)
    names = [op.name for op in graph.operators]
    for name in names:
        if name not in plan.operators:
            raise PlanError(f"the plan says nothing of operator {name}; was it made for another model?")
    for name in plan.operators:
        if name not in names:
            raise PlanError(f"the plan places {name}, which the model lacks; was it made for another model?")
    plan.check_model(groups)
    device = tuple(_given(plan, name, "device") for name in names)
    for name, where in zip(names, device, strict=True):
        if where >= plan.devices:
            raise PlanError(f"operator {name} lies on device {where}, but the plan has {plan.devices}")
    placement = Placement(
        device,
        _orders(plan, names, device, "order"),
        _orders(plan, names, device, "backward_order") if groups.atoms.graph.training else None,
    )
    transfers = tuple(ValueTransfer(t.value, t.source, t.target, t.backward) for t in plan.placed.transfers)
    return PlacedStrategy(graph, placement, transfers)


def _given(plan: Plan, name: str, field: str) -> int:
    value = getattr(plan.operators[name], field)
    if value is None:
        raise PlanError(f"operator {name} has no {field} in the plan")
    return int(value)


def _orders(
    plan: Plan, names: Sequence[str], device: Sequence[int], field: str
) -> tuple[tuple[int, ...], ...]:
    rows: list[list[tuple[int, int]]] = [[] for _ in range(plan.devices)]
    for number, name in enumerate(names):
        rows[device[number]].append((_given(plan, name, field), number))
    for where, row in enumerate(rows):
        # A gap or a repeated number would be filled silently by sorting.
        if sorted(position for position, _ in row) != list(range(len(row))):
            raise PlanError(f"the plan's {field} on device {where} does not count 0, 1, 2, ...")
    return tuple(tuple(number for _, number in sorted(row)) for row in rows)
