"""Prices of placed operators: a placed graph on a cluster as a :class:`.PlacementProblem`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import numpy as np

from tensoropt.cluster import Cluster, Mesh, slower_beside
from tensoropt.costs.prices import NO_WORK, ClusterCosts, ComputeCosts, DevicePrices, LinkCosts, Queues
from tensoropt.costs.process_memory import named_terms
from tensoropt.graph import Tensor
from tensoropt.ops.layouts import PARTIAL
from tensoropt.placement.graph import (
    GroupSplit,
    OperatorKind,
    PlacedGraph,
    PlacedOperator,
    Splits,
    Value,
    placed_graph,
    split_choices,
)
from tensoropt.placement.limits import PlacedLimits, placed_limits
from tensoropt.placement.problem import (
    DeviceSet,
    MessageEnds,
    PlacedResult,
    PlacedTensor,
    PlacementProblem,
)
from tensoropt.profiling.facts import Facts
from tensoropt.profiling.optimizers import kind_of
from tensoropt.profiling.workload import Workload, memory_orders, workload
from tensoropt.sharding.configurations import batch_strategies
from tensoropt.sharding.constraints import Constraints
from tensoropt.sharding.groups import AxisStrategy, Group, GroupGraph

_LARGE = 16 * 2**20
"""The message size at which seconds per byte are read off a fit; an assumption: beyond short messages."""


_OfKinds = tuple[Queues, ...]
"""Seconds for each kind of device."""


@dataclass(frozen=True)
class _Work:
    """The work of a group or piece."""

    work: Workload
    facts: Facts


class PlacedPrices:
    """The prices of one model's operators on a cluster's devices, however they are split.

    Args:
        costs: on CPU ranks, new work is measured when its price is first needed.
    """

    def __init__(
        self, graph: GroupGraph, cluster: Cluster, costs: ClusterCosts, constraints: Constraints | None = None
    ):
        self.graph, self.cluster, self.costs = graph, cluster, costs
        self.constraints = constraints
        self.tensors = graph.atoms.graph.tensors
        self.training = costs.training
        self.optimizer = costs.optimizer
        self._works: dict[tuple[str, str, int, int], _Work] = {}
        self._seconds: dict[str, tuple[_OfKinds, _OfKinds]] = {}
        self._splits: dict[str, tuple[GroupSplit, ...]] = {}

    # -- devices ----------------------------------------------------------------------------------

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """The index of each device's kind."""
        names = [kind.name for kind in self.cluster.device_kinds]
        return tuple(names.index(device.name) for device in self.cluster.devices)

    def of_kinds(self) -> tuple[DevicePrices, ...]:
        """Return the prices of each kind of device, with everything measured so far."""
        return tuple(
            DevicePrices(compute, self.costs.overheads_on(kind))
            for compute, kind in zip(self.compute(), self.cluster.device_kinds, strict=True)
        )

    def compute(self) -> tuple[ComputeCosts, ...]:
        """Return the compute costs of each kind of device, with everything measured so far."""
        return tuple(self.costs.compute_on(kind) for kind in self.cluster.device_kinds)

    @cached_property
    def mesh(self) -> Mesh:
        return self.cluster.meshes(1)[0]

    @cached_property
    def links(self) -> LinkCosts:
        return self.costs.communication(self.mesh, pairs=True)

    @cached_property
    def devices(self) -> DeviceSet:
        """The devices with latency and seconds per byte of every ordered pair."""
        count = self.cluster.device_count
        latency, per_byte = np.zeros((count, count)), np.zeros((count, count))
        for i in range(count):
            for j in range(count):
                if i != j:
                    # A message of one byte takes little more than the latency.
                    latency[i, j] = self.links.pair_time_s(i, j, 1)
                    per_byte[i, j] = (self.links.pair_time_s(i, j, _LARGE) - latency[i, j]) / _LARGE
        process = self.costs.process_memory(self.graph.atoms.graph)
        # Messages go through the communicator of all ranks, whose barriers are sums.
        levels = [level.name for level in self.cluster.levels]
        sends = process.communicator_bytes(levels, ("all_reduce",), count) if count > 1 else 0.0
        terms = named_terms(process.constant(sends))
        memory = np.array([device.memory_bytes for device in self.cluster.devices], dtype=float)
        return DeviceSet(
            capacity_bytes=np.maximum(memory - sum(terms.values()), 0.0),
            terms=terms,
            latency_s=latency,
            seconds_per_byte=np.maximum(per_byte, 0.0),
            order=self.cluster.best_first if len(self.cluster.device_types) > 1 else None,
            lanes={(i, j): lanes(self.cluster, i, j) for i in range(count) for j in range(count) if i != j},
            ends=self._ends(),
            slower=slower_beside(self.cluster) if self.costs.beside else np.inf,
        )

    def _ends(self) -> MessageEnds:
        kinds = self.of_kinds()
        rows = []
        for kind in (kinds[number] for number in self.kinds):
            end, addition = kind.message_end, kind.addition(0)
            rates = kind.overheads.copy_s_per_byte, kind.overheads.add_s_per_byte
            rows.append((end.device_s, rates[0], addition.device_s, rates[1], end.host_s, addition.host_s))
        return MessageEnds(*np.array(rows).T)

    # -- operators --------------------------------------------------------------------------------

    def split_choices(self, group: Group) -> tuple[GroupSplit, ...]:
        """Return the ways to cut a group into at most as many pieces as there are devices."""
        if group.name not in self._splits:
            self._splits[group.name] = split_choices(self.graph, group, self.cluster.device_count)
        return self._splits[group.name]

    @cached_property
    def batch(self) -> Mapping[str, AxisStrategy]:
        """The strategy by which each group follows the batch, if any."""
        return batch_strategies(self.graph, everywhere=False)

    def price(
        self, splits: Mapping[str, tuple[str, int]] | None = None, micro_batches: int = 1
    ) -> PricedGraph:
        """Return the placed and priced graph, measuring new work; PlanError if the model cannot run so."""
        graph = placed_graph(self.graph, splits, micro_batches)
        works = {op.name: self._work(graph, op) for op in graph.operators if op.group is not None}
        self.costs.timings.measure({w.work.key: w.work for w in works.values()})
        problem = _problem(self, graph, works)
        limits = self.limits
        for number, name in enumerate(map(graph.whole_of, range(problem.size))):
            if name is not None and name in limits.runs_on:
                without = sorted(set(self.cluster.best_first) - set(limits.runs_on[name]))
                problem.forward_s[number, without] = np.inf
        problem = replace(
            problem,
            together=limits.sets(graph),
            pinned=limits.pins(graph),
            references=graph.references,
        )
        return PricedGraph(self, graph, problem)

    @cached_property
    def limits(self) -> PlacedLimits:
        """The limits of a person's constraints; ConstraintError if no placement satisfies a hard one."""
        return placed_limits(self.constraints, self.graph, self.cluster)

    def _work(self, graph: PlacedGraph, op: PlacedOperator) -> _Work:
        assert op.group is not None
        assert op.configuration is not None
        # Pieces of one split are priced alike, whichever of them it is.
        key = (op.group.name, str(op.configuration.strategies[1].label), *op.mesh)
        if key not in self._works:
            work = workload(
                graph.groups, op.configuration, op.mesh, memory_orders(self.graph), contiguous=True
            )
            self._works[key] = _Work(work, self.costs.facts.of(work))
        return self._works[key]

    def seconds(self, work: _Work) -> tuple[_OfKinds, _OfKinds]:
        key = work.work.key
        if key not in self._seconds:
            pairs = [kind.work(work.work, work.facts) for kind in self.of_kinds()]
            forward, backward = zip(*pairs, strict=True)
            self._seconds[key] = forward, backward if self.training else (NO_WORK,) * len(backward)
        return self._seconds[key]


@dataclass(frozen=True)
class PricedGraph:
    """A placed graph and its problem, with operators in the same order."""

    prices: PlacedPrices
    graph: PlacedGraph
    problem: PlacementProblem

    def whole_of(self, operator: int) -> str | None:
        """Return the group of an operator, piece or step; None for others."""
        return self.graph.whole_of(operator)

    def split_choices(self, operator: int) -> tuple[GroupSplit, ...]:
        """Return the ways to cut an operator, or the group of a piece."""
        name = self.whole_of(operator)
        if name is None:
            return ()
        choices = self.prices.split_choices(self.prices.graph.group_of[name])
        return tuple(choice for choice in choices if choice != self.graph.splits.get(name))

    def data_parallel(self) -> dict[str, GroupSplit]:
        """Return batch cuts into as many pieces as there are devices, or the next lower number possible."""
        # Counts from the number of devices downwards: the first that divides any batch.
        counts = range(self.prices.cluster.device_count, 1, -1)
        return next(filter(None, map(self.batch_cuts, counts)), {})

    def batch_cuts(self, pieces: int) -> dict[str, GroupSplit]:
        """Return batch cuts of all groups that can be cut into so many pieces."""
        cuts = {name: GroupSplit(str(way.label), pieces) for name, way in self.prices.batch.items()}
        groups = self.prices.graph.groups
        # A group that no reader asks how it wants its results may follow no batch.
        return {g.name: cuts[g.name] for g in groups if cuts.get(g.name) in self.prices.split_choices(g)}

    def split(self, splits: Splits) -> PricedGraph:
        """Return the model with these splits in addition to, or in place of, the present ones."""
        return self.prices.price({**self.graph.splits, **splits}, self.graph.micro_batches)


def lanes(cluster: Cluster, source: int, target: int) -> tuple[str, ...]:
    """Return the lanes that a message between two devices occupies.

    A dedicated wire, or one card of each node, or each device's port; one way.
    """
    if cluster.link(source, target).dedicated:
        return (f"wire {source}->{target}",)
    level = cluster.crossing_level(source, target)
    if len(cluster.levels) > 1 and level is cluster.levels[0]:
        inside = cluster.device_count // level.size
        return tuple(
            f"{level.name} {device // inside} card {device % inside % level.link_count} {way}"
            for device, way in ((source, "out"), (target, "in"))
        )
    return f"device {source} out", f"device {target} in"


def _problem(prices: PlacedPrices, graph: PlacedGraph, works: Mapping[str, _Work]) -> PlacementProblem:
    rows = [_row(prices, graph, op, works.get(op.name)) for op in graph.operators]
    of_kinds = prices.of_kinds()
    seconds = np.array(
        [
            [_seconds(prices, graph, op, works.get(op.name), *kind) for kind in enumerate(of_kinds)]
            for op in graph.operators
        ]
    ).reshape(len(rows), len(of_kinds), 3, 2)[:, list(prices.kinds)]
    forward_s, backward_s, update_s = np.moveaxis(seconds[..., 0], 2, 0)
    forward_host_s, backward_host_s, update_host_s = np.moveaxis(seconds[..., 1], 2, 0)

    def column(name: str) -> np.ndarray:
        return np.array([row[name] for row in rows], dtype=float)

    return PlacementProblem(
        names=tuple(op.name for op in graph.operators),
        forward_s=forward_s,
        backward_s=backward_s,
        update_s=update_s,
        host_s=graph.micro_batches * (forward_host_s + backward_host_s) + update_host_s,
        parameter_bytes=column("parameter_bytes"),
        gradient_bytes=column("gradient_bytes"),
        optimizer_bytes=column("optimizer_bytes"),
        update_peak_bytes=column("update_peak_bytes"),
        kept_bytes=column("kept_bytes"),
        forward_peak_bytes=column("forward_peak_bytes"),
        backward_peak_bytes=column("backward_peak_bytes"),
        tensors=_tensors(prices, graph, works),
        results=_results(prices, graph),
        devices=prices.devices,
        training=prices.training,
        micro_batches=graph.micro_batches,
    )


def _row(prices: PlacedPrices, graph: PlacedGraph, op: PlacedOperator, work: _Work | None) -> dict[str, Any]:
    if work is not None:
        row = _work_row(prices, graph, op, work)
    else:
        forward_peak, backward_peak = _copy_peaks(prices, op)
        row = {"kept_bytes": 0, "forward_peak_bytes": forward_peak, "backward_peak_bytes": backward_peak}
    return row | _stored_row(prices, op)


def _seconds(
    prices: PlacedPrices,
    graph: PlacedGraph,
    op: PlacedOperator,
    work: _Work | None,
    number: int,
    kind: DevicePrices,
) -> tuple[Queues, Queues, Queues]:
    """Return (forward, backward, optimizer) seconds on one kind of device; the first two per micro-batch."""
    if work is not None:
        forward, backward = (of_kinds[number] for of_kinds in prices.seconds(work))
    else:
        forward, backward = _moving(prices, graph, op, kind)
    update = NO_WORK
    for name in op.parameters:
        tensor = prices.tensors[name]
        cast = kind.cast(tensor, tensor.elements)
        forward = forward.plus(cast)
        if not prices.training:
            continue
        # Backward casts anew what it needs.
        wanted = (
            0
            if work is None or op.group is None
            else work.facts.parameters_kept.get(op.group.short_names[name], 0)
        )
        for _ in range(wanted):
            backward = backward.plus(cast)
        if tensor.requires_grad:
            size = tensor.elements * tensor.stored_element_bytes
            arrival = kind.gradient_arrival(size, graph.micro_batches, copied=False)
            backward = backward.plus(cast).plus(arrival)
            update = update.plus(kind.step(tensor.elements))
    return forward, backward, update


def _work_row(prices: PlacedPrices, graph: PlacedGraph, op: PlacedOperator, work: _Work) -> dict[str, Any]:
    facts, names = work.facts, work.work.names
    kept = {names[w] for w in facts.writes_kept}
    # Views of what it reads take no additional memory.
    lying, larger = {names[w] for w in facts.lies_in}, {names[w]: size for w, size in facts.extents.items()}
    made = {v: larger.get(v.tensor, graph.bytes(v)) for v in op.writes if v.tensor not in lying}
    grows = [v for v in op.writes if graph.tensors[v.tensor].requires_grad]
    comes = sum(graph.bytes(v) for v in op.reads if graph.tensors[v.tensor].requires_grad)
    forward_peak, backward_peak, returning = _peaks(prices, op, work)
    # The facts count what an operator makes and its gradients as its own; here tensors between operators are
    # counted by themselves.
    own_kept = max(0, facts.kept_bytes - sum(b for v, b in made.items() if v.tensor in kept))
    incoming_bytes = sum(graph.bytes(v) for v in grows)
    return {
        "kept_bytes": own_kept,
        "forward_peak_bytes": max(0, forward_peak - sum(b for v, b in made.items() if v.tensor not in kept)),
        # Below 0 if it releases what it kept, or was given, before it makes gradients of all that it reads.
        "backward_peak_bytes": max(
            backward_peak - incoming_bytes - comes,
            # By then it has released its kept tensors and the gradients it was given.
            returning - own_kept - incoming_bytes,
        ),
    }


def _peaks(prices: PlacedPrices, op: PlacedOperator, work: _Work) -> tuple[int, int, int]:
    """Return the peak bytes of forward, backward, and later casts."""
    facts, names = work.facts, work.work.names
    wide = {p: prices.tensors[p] for p in op.parameters if prices.tensors[p].master_dtype is not None}
    narrow = {p: tensor.elements * tensor.element_bytes for p, tensor in wide.items()}
    if not narrow:
        return facts.forward_peak_bytes, facts.backward_peak_bytes, 0
    forward = max(facts.forward_peak_bytes, facts.forward_parameters_peak_bytes + sum(narrow.values()))
    backward = facts.backward_peak_bytes
    for reads, made, alive, _ in facts.backward_runs:
        cast_bytes = sum(narrow.get(names[name], 0) for name in (*reads, *made))
        backward = max(backward, alive + cast_bytes)
    waiting = {p: size for p, size in narrow.items() if wide[p].requires_grad}
    returning = 0
    for name in list(waiting):
        cast = wide[name].elements * wide[name].stored_element_bytes
        returning = max(returning, sum(waiting.values()) + cast)
        del waiting[name]
    return forward, backward, returning


def _moving(
    prices: PlacedPrices, graph: PlacedGraph, op: PlacedOperator, kind: DevicePrices
) -> tuple[Queues, Queues]:
    back = any(graph.tensors[v.tensor].requires_grad for v in op.writes) and prices.training
    if op.kind == OperatorKind.JOIN and op.reads[0].code == PARTIAL:
        terms = op.count - 1
        # Every term of a sum has the gradient of the sum.
        return kind.addition(terms * graph.bytes(op.writes[0]), terms), NO_WORK
    # A variable hands out its parameter as it lies there, which moves nothing; its pieces are copies.
    pieces = [v for v in (*op.reads, *op.writes) if v.code is not None]
    if not pieces:
        return NO_WORK, NO_WORK
    moved = sum(graph.bytes(v) for v in pieces)
    cut, joined = kind.copy(moved, len(pieces)), kind.copy(moved)
    forward, backward = (joined, cut) if op.kind == OperatorKind.JOIN else (cut, joined)
    return forward, backward if back else NO_WORK


def _copy_peaks(prices: PlacedPrices, op: PlacedOperator) -> tuple[int, int]:
    """Return the additional peaks of handing out a parameter: forward, backward."""
    if op.kind != OperatorKind.VARIABLE:
        return 0, 0
    (name,) = op.parameters
    tensor = prices.tensors[name]
    cuts = {(v.code, v.count) for v in op.writes if v.code is not None}
    whole, cast = tensor.elements * tensor.element_bytes, tensor.master_dtype is not None
    forward = whole if cuts and cast else 0
    if not (prices.training and tensor.requires_grad):
        return forward, 0
    stored = tensor.elements * tensor.stored_element_bytes if cast else 0
    if not cuts:
        return forward, stored
    # The pieces are gone when they are joined, before the joined one is cast.
    pieces = whole * len({(v.code, v.count) for v in op.writes})
    return forward, max(whole, whole + stored - pieces)


def _stored_row(prices: PlacedPrices, op: PlacedOperator) -> dict[str, Any]:
    sizes, made = [0, 0, 0], 0
    optimizer, largest = kind_of(prices.optimizer), prices.graph.atoms.graph.largest_trained
    for name in op.parameters:
        tensor: Tensor = prices.tensors[name]
        size = tensor.elements * tensor.stored_element_bytes
        sizes[0] += size
        if tensor.requires_grad and prices.training:
            sizes[1] += size
            sizes[2] += round(size * optimizer.state)
            made += round(size * optimizer.made(tensor.elements, largest))
    names = ("parameter_bytes", "gradient_bytes", "optimizer_bytes")
    return {**dict(zip(names, sizes, strict=True)), "update_peak_bytes": made}


def _tensors(
    prices: PlacedPrices, graph: PlacedGraph, works: Mapping[str, _Work]
) -> tuple[PlacedTensor, ...]:
    makers: dict[Value, int] = {}
    readers: dict[Value, list[int]] = {}
    keepers: dict[Value, list[int]] = {}
    for number, op in enumerate(graph.operators):
        kept = _kept_tensors(works.get(op.name))
        for value in op.writes:
            makers[value] = number
        # An operator that reads a value twice waits for it, and keeps it, once.
        for value in dict.fromkeys(op.reads):
            readers.setdefault(value, []).append(number)
        for value in dict.fromkeys((*op.reads, *op.writes)):
            if value.tensor in kept and prices.training:
                keepers.setdefault(value, []).append(number)
    storages = _storages(graph, works, makers)
    return tuple(
        PlacedTensor(
            name=value.name,
            bytes=graph.bytes(value),
            producer=producer,
            readers=tuple(readers.get(value, ())),
            kept_by=tuple(keepers.get(value, ())),
            gradient=graph.tensors[value.tensor].requires_grad,
            stored=_is_stored(prices, graph.operators[producer], value),
            **cast(Any, storages.get(value, {})),
        )
        for value, producer in makers.items()
    )


def _results(prices: PlacedPrices, graph: PlacedGraph) -> tuple[PlacedResult, ...]:
    if prices.training or prices.cluster.device_count < 2:
        return ()
    makers = {value.tensor: number for number, op in enumerate(graph.operators) for value in op.writes}
    results = [(makers[n], prices.tensors[n].bytes) for n in prices.graph.atoms.graph.outputs if n in makers]
    axes = tuple(range(prices.mesh.axis_count))
    return tuple(
        PlacedResult(maker, size, prices.links.time_s("broadcast", axes, size)) for maker, size in results
    )


def _storages(
    graph: PlacedGraph, works: Mapping[str, _Work], makers: Mapping[Value, int]
) -> dict[Value, dict[str, int]]:
    numbers = {value: number for number, value in enumerate(makers)}
    storages: dict[Value, dict[str, int]] = {}
    for op in graph.operators:
        if (work := works.get(op.name)) is None:  # what cuts and joins makes copies
            continue
        names, facts = work.work.names, work.facts
        own = {value.tensor: value for value in (*op.reads, *op.writes)}
        for result, base in facts.lies_in.items():
            storages[own[names[result]]] = {"lies_in": numbers[own[names[base]]]}
        for result, size in facts.extents.items():
            storages.setdefault(own[names[result]], {})["extent"] = size
    return storages


def _is_stored(prices: PlacedPrices, maker: PlacedOperator, value: Value) -> bool:
    return (
        maker.kind == OperatorKind.VARIABLE
        and value.code is None
        and prices.tensors[value.tensor].master_dtype is None
    )


def _kept_tensors(work: _Work | None) -> set[str]:
    if work is None:
        return set()
    facts = work.facts
    return {work.work.names[n] for n in (*facts.reads_kept, *facts.writes_kept, *facts.parameters_kept)}
