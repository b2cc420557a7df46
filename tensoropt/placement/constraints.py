"""A person's constraints as limits on placements.

As in TensorFlow's Placer, operators that belong together share a device, and an operator lies on a device of
a supported kind. Pins of mesh axes and of stored placements have no meaning if an operator lies on one
device: hard ones are refused, soft ones are given up with a note.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from tensoropt.cluster import Cluster
from tensoropt.placement.graph import PlacedGraph
from tensoropt.sharding.constraints import (
    ConstraintError,
    Constraints,
    DeviceKinds,
    Pin,
    StoredPin,
    speaks_of,
)
from tensoropt.sharding.groups import GroupGraph

NO_AXES = "a placed plan has no mesh axes, each of its operators lies on one device"


@dataclass(frozen=True)
class PlacedLimits:
    """Constraints on placements, by names of groups.

    Attributes:
        together: groups that share a device.
        devices: group -> the devices it may lie on.
        notes: what was given up.
    """

    together: tuple[tuple[str, ...], ...] = ()
    devices: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def sets(self, graph: PlacedGraph) -> tuple[tuple[int, ...], ...]:
        """Return the sets of operators that share a device, pieces of one group included."""
        return tuple(
            tuple(
                i for i, op in enumerate(graph.operators) if op.group is not None and op.group.name in names
            )
            for names in self.together
        )

    def pins(self, graph: PlacedGraph) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Return operators with the devices they may lie on."""
        return tuple(
            (i, self.devices[op.group.name])
            for i, op in enumerate(graph.operators)
            if op.group is not None and op.group.name in self.devices
        )


def placed_limits(constraints: Constraints | None, graph: GroupGraph, cluster: Cluster) -> PlacedLimits:
    """Return the limits that constraints put on placements.

    Raises:
        ConstraintError: a hard constraint concerns mesh axes, or kinds that no device of the cluster is of.
    """
    if constraints is None:
        return PlacedLimits()
    pins: tuple[Pin | StoredPin, ...] = (*constraints.pins, *constraints.stored)
    notes = [_given_up(pin, NO_AXES) for pin in pins]
    together = tuple(speaks_of(entry, graph) for entry in constraints.together)
    allowed: dict[str, set[int]] = {}
    for entry in constraints.devices:
        found = _devices(entry, cluster)
        if not found:
            notes.append(_given_up(entry, f"no device of {cluster.name} is of such a kind"))
            continue
        for name in speaks_of(entry, graph):
            # Several entries for one group all apply: the devices they have in common remain.
            allowed[name] = allowed.get(name, found) & found
            if not allowed[name]:
                raise ConstraintError(f"{entry}: another entry of 'devices' leaves {name} none of them")
    devices = {name: tuple(sorted(found)) for name, found in allowed.items()}
    return PlacedLimits(tuple(names for names in together if len(names) > 1), devices, tuple(notes))


def _given_up(entry: Pin | StoredPin | DeviceKinds, why: str) -> str:
    if not entry.soft:
        raise ConstraintError(f"{entry}: {why}; leave it out, or make it 'soft: true'")
    return f"given up, as it is soft: {entry}: {why}"


def _devices(entry: DeviceKinds, cluster: Cluster) -> set[int]:
    return {
        number
        for number, device in enumerate(cluster.devices)
        if any(fnmatchcase(device.name, kind) for kind in entry.kinds)
    }
