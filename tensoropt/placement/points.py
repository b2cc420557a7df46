"""Placed plans as points beside a frontier: their figures, their plan file's contents, and their timeline.

A placement has no place in a sharded space's tables, so its point has a record of its plan and its step.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tensoropt.cluster import Cluster
from tensoropt.placement.owners import owned_on
from tensoropt.placement.plans import plan_part
from tensoropt.placement.prices import PricedGraph
from tensoropt.placement.simulate import SimulatedPlacement, device_name
from tensoropt.plan.plan import MeshInfo
from tensoropt.plan.point import Point
from tensoropt.plan.point_records import PlacedRecord
from tensoropt.plan.space import Space
from tensoropt.simulate.recording import MEMORY_KINDS, OperatorRow, Recording
from tensoropt.simulate.timeline import joined, length_s

OVERLAP = "messages run beside computing; those that share a lane queue"


def placed_space(cluster: Cluster, keys: Mapping[str, str], micro_batches: int = 1) -> Space:
    """Return the space of the placed points with so many micro-batches, a row of devices.

    Args:
        keys: parameter name in the graph -> the model's own name.
    """
    mesh = MeshInfo(shape=(cluster.device_count,), names=("device",), placed=True)
    return Space(mesh=mesh, micro_batches=micro_batches, groups={}, hubs={}, shared={}, keys=dict(keys))


def placed_point(graph: PricedGraph, simulated: SimulatedPlacement, *, planner: str, space: int) -> Point:
    """Return a simulated placement as a point of space ``space``, which carries its plan, by which it is
    known; a point that is kept carries its :func:`placed_record`.

    Its memory is that of the fullest device, its breakdown that of the busiest: ``exposed_s`` counts when
    that device waits while some message is under way, ``idle_s`` when it waits and none is.
    """
    sends: Counter[tuple[tuple[int, int], int]] = Counter()
    sent_by: Counter[int] = Counter()
    for tensor, source, target, _ in simulated.transfers:
        size = simulated.problem.tensors[tensor].bytes
        sends[(source, target), size] += simulated.micro_batches
        sent_by[source] += size * simulated.micro_batches
    additive = [0.0] * simulated.problem.devices.count
    for operator, device in enumerate(simulated.placement.device):
        additive[device] += simulated.problem.step_bytes(operator)
    return Point.of(
        memory_bytes=simulated.memory_bytes + sum(simulated.problem.devices.terms.values()),
        time_s=simulated.time_s,
        **_seconds(simulated),
        sent_bytes=max(sent_by.values(), default=0),
        additive_memory_bytes=max(additive),
        # A placement is in no table that could be summed, and nothing is proven of it.
        additive_time_s=simulated.time_s,
        memory=tuple(simulated.peaks[_fullest(simulated)][kind] for kind in MEMORY_KINDS),
        terms=dict(simulated.problem.devices.terms),
        space=space,
        collectives=tuple(("send", pair, size, count) for (pair, size), count in sorted(sends.items())),
        sources=_sources(graph, simulated),
        planner=planner,
        placed=plan_part(graph.graph, simulated),
    )


def _fullest(simulated: SimulatedPlacement) -> int:
    # Of equals the first device, so that a point is the same in every run.
    return max(range(len(simulated.peak_bytes)), key=simulated.peak_bytes.__getitem__)


def _seconds(simulated: SimulatedPlacement) -> dict[str, Any]:
    """Return the parts of the busiest device's step, as figures of a point."""
    busiest = max(range(len(simulated.busy_s)), key=simulated.busy_s.__getitem__)
    total, compute = simulated.time_s, simulated.busy_s[busiest]
    sending = joined(
        (e.start_s, e.end_s)
        for e in simulated.timeline.events
        if e.task.phase.startswith("send") and e.task.duration_s
    )
    either = joined([*sending, *simulated.timeline.busy([device_name(busiest)])])
    # Sending beside computing is hidden; what the union has beyond computing is when the device waits for a
    # message.
    exposed = max(length_s(either) - compute, 0.0)
    hidden = max(simulated.communication_s - exposed, 0.0)
    return {
        "compute_s": compute,
        "communication_s": exposed + hidden,
        "exposed_s": exposed,
        "hidden_s": hidden,
        "idle_s": max(total - compute - exposed, 0.0),
    }


def _sources(graph: PricedGraph, simulated: SimulatedPlacement) -> dict[str, float]:
    """Return the shares of all seconds, computing and sending, by their sources."""
    found: dict[str, float] = defaultdict(float)
    found[graph.prices.compute()[0].source] += sum(simulated.busy_s)
    for tensor, source, target, _ in simulated.transfers:
        size = simulated.problem.tensors[tensor].bytes
        seconds = simulated.micro_batches * simulated.problem.devices.transfer_s(size, source, target)
        found[graph.prices.links.pair_source(source, target)] += seconds
    whole = sum(found.values()) or 1.0
    return {name: seconds / whole for name, seconds in found.items() if seconds}


def placed_record(graph: PricedGraph, simulated: SimulatedPlacement, notes: Sequence[str]) -> PlacedRecord:
    """Return the record of a kept placed point: its plan, its planner's remarks, and its timeline with the
    memory of the fullest device. Making it takes longer than simulating the step."""
    fullest = _fullest(simulated)
    events = (
        (e.task.name, _lane(e.task.resources), e.start_s, e.task.duration_s, e.task.phase, e.task.group)
        for e in simulated.timeline.events
        if e.task.duration_s
    )
    curve = (
        (time_s, *(sizes.get(kind, 0.0) for kind in MEMORY_KINDS))
        for time_s, sizes in simulated.timeline.memory(device_name(fullest))
    )
    recording = Recording.of(_rows(graph, simulated), events, curve, owned_on(simulated, fullest))
    return replace(plan_part(graph.graph, simulated), notes=tuple(notes), recording=recording)


def _lane(resources: Sequence[str]) -> str:
    """Return a device, or what a message occupies."""
    named = resources[0].removeprefix("device ").isdigit()
    return resources[0] if named else "link " + " - ".join(resources)


def _rows(graph: PricedGraph, simulated: SimulatedPlacement) -> list[OperatorRow]:
    problem, source = simulated.problem, graph.prices.compute()[0].source
    count = simulated.micro_batches
    sent: dict[str, float] = defaultdict(float)
    for event in simulated.timeline.events:
        if event.task.phase.startswith("send"):
            sent[event.task.group] += event.task.duration_s
    rows = []
    for i, (op, device) in enumerate(zip(graph.graph.operators, simulated.placement.device, strict=True)):
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
                forward_s=count * float(problem.forward_s[i, device]),
                backward_s=count * float(problem.backward_s[i, device]),
                communication_s=sent[op.name],
                source=source,
            )
        )
    return rows
