"""Shrink a placement problem: join operators along the edges that carry most bytes (node co-placement).

The idea is that of NetSplit's Algorithm 3, by union-find: both ends of a heavy edge share a device from the
start. The limits on sizes are ours. A *group* of operators shares a device and nothing else
(:func:`share_devices`). A *block* (:func:`co_place`) also runs without a break, so blocks must not wait for
each other: joining u and v along u -> v closes a cycle exactly if a second path leads from u to v.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import networkx as nx
import numpy as np

from tensoropt.placement import PlacedTensor, Placement, PlacementProblem
from tensoropt.placement.problem import PER_MICRO_BATCH, PER_STEP
from tensoropt.planners.placed.common.units import units_of

_LARGEST = ("forward_peak_bytes", "backward_peak_bytes")
"""Columns of which a block has the maximum over its operators, as these run one by one; others are summed."""


@dataclass(frozen=True)
class Contraction:
    """A smaller placement problem, whose operators are blocks of the original problem's operators.

    Attributes:
        whole: the original problem.
        groups: the operators of each block, ascending; blocks are in a topological order.
    """

    whole: PlacementProblem
    groups: tuple[tuple[int, ...], ...]

    @cached_property
    def block(self) -> tuple[int, ...]:
        """The block of each operator."""
        blocks = [0] * self.whole.size
        for number, group in enumerate(self.groups):
            for operator in group:
                blocks[operator] = number
        return tuple(blocks)

    @cached_property
    def problem(self) -> PlacementProblem:
        """The problem over blocks, with times and bytes of a block's operators summed. Tensors inside a block
        that backward needs are added to the block's saved bytes.
        """
        whole, groups = self.whole, [list(g) for g in self.groups]
        # The same object if nothing is joined: callers check by identity whether the program covers every
        # placement.
        if len(groups) == whole.size and all(g == [i] for i, g in enumerate(groups)):
            return whole

        columns: dict[str, Any] = {}
        for name in (*PER_MICRO_BATCH, *PER_STEP):
            joined = np.maximum if name in _LARGEST else np.add
            columns[name] = np.array([joined.reduce(getattr(whole, name)[g], axis=0) for g in groups])
        inside = [self._kept_inside(number) for number in range(len(groups))]
        columns["kept_bytes"] = columns["kept_bytes"] + inside
        return replace(
            whole,
            **columns,
            names=tuple(self._name(g) for g in groups),
            tensors=tuple(self._between()),
            together=tuple(tuple(sorted({self.block[o] for o in group})) for group in whole.together),
            pinned=tuple(self._pinned()),
        )

    def expand(self, placement: Placement) -> Placement:
        """Convert a placement of blocks to one of operators, in which each block runs without a break."""
        device = tuple(placement.device[b] for b in self.block)
        return Placement(
            device,
            tuple(tuple(o for b in order for o in self.groups[b]) for order in placement.forward),
            tuple(
                # A block's operators depend on one another in the model's order, backward in the opposite
                # one.
                tuple(o for b in order for o in reversed(self.groups[b]))
                for order in placement.backward
            ),
        )

    def _name(self, group: list[int]) -> str:
        first = self.whole.names[group[0]]
        return first if len(group) == 1 else f"{first} and {len(group) - 1} more"

    def _kept_inside(self, number: int) -> float:
        tensors = (self.whole.tensors[t] for o in self.groups[number] for t in self.whole.made[o])
        inside = (t for t in tensors if all(self.block[r] == number for r in t.readers))
        return float(sum(t.bytes for t in inside if t.kept_by and not t.stored))

    def _between(self) -> Iterator[PlacedTensor]:
        for tensor in self.whole.tensors:
            producer = self.block[tensor.producer]
            readers = {self.block[r] for r in tensor.readers}
            if readers <= {producer}:
                continue
            yield replace(
                tensor,
                producer=producer,
                readers=tuple(sorted(readers - {producer})),
                kept_by=tuple(sorted({self.block[o] for o in tensor.kept_by})),
            )

    def _pinned(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        for number, group in enumerate(self.groups):
            allowed = self.whole.allowed[list(group)].all(axis=0)
            if not allowed.all():
                yield number, tuple(np.flatnonzero(allowed).tolist())


def contract(problem: PlacementProblem, groups: Sequence[Sequence[int]]) -> Contraction:
    """Return the problem over ``groups``, which partition the operators in a topological order."""
    return Contraction(problem, tuple(tuple(sorted(g)) for g in groups))


@dataclass(frozen=True, kw_only=True)
class GroupLimits:
    """The limits at which joining stops.

    Attributes:
        most_operators: the most operators in one group.
        most_groups: joining stops as soon as there are no more groups than this.
        most_bytes: the most bytes that one group may store and save in a step.
        most_seconds: the most seconds that one group may compute in a step on its fastest device.
    """

    most_operators: int
    most_groups: int
    most_bytes: float = float("inf")
    most_seconds: float = float("inf")

    @classmethod
    def of_shares(cls, problem: PlacementProblem, share: float, most_groups: int) -> GroupLimits:
        """Return limits that give a group at most ``share`` of all operators, computation and memory."""
        lasting = [problem.step_bytes(o) for o in range(problem.size)]
        work = (problem.forward_s + problem.backward_s + problem.update_s).min(axis=1)
        return cls(
            most_operators=math.ceil(share * problem.size),
            most_groups=most_groups,
            # The largest operator alone may exceed its share and is a group all the same.
            most_bytes=max(share * sum(lasting), max(lasting)),
            most_seconds=max(share * float(work.sum()), float(work.max())),
        )


def co_place(problem: PlacementProblem, limits: GroupLimits) -> Contraction:
    """Join operators to blocks along the heaviest edges, unless a join would close a cycle.

    The result has more than ``limits.most_groups`` blocks if limits, cycles or missing edges forbid joining.
    """
    groups = _Groups(problem, limits, acyclic=True)
    groups.join_along_edges()
    # A topological order; of several blocks, the one with the first operator.
    order = nx.lexicographical_topological_sort(groups.graph, key=lambda block: sorted(groups.members[block]))
    return contract(problem, [groups.members[block] for block in order])


def share_devices(problem: PlacementProblem, most_groups: int) -> tuple[tuple[int, ...], ...]:
    """Return at most ``most_groups`` groups of operators that share a device, joined along heavy edges.
    Operators are still scheduled one by one, so that a group may wait for another between its operators.

    Joins along edges stop at an even share of all operators, computation and memory, as one heavy group would
    leave no choice. After that, the group with the least memory joins the neighbour, or else any other group,
    with the least memory. These rules are assumptions. More groups remain only if pins forbid joining.
    """
    groups = _Groups(problem, GroupLimits.of_shares(problem, 1 / most_groups, most_groups), acyclic=False)
    for first, *others in units_of(problem).members:
        for other in others:
            groups.join(first, other)
    groups.join_along_edges()
    groups.limits = GroupLimits(most_operators=problem.size, most_groups=most_groups)
    waiting = set(groups.members)
    while waiting and len(groups.members) > most_groups:
        lean = min(waiting, key=lambda group: (groups.bytes[group], group))
        waiting.discard(lean)
        for near in (set(nx.all_neighbors(groups.graph, lean)), set(groups.members)):
            allowed = [other for other in near if other != lean and groups.room(lean, other)]
            if allowed:
                groups.join(min(allowed, key=lambda group: (groups.bytes[group], group)), lean)
                break
    return tuple(tuple(sorted(members)) for members in groups.members.values())


class _Groups:
    """Groups of operators, joined in pairs within limits.

    Attributes:
        graph: the graph of groups; each node is named by one of the group's operators.
        acyclic: whether a join must not close a cycle.
        weights: (producer, reader) -> size in bytes of the tensors sent and of the gradients returned.
        members, block: the operators of each group, and the group of each operator.
        bytes, seconds, allowed: each group's memory, time on each device, and permitted devices.
    """

    def __init__(self, problem: PlacementProblem, limits: GroupLimits, *, acyclic: bool):
        self.limits, self.acyclic = limits, acyclic
        self.weights: dict[tuple[int, int], int] = {}
        for tensor in problem.tensors:
            # A gradient comes back over a cut edge and is as large as the tensor.
            size = tensor.bytes * (1 + (problem.training and tensor.gradient))
            for edge in ((tensor.producer, reader) for reader in tensor.readers):
                self.weights[edge] = self.weights.get(edge, 0) + size
        self.graph = nx.DiGraph()
        self.graph.add_nodes_from(range(problem.size))
        self.graph.add_edges_from(self.weights)
        self.members: dict[int, list[int]] = {o: [o] for o in range(problem.size)}
        self.block = list(range(problem.size))
        self.bytes = [problem.step_bytes(o) for o in range(problem.size)]
        self.seconds = problem.forward_s + problem.backward_s + problem.update_s
        self.allowed = [*problem.allowed]

    def room(self, u: int, v: int) -> bool:
        limits = self.limits
        return (
            len(self.members[u]) + len(self.members[v]) <= limits.most_operators
            and self.bytes[u] + self.bytes[v] <= limits.most_bytes
            and float((self.seconds[u] + self.seconds[v]).min()) <= limits.most_seconds
            and bool((self.allowed[u] & self.allowed[v]).any())
        )

    def join(self, u: int, v: int) -> bool:
        """Join group ``v`` to group ``u`` regardless of limits; False if that would close a cycle."""
        if self.acyclic and (self._detour(u, v) or self._detour(v, u)):
            return False
        before, after = list(self.graph.pred[v]), list(self.graph.succ[v])
        self.graph.remove_node(v)
        self.graph.add_edges_from((w, u) for w in before if w != u)
        self.graph.add_edges_from((u, w) for w in after if w != u)
        for operator in self.members[v]:
            self.block[operator] = u
        self.members[u] += self.members.pop(v)
        self.bytes[u] += self.bytes[v]
        self.seconds[u] = self.seconds[u] + self.seconds[v]
        self.allowed[u] = self.allowed[u] & self.allowed[v]
        return True

    def _detour(self, u: int, v: int) -> bool:
        return any(nx.has_path(self.graph, w, v) for w in self.graph.succ[u] if w != v)

    def join_along_edges(self) -> None:
        """Join groups along edges, heaviest first, until ``most_groups`` is reached or no edge can be joined.

        Edges are tried repeatedly, as an edge that would close a cycle no longer does so once the second path
        is joined. Groups without edges, such as the counters of a normalization, are joined last.
        """
        # Ties go by the operators' numbers, so that the blocks are the same in every run.
        edges = sorted(self.weights, key=lambda edge: (-self.weights[edge], edge))
        most, before = self.limits.most_groups, 0
        while len(self.members) > most and len(self.members) != before:
            before = len(self.members)
            for u, v in ((self.block[a], self.block[b]) for a, b in edges):
                if u != v and len(self.members) > most and self.room(u, v):
                    self.join(u, v)
        lone: int | None = None
        for group in [w for w in self.members if not self.graph.degree(w)]:
            if len(self.members) <= most:
                return
            if lone is None or not self.room(lone, group) or not self.join(lone, group):
                lone = group
