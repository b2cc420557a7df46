"""Limits on placements: operators that share a device, and the devices on which each may run.

Limits come from constraints and from missing kernels, as in TensorFlow's Placer (colocation_graph.cc). An
operator without a GPU kernel runs on a CPU rank, with a note. Hard constraints are applied first. A soft
constraint that would leave no device is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import networkx as nx

from tensoropt.cluster import Cluster
from tensoropt.errors import InfeasibleError
from tensoropt.ops.device_kernels import has_kernel
from tensoropt.placement.graph import PlacedGraph, Value
from tensoropt.placement.problem import common_devices
from tensoropt.sharding.constraints import (
    ConstraintError,
    Constraints,
    DevicePin,
    Pin,
    RecomputePin,
    StoredPin,
    Together,
    speaks_of,
)
from tensoropt.sharding.groups import GroupGraph
from tensoropt.sharding.recipes import NOTHING

_Constraint = Pin | StoredPin | DevicePin | Together | RecomputePin
_SHOWN = 5
"""The most names that a note lists."""


@dataclass(frozen=True)
class PlacedLimits:
    """Limits on placements, by names of operator groups.

    Attributes:
        together: sets of groups that share a device.
        devices: group -> its allowed devices, best first.
        given_up: soft constraints that are not satisfied, with reasons.
        runs_on: group -> the devices that have kernels for it; groups that all devices can run are left out.
        kernel_notes: notes on missing kernels.
    """

    together: tuple[tuple[str, ...], ...] = ()
    devices: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    given_up: tuple[tuple[_Constraint, str], ...] = ()
    runs_on: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    kernel_notes: tuple[str, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        return (*self.kernel_notes, *_given_up(self.given_up))

    @property
    def against(self) -> tuple[str, ...]:
        """Notes on dropped constraints that a sharded plan might satisfy: all but pins to devices."""
        return _given_up([one for one in self.given_up if not isinstance(one[0], DevicePin)])

    def sets(self, graph: PlacedGraph) -> tuple[tuple[int, ...], ...]:
        """Return the sets of placed operators that share a device, pieces and batch norm steps included."""
        operators = range(len(graph.operators))
        return tuple(tuple(o for o in operators if graph.whole_of(o) in names) for names in self.together)

    def pins(self, graph: PlacedGraph) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Return the pinned operators, each with its allowed devices. An operator that splits, joins or
        stores a tensor between pinned operators may run on any of their devices.
        """
        if not self.devices:
            return ()
        groups = enumerate(map(graph.whole_of, range(len(graph.operators))))
        pinned = {o: self.devices[name] for o, name in groups if name is not None and name in self.devices}
        ends: dict[Value, list[int]] = {}
        for i, op in enumerate(graph.operators):
            for value in (*op.reads, *op.writes) if op.group is not None else ():
                ends.setdefault(value, []).append(i)
        for i, op in enumerate(graph.operators):
            around = [end for value in (*op.reads, *op.writes) for end in ends.get(value, ())]
            if op.group is None and around and all(end in pinned for end in around):
                pinned[i] = tuple(dict.fromkeys(device for end in around for device in pinned[end]))
        return tuple(sorted(pinned.items()))


def _given_up(entries: Sequence[tuple[_Constraint, str]]) -> tuple[str, ...]:
    return tuple(f"given up, as it is soft: {entry}: {why}" for entry, why in entries)


def placed_limits(constraints: Constraints | None, graph: GroupGraph, cluster: Cluster) -> PlacedLimits:
    """Return the limits of constraints and kernels on placements.

    Raises:
        ConstraintError: a hard constraint concerns mesh axes, or leaves an operator no device of the cluster.
        InfeasibleError: no device of the cluster has kernels for all operators of a group.
    """
    limits = PlacedLimits() if len(cluster.device_types) == 1 else _kernel_limits(graph, cluster)
    return limits if constraints is None else _Narrowing(constraints, graph, cluster, limits).limits()


def _kernel_limits(graph: GroupGraph, cluster: Cluster) -> PlacedLimits:
    runs_on: dict[str, tuple[int, ...]] = {}
    notes: list[str] = []
    unknown: dict[str, None] = {}
    for group in graph.groups:
        targets = dict.fromkeys(op.target for op in group.operators)
        found = {
            (target, kind): has_kernel(target, kind) for target in targets for kind in cluster.device_types
        }
        unknown.update((target, None) for (target, _), known in found.items() if known is None)
        lacking = [(target, kind) for (target, kind), known in found.items() if known is False]
        if not lacking:
            continue
        words = " and ".join(f"{target} has no kernel for {kind} devices" for target, kind in lacking)
        types = set(cluster.device_types) - {kind for _, kind in lacking}
        devices = tuple(rank for rank in cluster.best_first if cluster.devices[rank].type in types)
        if not devices:
            raise InfeasibleError(
                f"no device of {cluster.name} can run {group.name}: {words}; write that part with other "
                "PyTorch calls"
            )
        runs_on[group.name] = devices
        notes.append(f"{words}: {group.name} can run on device {', '.join(map(str, devices))} only")
    if unknown:
        notes.append(f"kernels unknown on this machine, assumed for all devices: {', '.join(unknown)}")
    return PlacedLimits(runs_on=runs_on, kernel_notes=tuple(notes))


class _Narrowing:
    """The devices left to each operator group while constraints are applied one after another."""

    def __init__(self, constraints: Constraints, graph: GroupGraph, cluster: Cluster, kernels: PlacedLimits):
        self.constraints, self.graph, self.cluster, self.kernels = constraints, graph, cluster, kernels
        self.orders: dict[str, tuple[int, ...]] = {}
        self.because: dict[str, tuple[_Constraint, ...]] = {}
        self.together = nx.Graph()
        self.given_up: list[tuple[_Constraint, str]] = []

    def limits(self) -> PlacedLimits:
        given = self.constraints
        pins: tuple[Pin | StoredPin, ...] = (*given.pins, *given.stored)
        for pin in pins:
            self._refuse(pin, "a placed plan has no mesh axes, each of its operators lies on one device")
        for recomputed in given.recompute:
            if recomputed.recipe != NOTHING:
                self._refuse(recomputed, "a placed plan recomputes nothing")
        for soft in (False, True):
            for entry in (entry for entry in given.devices if entry.soft is soft):
                self._allow(entry)
            for tie in (tie for tie in given.together if tie.soft is soft):
                self._join(tie)
        sets = tuple(tuple(sorted(names)) for names in nx.connected_components(self.together))
        return replace(self.kernels, together=sets, devices=self.orders, given_up=tuple(self.given_up))

    def _refuse(self, entry: _Constraint, why: str) -> None:
        if not entry.soft:
            raise ConstraintError(f"{entry}: {why}; remove the constraint, or make it 'soft: true'")
        self.given_up.append((entry, why))

    def _allow(self, entry: DevicePin) -> None:
        if not (allowed := entry.allowed(self.cluster)):
            number = f"{self.cluster.name} has devices 0 to {self.cluster.device_count - 1}"
            kind = f"no device of {self.cluster.name} is of such a kind"
            self._refuse(entry, number if entry.numbers else kind)
            return
        left_out: dict[str, list[str]] = {}
        for name in speaks_of(entry, self.graph):
            before = self.orders.get(name)
            # Several entries for one group all apply.
            orders = [allowed] if before is None else [before, allowed]
            self.orders[name] = common_devices(orders, self.cluster.best_first)
            if beside := self._contradicted(entry, name):
                left_out.setdefault(beside, []).append(name)
                del self.orders[name]
                self.orders.update({} if before is None else {name: before})
            else:
                self.because[name] = (*self.because.get(name, ()), entry)
        for beside, names in left_out.items():
            self._refuse(entry, f"given {beside}, it leaves no device for {_some(names)}")

    def _join(self, tie: Together) -> None:
        names = speaks_of(tie, self.graph)
        # Operators of one group share a device in any case.
        if len(names) < 2:
            return
        before = self.together.copy()
        nx.add_path(self.together, names)
        if beside := self._contradicted(tie, names[0]):
            self.together = before
            self._refuse(tie, f"given {beside}, it leaves no device for {_some(names)}")
            return
        for name in names:
            self.because[name] = (*self.because.get(name, ()), tie)

    def _contradicted(self, entry: _Constraint, name: str) -> str:
        members = nx.node_connected_component(self.together, name) if name in self.together else {name}
        kernels = [self.kernels.runs_on[member] for member in members if member in self.kernels.runs_on]
        orders = [*(self.orders[member] for member in members if member in self.orders), *kernels]
        if not orders or common_devices(orders, self.cluster.best_first):
            return ""
        others = [
            str(c) for member in sorted(members) for c in self.because.get(member, ()) if c is not entry
        ]
        others += ["the available kernels"] if kernels else []
        return " and ".join(dict.fromkeys(others))


def _some(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
