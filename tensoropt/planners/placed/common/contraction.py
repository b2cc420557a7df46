"""Node co-placement: join operators of a placement problem along the heaviest edges.

The idea is that of NetSplit's Algorithm 3, by union-find: the two ends of a heavy edge share a device from
the start. The limits on groups are ours. The operators of a group share a device and nothing else
(:func:`share_devices`); a block (:func:`co_place`) also runs in one go, so that blocks must not wait for
each other: joining u and v along u -> v closes a cycle exactly if a second path leads from u to v.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import networkx as nx
import numpy as np

from tensoropt.placement import PlacedTensor, Placement, PlacementProblem
from tensoropt.planners.placed.common.units import units_of


class _Groups:
    """Groups of operators, joined two by two; a union-find whose sets list their members."""

    def __init__(self, problem: PlacementProblem):
        self.members: dict[int, list[int]] = {o: [o] for o in range(problem.size)}
        self.block: list[int] = list(range(problem.size))
        self.after: dict[int, set[int]] = {o: set() for o in range(problem.size)}
        self.before: dict[int, set[int]] = {o: set() for o in range(problem.size)}
        for tensor in problem.tensors:
            for reader in tensor.readers:
                self.after[tensor.producer].add(reader)
                self.before[reader].add(tensor.producer)

    @property
    def count(self) -> int:
        return len(self.members)

    def join(self, first: int, second: int) -> bool:
        for old, new in ((self.after, self.before), (self.before, self.after)):
            for neighbour in old.pop(second):
                new[neighbour].discard(second)
                if neighbour != first:
                    new[neighbour].add(first)
                    old[first].add(neighbour)
        for operator in self.members[second]:
            self.block[operator] = first
        self.members[first] += self.members.pop(second)
        return True

    def lone(self) -> list[int]:
        return [w for w in self.members if not self.after[w] and not self.before[w]]

    def groups(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(sorted(members)) for members in self.members.values())


class _ContractedBlocks(_Groups):
    """Groups whose graph stays acyclic."""

    def join(self, first: int, second: int) -> bool:
        # A path between the two by other blocks would become a cycle.
        if self._detour(first, second) or self._detour(second, first):
            return False
        return super().join(first, second)

    def _detour(self, u: int, v: int) -> bool:
        reached = set[int]()
        waiting = [w for w in self.after[u] if w != v]
        while waiting:
            if (w := waiting.pop()) not in reached:
                reached.add(w)
                waiting += self.after[w]
        return v in reached

    def groups(self) -> tuple[tuple[int, ...], ...]:
        blocks = {w: tuple(sorted(members)) for w, members in self.members.items()}
        # A topological order; of several blocks, the one with the first operator.
        order = nx.lexicographical_topological_sort(nx.DiGraph(self.after), key=blocks.__getitem__)
        return tuple(blocks[w] for w in order)


def _allowed_devices(problem: PlacementProblem) -> list[set[int]]:
    possible = np.isfinite(problem.forward_s + problem.backward_s + problem.update_s)
    allowed = [set(np.flatnonzero(row).tolist()) for row in possible]
    for operator, devices in problem.pinned:
        allowed[operator] &= set(devices)
    return allowed


@dataclass(frozen=True)
class Contraction:
    """A problem whose operators are blocks of another problem's operators.

    Attributes:
        groups: the operators of each block, ascending; the blocks in a topological order.
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
        """The problem over blocks, with times and bytes summed; a tensor that backward needs inside a block
        counts in the block's kept bytes.
        """
        whole, groups = self.whole, [list(g) for g in self.groups]
        # The very same object where nothing is joined: callers ask by identity whether the program knows
        # every placement.
        if len(groups) == whole.size and all(g == [i] for i, g in enumerate(groups)):
            return whole

        def summed(values: np.ndarray) -> np.ndarray:
            return np.array([values[g].sum(axis=0) for g in groups])

        def largest(values: np.ndarray) -> np.ndarray:
            return np.array([values[g].max() for g in groups])

        kept = np.array([self._kept_inside(number) for number in range(len(groups))])
        return replace(
            whole,
            names=tuple(self._name(g) for g in groups),
            forward_s=summed(whole.forward_s),
            backward_s=summed(whole.backward_s),
            update_s=summed(whole.update_s),
            parameter_bytes=summed(whole.parameter_bytes),
            gradient_bytes=summed(whole.gradient_bytes),
            optimizer_bytes=summed(whole.optimizer_bytes),
            kept_bytes=summed(whole.kept_bytes) + kept,
            forward_peak_bytes=largest(whole.forward_peak_bytes),
            backward_peak_bytes=largest(whole.backward_peak_bytes),
            update_peak_bytes=None if whole.update_peak_bytes is None else summed(whole.update_peak_bytes),
            host_s=None if whole.host_s is None else summed(whole.host_s),
            tensors=tuple(self._between()),
            together=tuple(self._together()),
            pinned=tuple(self._pinned()),
        )

    def expand(self, placement: Placement) -> Placement:
        """Return the operators' placement for a placement of the blocks: each block in one go, backward in
        reverse.
        """
        device = tuple(placement.device[b] for b in self.block)
        return Placement(
            device,
            tuple(tuple(o for b in order for o in self.groups[b]) for order in placement.forward),
            tuple(
                # A block's operators depend on one another in the model's order, backward in the opposite
                # one.
                tuple(o for b in order for o in reversed(self.groups[b]))
                for order in placement.backward_orders
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

    def _together(self) -> Iterable[tuple[int, ...]]:
        for group in self.whole.together:
            blocks = tuple(sorted({self.block[o] for o in group}))
            if len(blocks) > 1:
                yield blocks

    def _pinned(self) -> Iterable[tuple[int, tuple[int, ...]]]:
        everywhere = set(range(self.whole.devices.count))
        allowed = _allowed_devices(self.whole)
        for number, group in enumerate(self.groups):
            devices = everywhere.intersection(*(allowed[o] for o in group))
            if devices != everywhere:
                yield number, tuple(sorted(devices))


def contract(problem: PlacementProblem, groups: Sequence[Sequence[int]]) -> Contraction:
    """Return the problem whose operators are the groups, as blocks. The groups partition the operators, in a
    topological order, and close no cycle.
    """
    return Contraction(problem, tuple(tuple(sorted(g)) for g in groups))


@dataclass(frozen=True, kw_only=True)
class GroupLimits:
    """The limits at which co-placement stops.

    Attributes:
        most_operators: the most operators in one group.
        most_groups: joining stops as soon as there are no more than this.
        most_bytes: the most bytes that one group stores and keeps for a step.
        most_seconds: the most seconds of one group's forward and backward, on its fastest device.
    """

    most_operators: int
    most_groups: int
    most_bytes: float = float("inf")
    most_seconds: float = float("inf")

    @classmethod
    def of_shares(cls, problem: PlacementProblem, share: float, most_groups: int) -> GroupLimits:
        """Return limits that give a group at most this share of all operators, work and memory."""
        lasting = [problem.step_bytes(o) for o in range(problem.size)]
        work = (problem.forward_s + problem.backward_s + problem.update_s).min(axis=1)
        return cls(
            most_operators=math.ceil(share * problem.size),
            most_groups=most_groups,
            # The largest operator alone may exceed its share and is a group all the same.
            most_bytes=max(share * sum(lasting), max(lasting)),
            most_seconds=max(share * float(work.sum()), float(work.max())),
        )


def edge_weights(problem: PlacementProblem) -> dict[tuple[int, int], int]:
    """Return the bytes of all tensors that cross from a producer to a reader, and of their gradients, by
    (producer, reader).
    """
    weights: dict[tuple[int, int], int] = {}
    for tensor in problem.tensors:
        # A gradient comes back over a cut edge and is as large as the tensor.
        size = tensor.bytes * (1 + (problem.training and tensor.gradient))
        for reader in tensor.readers:
            edge = (tensor.producer, reader)
            weights[edge] = weights.get(edge, 0) + size
    return weights


def co_place(problem: PlacementProblem, limits: GroupLimits) -> Contraction:
    """Return the operators in blocks that run in one go, joined along the heaviest edges where that closes no
    cycle.

    More blocks than requested remain if the limits, cycles or missing edges forbid further joining: compare
    ``len(result.groups)``.
    """
    blocks = _ContractedBlocks(problem)
    _join_along_edges(problem, blocks, _Room(problem, limits, blocks))
    return contract(problem, blocks.groups())


def share_devices(problem: PlacementProblem, most_groups: int) -> tuple[tuple[int, ...], ...]:
    """Return the operators in at most ``most_groups`` groups that share a device, joined along the heaviest
    edges: a group may wait for another in its midst, as its operators are timed one by one.

    Edges are followed up to an even share of all operators, work and memory in one group, as a group of all
    that is heavy leaves the program no choice. The rest joins, the leanest group first, the leanest of its
    neighbours, or of all groups; these are assumptions. More groups remain only if pins forbid joining them.
    """
    groups = _Groups(problem)
    room = _Room(problem, GroupLimits.of_shares(problem, 1 / most_groups, most_groups), groups)
    for first, *others in units_of(problem).members:
        for other in others:
            room.joined(first, other)
    _join_along_edges(problem, groups, room)
    room.limits = GroupLimits(most_operators=problem.size, most_groups=most_groups)
    waiting = set(groups.members)
    while waiting and groups.count > most_groups:
        lean = min(waiting, key=lambda group: (room.bytes[group], group))
        waiting.discard(lean)
        for near in (groups.after[lean] | groups.before[lean], set(groups.members)):
            allowed = [other for other in near if other != lean and room(lean, other)]
            if allowed:
                room.joined(min(allowed, key=lambda group: (room.bytes[group], group)), lean)
                break
    return groups.groups()


def _join_along_edges(problem: PlacementProblem, blocks: _Groups, room: _Room) -> None:
    """Join groups along the edges, from the heaviest to the lightest, until ``most_groups`` is reached; and
    again as long as a round joins anything, because an edge that would have closed a cycle may be free once
    its detour has been joined too.
    """
    most_groups = room.limits.most_groups
    weights = edge_weights(problem)
    # Ties by the operators' numbers, so that the blocks are the same in every run.
    edges = sorted(weights, key=lambda edge: (-weights[edge], edge))
    joined = True
    while joined and blocks.count > most_groups:
        joined, left = False, []
        for edge in edges:
            if blocks.count <= most_groups:
                break
            u, v = (blocks.block[o] for o in edge)
            if u == v:
                continue
            if room(u, v) and room.joined(u, v):
                joined = True
            else:
                left.append(edge)
        edges = left
    # Without this, 371 operators of DeepLab-V3 were reduced to 112 blocks instead of 40.
    _gather(blocks, room)


def _gather(blocks: _Groups, room: _Room) -> None:
    """Join blocks without edges, which the algorithm never meets: for example, counters of a
    normalization.
    """
    first: int | None = None
    for block in blocks.lone():
        if blocks.count <= room.limits.most_groups:
            return
        if first is not None and room(first, block) and room.joined(first, block):
            first = blocks.block[first]
        else:
            first = block


class _Room:
    """The contents of the groups, and whether two of them stay within the limits together."""

    def __init__(self, problem: PlacementProblem, limits: GroupLimits, blocks: _Groups):
        self.limits, self.blocks = limits, blocks
        self.bytes = [problem.step_bytes(o) for o in range(problem.size)]
        self.seconds = problem.forward_s + problem.backward_s + problem.update_s
        self.allowed = _allowed_devices(problem)

    def __call__(self, u: int, v: int) -> bool:
        limits, members = self.limits, self.blocks.members
        return (
            len(members[u]) + len(members[v]) <= limits.most_operators
            and self.bytes[u] + self.bytes[v] <= limits.most_bytes
            and float((self.seconds[u] + self.seconds[v]).min()) <= limits.most_seconds
            and bool(self.allowed[u] & self.allowed[v])
        )

    def joined(self, u: int, v: int) -> bool:
        """Join two groups, whatever the limits; return False if the groups cannot be joined."""
        if not self.blocks.join(u, v):
            return False
        total, seconds = self.bytes[u] + self.bytes[v], self.seconds[u] + self.seconds[v]
        devices = self.allowed[u] & self.allowed[v]
        # Both names stand for the group, whichever of them it kept.
        for name in (u, v):
            self.bytes[name], self.seconds[name], self.allowed[name] = total, seconds, devices
        return True
