"""Convert simulated placements to points of a frontier and to plans, and plans back to placements."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tensoropt.cluster import Cluster
from tensoropt.costs.prices import ComputeCosts
from tensoropt.errors import PlanError
from tensoropt.placement.graph import PlacedGraph, placed_graph
from tensoropt.placement.prices import PricedGraph
from tensoropt.placement.problem import Placement
from tensoropt.placement.simulate import SimulatedPlacement
from tensoropt.placement.strategy import PlacedStrategy, ValueTransfer
from tensoropt.plan.plan import MeshInfo, OperatorPlan, ParameterPlan, Plan, StagesInfo, TransferPlan
from tensoropt.plan.point import Point, stages_point
from tensoropt.plan.point_records import StagesRecord
from tensoropt.plan.space import Space
from tensoropt.plan.spent import Spent
from tensoropt.profiling.workload import workload
from tensoropt.sharding.groups import GroupGraph
from tensoropt.simulate.collectives import Collective
from tensoropt.simulate.recording import MEMORY_KINDS, OperatorRow, Owned, TimelineEvent
from tensoropt.simulate.timeline import joined, length_s


def plan_part(graph: PlacedGraph, simulated: SimulatedPlacement) -> StagesRecord:
    place, tensors = simulated.placement, graph.groups.atoms.graph.tensors
    order = {o: i for row in place.forward for i, o in enumerate(row)}
    backward = {o: i for row in place.backward for i, o in enumerate(row)}
    training = simulated.problem.training
    device_of = {op.name: place.device[i] for i, op in enumerate(graph.operators)}
    return StagesRecord(
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
            name: ParameterPlan(key=str(tensors[name].key), device=device_of[holder])
            for name, holder in graph.holder.items()
        },
        stages=StagesInfo(
            splits={name: tuple(kind) for name, kind in graph.splits.items()},
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
    """Return the placed strategy of a plan.

    Raises:
        PlanError: the plan is not a placed one, or is for another model; the message names what differs.
    """
    stages = plan.stages
    if stages is None or stages.schedule:
        raise PlanError(
            f"this {plan.kind.name} by the planner {plan.planner} places no operators on single devices"
        )
    graph = placed_graph(groups, stages.splits, plan.micro_batches)
    names = [op.name for op in graph.operators]
    for name in names:
        if name not in plan.operators:
            raise PlanError(f"the plan says nothing of operator {name}; was it made for another model?")
    for name in plan.operators:
        if name not in names:
            raise PlanError(f"the plan places {name}, which the model lacks; was it made for another model?")
    plan.check_model(groups)
    device = tuple(_field_of(plan, name, "device") for name in names)
    for name, where in zip(names, device, strict=True):
        if where >= plan.devices:
            raise PlanError(
                f"operator {name} is placed on device {where}, but the plan's device count is {plan.devices}"
            )
    placement = Placement(
        device,
        _orders(plan, names, device, "order"),
        _orders(plan, names, device, "backward_order") if groups.atoms.graph.training else (),
    )
    transfers = tuple(ValueTransfer(t.value, t.source, t.target, t.backward) for t in stages.transfers)
    return PlacedStrategy(graph, placement, transfers)


def _field_of(plan: Plan, name: str, field: str) -> int:
    value = getattr(plan.operators[name], field)
    if value is None:
        raise PlanError(f"operator {name} has no {field} in the plan; make the plan again")
    return int(value)


def _orders(
    plan: Plan, names: Sequence[str], device: Sequence[int], field: str
) -> tuple[tuple[int, ...], ...]:
    rows: list[list[tuple[int, int]]] = [[] for _ in range(plan.devices)]
    for number, name in enumerate(names):
        rows[device[number]].append((_field_of(plan, name, field), number))
    for where, row in enumerate(rows):
        # A gap or a repeated number would be filled silently by sorting.
        if sorted(position for position, _ in row) != list(range(len(row))):
            raise PlanError(f"the plan's {field} on device {where} must number operators 0, 1, 2, ...")
    return tuple(tuple(number for _, number in sorted(row)) for row in rows)


_WORDS = {"parameters": "parameter", "gradients": "gradient", "optimizer": "optimizer state"}


def owned_on(simulated: SimulatedPlacement, device: int) -> list[Owned]:
    """Return the contents of a device's memory, each with the memory-curve points of its start and end."""
    problem, owned = simulated.problem, list[Owned]()
    for holding, first, end in simulated.spans(device):
        operator = name = since = until = ""
        if holding.operator >= 0:
            micro_batch, o = divmod(holding.operator, problem.size)
            operator = problem.names[o]
            tensor = problem.tensors[holding.tensor % len(problem.tensors)] if holding.tensor >= 0 else None
            name = simulated.label(operator if tensor is None else tensor.name, micro_batch)
        if holding.first >= 0:
            since = simulated.events[holding.first].words
            until = f"the end of {simulated.events[holding.last].words}"
        what, kind = _WORDS.get(holding.what, holding.what), MEMORY_KINDS[holding.kind]
        owned.append((operator, name, what, kind, holding.bytes, first, end, since, until))
    return owned


def placed_space(cluster: Cluster, keys: Mapping[str, str], micro_batches: int = 1) -> Space:
    """Return the search space of placed plans, with all devices as one mesh axis.

    Args:
        keys: a parameter's name in the graph -> the model's own name.
    """
    mesh = MeshInfo(shape=(cluster.device_count,), names=("device",), placed=True)
    return Space(mesh, micro_batches, keys=dict(keys))


def placed_point(graph: PricedGraph, simulated: SimulatedPlacement, *, planner: str, space: int) -> Point:
    """Return a simulated placement as a point of a frontier, in search space number ``space``.

    Memory is that of the fullest device. Times are those of the busiest device: ``communication_s`` while its
    messages are in flight, ``exposed_s`` the part of this in which it waits, ``idle_s`` all other waiting.
    """
    sent: Counter[Collective] = Counter()
    sent_by: Counter[int] = Counter()
    for tensor, source, target, _ in simulated.transfers:
        size = simulated.problem.tensors[tensor].bytes
        sent[Collective("send", (source, target), size)] += simulated.micro_batches
        sent_by[source] += size * simulated.micro_batches
    additive = [0.0] * simulated.problem.devices.count
    for operator, device in enumerate(simulated.placement.device):
        additive[device] += simulated.problem.step_bytes(operator)
    return stages_point(
        plan_part(graph.graph, simulated),
        _seconds_by_source(graph, simulated),
        sent,
        memory_bytes=simulated.memory_bytes + sum(simulated.problem.devices.terms.values()),
        time_s=simulated.time_s,
        **_seconds(simulated),
        sent_bytes=max(sent_by.values(), default=0),
        additive_memory_bytes=max(additive),
        # A placement is in no cost table that could be summed, and nothing is proven about it.
        additive_time_s=simulated.time_s,
        memory=tuple(simulated.peaks[fullest(simulated)][kind] for kind in MEMORY_KINDS),
        terms=dict(simulated.problem.devices.terms),
        space=space,
        planner=planner,
    )


def fullest(simulated: SimulatedPlacement) -> int:
    """Return the number of the device with the highest memory peak; the first of equals."""
    return max(range(len(simulated.peak_bytes)), key=simulated.peak_bytes.__getitem__)


def exposed_on(simulated: SimulatedPlacement, device: int) -> float:
    """Return the seconds in which a device does not compute while one of its messages is in flight."""
    either = joined([*simulated.messages_of(device), *simulated.busy(device)])
    # Messages beside computing are hidden. In the rest of the union, the device waits for messages.
    return max(length_s(either) - simulated.busy_s[device], 0.0)


def _seconds(simulated: SimulatedPlacement) -> dict[str, Any]:
    busiest = max(range(len(simulated.busy_s)), key=simulated.busy_s.__getitem__)
    total, compute = simulated.time_s, simulated.busy_s[busiest]
    exposed, communication = exposed_on(simulated, busiest), simulated.communication_s(busiest)
    hidden = max(communication - exposed, 0.0)
    return {
        "compute_s": compute,
        "communication_s": exposed + hidden,
        "exposed_s": exposed,
        "hidden_s": hidden,
        "idle_s": max(total - compute - exposed, 0.0),
        "host_s": simulated.host_s[busiest],
    }


def _seconds_by_source(graph: PricedGraph, simulated: SimulatedPlacement) -> dict[str, float]:
    seconds_by_source: dict[str, float] = defaultdict(float)
    seconds_by_source[graph.prices.of_kinds()[0].compute.source] += sum(simulated.busy_s)
    for tensor, source, target, _ in simulated.transfers:
        size = simulated.problem.tensors[tensor].bytes
        seconds = simulated.micro_batches * simulated.problem.devices.transfer_s(size, source, target)
        seconds_by_source[graph.prices.links.pair_source(source, target)] += seconds
    return seconds_by_source


def events_of(simulated: SimulatedPlacement) -> Iterator[TimelineEvent]:
    for event in simulated.events:
        if event.duration_s:
            lane = f"link {' - '.join(event.lanes)}" if event.ends else event.lanes[0]
            yield TimelineEvent(event.name, lane, event.start_s, event.duration_s, event.phase, event.group)


def operator_rows(
    graph: PlacedGraph,
    simulated: SimulatedPlacement,
    spent: Mapping[str, Spent],
    computes: Sequence[ComputeCosts],
) -> tuple[OperatorRow, ...]:
    """Return a row of figures for each operator.

    Args:
        spent: operator -> its durations in the step, in seconds.
        computes: the cost model of computation on each device.
    """
    problem, rows = simulated.problem, []
    for i, (op, device) in enumerate(zip(graph.operators, simulated.placement.device, strict=True)):
        took, source = spent[op.name], computes[device].source
        if op.configuration is not None:
            work = workload(graph.groups, op.configuration, op.mesh, contiguous=True)
            source = computes[device].source_of(work)
        rows.append(
            OperatorRow(
                group=op.name,
                members=tuple(o.name for o in op.group.operators) if op.group else (),
                module=op.group.anchor.module if op.group else "",
                configuration={"device": str(device)},
                options=(),
                parameters_bytes=int(problem.parameter_bytes[i]),
                gradients_bytes=int(problem.gradient_bytes[i]),
                state_bytes=int(problem.optimizer_bytes[i]),
                kept_bytes=int(problem.step_bytes(i) - problem.stored_bytes[i]),
                transient_bytes=int(max(problem.forward_peak_bytes[i], problem.backward_peak_bytes[i])),
                forward_s=took.forward_s if op.group else 0.0,
                backward_s=took.backward_s if op.group else 0.0,
                # Cuts of tensors into pieces and joins of pieces are copies.
                copies_s=0.0 if op.group else took.forward_s + took.backward_s,
                communication_s=took.communication_s,
                source=source,
            )
        )
    return tuple(rows)
