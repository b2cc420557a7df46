"""The cost model of placed plans, which makes a :class:`.PlacementProblem` of a graph and a cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations
from typing import Any, cast

import numpy as np

from tensoropt.cluster import Cluster, Mesh, slower_beside
from tensoropt.costs.prices import NO_WORK, ClusterCosts, DevicePrices, LinkCosts, Queues
from tensoropt.costs.process_memory import named_terms
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
from tensoropt.placement.problem import DeviceSet, PlacedResult, PlacedTensor, PlacementProblem
from tensoropt.profiling.facts import Facts
from tensoropt.profiling.optimizers import kind_of
from tensoropt.profiling.workload import Workload, memory_orders, workload
from tensoropt.sharding.configurations import batch_strategies
from tensoropt.sharding.constraints import Constraints
from tensoropt.sharding.groups import AxisStrategy, Group, GroupGraph
from tensoropt.types import Floats

_LARGE = 16 * 2**20
"""The message size in bytes, beyond short ones, at which seconds per byte are read off a fit; assumed."""


_OfKinds = tuple[Queues, ...]
"""The seconds of device and host, for each kind of device."""
_BYTES = (
    "kept_bytes", "forward_peak_bytes", "backward_peak_bytes",
    "parameter_bytes", "gradient_bytes", "optimizer_bytes", "update_peak_bytes",
)  # fmt: skip
"""The fields of a :class:`.PlacementProblem` that :meth:`_Pricing._bytes` computes for an operator."""


@dataclass(frozen=True)
class _Work:
    """The computation of an operator group or a piece of one (workload), with sizes and FLOP counts."""

    work: Workload
    facts: Facts


class PlacedPrices:
    """The cost model of one model's operators on a cluster's devices, whole or split into pieces.

    Args:
        costs: the cost source; on CPU ranks, operators are measured when their costs are first needed.
    """

    def __init__(
        self, graph: GroupGraph, cluster: Cluster, costs: ClusterCosts, constraints: Constraints | None = None
    ):
        self.graph, self.cluster, self.costs = graph, cluster, costs
        self.constraints = constraints
        self.training = costs.training
        self.optimizer = costs.optimizer
        self._works: dict[tuple[str, str, int, int], _Work] = {}
        self._seconds: dict[str, tuple[_OfKinds, _OfKinds]] = {}
        self._splits: dict[str, tuple[GroupSplit, ...]] = {}

    # -- devices ----------------------------------------------------------------------------------

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """The index of each device's kind among the cluster's kinds."""
        names = [kind.name for kind in self.cluster.device_kinds]
        return tuple(names.index(device.name) for device in self.cluster.devices)

    def of_kinds(self) -> tuple[DevicePrices, ...]:
        """Return the cost model of each kind of device, from all measurements so far."""
        costs, kinds = self.costs, self.cluster.device_kinds
        return tuple(DevicePrices(costs.compute_on(kind), costs.overheads_on(kind)) for kind in kinds)

    @cached_property
    def mesh(self) -> Mesh:
        return self.cluster.meshes(1)[0]

    @cached_property
    def links(self) -> LinkCosts:
        return self.costs.communication(self.mesh, pairs=True)

    @cached_property
    def devices(self) -> DeviceSet:
        """The cluster's devices, with their memory and the costs of messages between every ordered pair."""
        count = self.cluster.device_count
        latency, per_byte = np.zeros((2, count, count))
        for i, j in permutations(range(count), 2):
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
            order=self.cluster.best_first,
            lanes={pair: lanes(self.cluster, *pair) for pair in permutations(range(count), 2)},
            ends=self._ends(),
            slower=slower_beside(self.cluster) if self.costs.beside else np.inf,
        )

    def _ends(self) -> Floats:
        kinds, rows = self.of_kinds(), []
        for kind in (kinds[number] for number in self.kinds):
            end, addition, costs = kind.message_end, kind.addition(0), kind.overheads
            of_device = end.device_s, costs.copy_s_per_byte, addition.device_s, costs.add_s_per_byte
            rows.append((*of_device, end.host_s, addition.host_s))
        return np.array(rows)

    # -- operators --------------------------------------------------------------------------------

    def split_choices(self, group: Group) -> tuple[GroupSplit, ...]:
        """Return the possible cuts of an operator group into at most as many pieces as there are devices."""
        if group.name not in self._splits:
            self._splits[group.name] = split_choices(self.graph, group, self.cluster.device_count)
        return self._splits[group.name]

    @cached_property
    def batch(self) -> Mapping[str, AxisStrategy]:
        """For each operator group that can be split along the batch, the strategy of that split."""
        return batch_strategies(self.graph, everywhere=False)

    def price(
        self, splits: Mapping[str, tuple[str, int]] | None = None, micro_batches: int = 1
    ) -> PricedGraph:
        """Return the model's placed graph with the costs of its operators, for which new operators are
        timed if the cost source has ranks.

        Args:
            splits: operator group -> (label of the loop that is split, number of pieces).

        Raises:
            TensorOptError: an operator group is unknown or cannot be split in this way.
            PlanError: the micro-batches are impossible, or are combined with ``splits``.
        """
        graph = placed_graph(self.graph, splits, micro_batches)
        works = {op.name: self._work(graph, op) for op in graph.operators if op.group is not None}
        self.costs.timings.measure({w.work.key: w.work for w in works.values()})
        return PricedGraph(self, graph, _Pricing(self, graph, works).problem())

    @cached_property
    def limits(self) -> PlacedLimits:
        """The limits of constraints and kernels on placements.

        Raises:
            ConstraintError: a hard constraint cannot be kept.
            InfeasibleError: no device has kernels for all operators of a group.
        """
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
    """A placed graph with costs: its placement problem has the graph's operators, in the same order."""

    prices: PlacedPrices
    graph: PlacedGraph
    problem: PlacementProblem

    def whole_of(self, operator: int) -> str | None:
        """Return the name of an operator's group in the model; None if it only splits, joins or stores."""
        return self.graph.whole_of(operator)

    def split_choices(self, operator: int) -> tuple[GroupSplit, ...]:
        """Return the possible cuts of an operator's group, except the present one."""
        name = self.whole_of(operator)
        if name is None:
            return ()
        choices = self.prices.split_choices(self.prices.graph.group_of[name])
        return tuple(choice for choice in choices if choice != self.graph.splits.get(name))

    def data_parallel(self) -> dict[str, GroupSplit]:
        """Return cuts of groups along the batch, into one piece per device or, failing that, fewer."""
        # Counts from the number of devices downwards: the first that divides any batch.
        counts = range(self.prices.cluster.device_count, 1, -1)
        return next(filter(None, map(self.batch_cuts, counts)), {})

    def batch_cuts(self, pieces: int) -> dict[str, GroupSplit]:
        """Return cuts along the batch, into ``pieces`` pieces, of all operator groups that allow this."""
        cuts = {name: GroupSplit(str(way.label), pieces) for name, way in self.prices.batch.items()}
        groups = self.prices.graph.groups
        # A group that no reader asks how it wants its results may follow no batch.
        return {g.name: cuts[g.name] for g in groups if cuts.get(g.name) in self.prices.split_choices(g)}

    def split(self, splits: Splits) -> PricedGraph:
        """Return the model and its costs with further cuts; a group's new cut replaces its present one."""
        return self.prices.price({**self.graph.splits, **splits}, self.graph.micro_batches)


def lanes(cluster: Cluster, source: int, target: int) -> tuple[str, ...]:
    """Return the names of the lanes that a message from device ``source`` to device ``target`` occupies.

    A lane is a part of a link that carries one message at a time, in one direction. If a wire joins just the
    two devices, it is the only lane. Otherwise, devices in different nodes use a network card of each node,
    and devices in the same node use a port of each device.
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


class _Pricing:
    """Computes the placement problem of a placed graph from the costs of its operators."""

    def __init__(self, prices: PlacedPrices, graph: PlacedGraph, works: Mapping[str, _Work]):
        self.prices, self.graph, self.works = prices, graph, works
        self.tensors, self.training = graph.tensors, prices.training

    def problem(self) -> PlacementProblem:
        prices, graph, operators = self.prices, self.graph, self.graph.operators
        kinds, limits = prices.of_kinds(), prices.limits
        # (operators, devices, passes, queues)
        seconds = np.array([[self._seconds(op, *kind) for kind in enumerate(kinds)] for op in operators])
        forward, backward, update = np.moveaxis(seconds[:, list(prices.kinds)], 2, 0)
        for number, name in enumerate(map(graph.whole_of, range(len(operators)))):
            if name is not None and name in limits.runs_on:
                without = sorted(set(prices.cluster.best_first) - set(limits.runs_on[name]))
                forward[number, without, 0] = np.inf
        sizes = np.array([self._bytes(op) for op in operators], dtype=float)
        columns: dict[str, Any] = dict(zip(_BYTES, sizes.T, strict=True))
        return PlacementProblem(
            names=tuple(op.name for op in operators),
            forward_s=forward[..., 0],
            backward_s=backward[..., 0],
            update_s=update[..., 0],
            host_s=graph.micro_batches * (forward[..., 1] + backward[..., 1]) + update[..., 1],
            tensors=self._tensors(),
            devices=prices.devices,
            training=self.training,
            together=limits.sets(graph),
            pinned=limits.pins(graph),
            references=graph.references,
            micro_batches=graph.micro_batches,
            results=self._results(),
            **columns,
        )

    # -- seconds ----------------------------------------------------------------------------------

    def _seconds(self, op: PlacedOperator, number: int, kind: DevicePrices) -> tuple[Queues, Queues, Queues]:
        """Return (forward, backward, optimizer) durations on one device, the first two per micro-batch."""
        work, update = self.works.get(op.name), NO_WORK
        if work is not None:
            forward, backward = (of_kinds[number] for of_kinds in self.prices.seconds(work))
        else:
            forward, backward = self._moving(op, kind)
        for name in op.parameters:
            tensor = self.tensors[name]
            cast = kind.cast(tensor, tensor.elements)
            forward = forward.plus(cast)
            if not self.training:
                continue
            if work is not None and op.group is not None:
                # Backward casts the parameters that it needs once more.
                for _ in range(work.facts.parameters_kept.get(op.group.short_names[name], 0)):
                    backward = backward.plus(cast)
            if tensor.requires_grad:
                size = tensor.elements * tensor.stored_element_bytes
                arrival = kind.gradient_arrival(size, self.graph.micro_batches, copied=False)
                backward = backward.plus(cast).plus(arrival)
                update = update.plus(kind.step(tensor.elements))
        return forward, backward, update

    def _moving(self, op: PlacedOperator, kind: DevicePrices) -> tuple[Queues, Queues]:
        if op.kind == OperatorKind.JOIN and op.reads[0].code == PARTIAL:
            terms = op.count - 1
            # Every term of a sum has the gradient of the sum.
            return kind.addition(terms * self.graph.bytes(op.writes[0]), terms), NO_WORK
        # A variable hands out its parameter as it lies there, which moves nothing; its pieces are copies.
        pieces = [v for v in (*op.reads, *op.writes) if v.code is not None]
        if not pieces:
            return NO_WORK, NO_WORK
        moved = sum(map(self.graph.bytes, pieces))
        cut, joined = kind.copy(moved, len(pieces)), kind.copy(moved)
        forward, backward = (joined, cut) if op.kind == OperatorKind.JOIN else (cut, joined)
        return forward, backward if self.training and self._learning(op.writes) else NO_WORK

    def _learning(self, values: Sequence[Value]) -> list[Value]:
        return [value for value in values if self.tensors[value.tensor].requires_grad]

    # -- bytes ------------------------------------------------------------------------------------

    def _bytes(self, op: PlacedOperator) -> tuple[int, ...]:
        """Return an operator's sizes in bytes, in the order of :data:`_BYTES`."""
        optimizer, largest = kind_of(self.prices.optimizer), self.prices.graph.atoms.graph.largest_trained
        stored, gradients, state, made = 0, 0, 0, 0
        for name in op.parameters:
            tensor = self.tensors[name]
            size = tensor.elements * tensor.stored_element_bytes
            stored += size
            if tensor.requires_grad and self.training:
                gradients += size
                state += round(size * optimizer.state)
                made += round(size * optimizer.made(tensor.elements, largest))
        work = self.works.get(op.name)
        passing = self._copying(op) if work is None else self._working(op, work)
        return *passing, stored, gradients, state, made

    def _working(self, op: PlacedOperator, work: _Work) -> tuple[int, int, int]:
        """Return (bytes saved inside a group or piece, peak bytes of forward, peak bytes of backward)."""
        facts, names, size = work.facts, work.work.names, self.graph.bytes
        kept = {names[w] for w in facts.writes_kept}
        # Views of what it reads take no additional memory.
        lying, larger = {names[w] for w in facts.lies_in}, {names[w]: b for w, b in facts.extents.items()}
        made = [(v.tensor, larger.get(v.tensor, size(v))) for v in op.writes if v.tensor not in lying]
        coming, going = (sum(map(size, self._learning(values))) for values in (op.writes, op.reads))
        forward_peak, backward_peak, returning = self._peaks(op, work)
        # The facts count what an operator makes and its gradients as its own; here tensors between operators
        # are counted by themselves.
        own_kept = max(0, facts.kept_bytes - sum(b for name, b in made if name in kept))
        forward_peak = max(0, forward_peak - sum(b for name, b in made if name not in kept))
        # Negative if the operator frees what it saved, or was given, before it makes gradients of all that it
        # reads. When it casts later, it has freed its saved tensors and the gradients it was given.
        return own_kept, forward_peak, max(backward_peak - coming - going, returning - own_kept - coming)

    def _peaks(self, op: PlacedOperator, work: _Work) -> tuple[int, int, int]:
        """Return the peak bytes of forward, of backward, and while gradients are cast after backward."""
        facts, names = work.facts, work.work.names
        wide = {p: self.tensors[p] for p in op.parameters if self.tensors[p].master_dtype is not None}
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

    def _copying(self, op: PlacedOperator) -> tuple[int, int, int]:
        """Return (saved, forward peak, backward peak) bytes of an operator that splits, joins or stores."""
        if op.kind != OperatorKind.VARIABLE:
            return 0, 0, 0
        tensor = self.tensors[op.parameters[0]]
        cuts = {(v.code, v.count) for v in op.writes if v.code is not None}
        whole, cast = tensor.elements * tensor.element_bytes, tensor.master_dtype is not None
        forward = whole if cuts and cast else 0
        if not (self.training and tensor.requires_grad):
            return 0, forward, 0
        stored = tensor.elements * tensor.stored_element_bytes if cast else 0
        if not cuts:
            return 0, forward, stored
        # The pieces are gone when they are joined, before the joined one is cast.
        pieces = whole * len({(v.code, v.count) for v in op.writes})
        return 0, forward, max(whole, whole + stored - pieces)

    # -- tensors ----------------------------------------------------------------------------------

    def _tensors(self) -> tuple[PlacedTensor, ...]:
        graph = self.graph
        makers: dict[Value, int] = {}
        readers: dict[Value, list[int]] = {}
        keepers: dict[Value, list[int]] = {}
        for number, op in enumerate(graph.operators):
            kept = self._kept(op) if self.training else ()
            makers |= dict.fromkeys(op.writes, number)
            # An operator that reads a value twice waits for it, and keeps it, once.
            for value in dict.fromkeys(op.reads):
                readers.setdefault(value, []).append(number)
            for value in dict.fromkeys((*op.reads, *op.writes)):
                if value.tensor in kept:
                    keepers.setdefault(value, []).append(number)
        storages = self._storages(makers)
        return tuple(
            PlacedTensor(
                name=value.name,
                bytes=graph.bytes(value),
                producer=producer,
                readers=tuple(readers.get(value, ())),
                kept_by=tuple(keepers.get(value, ())),
                gradient=self.tensors[value.tensor].requires_grad,
                stored=self._is_stored(graph.operators[producer], value),
                **cast(Any, storages.get(value, {})),
            )
            for value, producer in makers.items()
        )

    def _kept(self, op: PlacedOperator) -> set[str]:
        if (work := self.works.get(op.name)) is None:
            return set()
        facts = work.facts
        return {work.work.names[n] for n in (*facts.reads_kept, *facts.writes_kept, *facts.parameters_kept)}

    def _storages(self, makers: Mapping[Value, int]) -> dict[Value, dict[str, int]]:
        numbers = {value: number for number, value in enumerate(makers)}
        storages: dict[Value, dict[str, int]] = {}
        for op in self.graph.operators:
            if (work := self.works.get(op.name)) is None:  # cuts and joins make copies
                continue
            names, facts = work.work.names, work.facts
            own = {value.tensor: value for value in (*op.reads, *op.writes)}
            for result, base in facts.lies_in.items():
                storages[own[names[result]]] = {"lies_in": numbers[own[names[base]]]}
            for result, size in facts.extents.items():
                storages.setdefault(own[names[result]], {})["extent"] = size
        return storages

    def _is_stored(self, maker: PlacedOperator, value: Value) -> bool:
        whole = maker.kind == OperatorKind.VARIABLE and value.code is None
        return whole and self.tensors[value.tensor].master_dtype is None

    def _results(self) -> tuple[PlacedResult, ...]:
        prices, source = self.prices, self.prices.graph.atoms.graph
        if self.training or prices.cluster.device_count < 2:
            return ()
        operators, axes = self.graph.operators, tuple(range(prices.mesh.axis_count))
        makers = {value.tensor: number for number, op in enumerate(operators) for value in op.writes}
        sizes = [(makers[name], self.tensors[name].bytes) for name in source.outputs if name in makers]
        return tuple(
            PlacedResult(maker, size, prices.links.time_s("broadcast", axes, size)) for maker, size in sizes
        )
