"""The places of a pipeline: a cluster in equal parts, one after another."""

from __future__ import annotations

from tensoropt.cluster import Cluster, DeviceKind, Mesh
from tensoropt.errors import ClusterError
from tensoropt.plan.plan import STAGE_AXIS


def job_meshes(cluster: Cluster, places: int, most_axes: int) -> tuple[Mesh, ...]:
    """Return the meshes of a cluster whose first axis is a pipeline: the places are connected by the
    outermost links, and each place has one of the meshes of such a part of the cluster.

    Args:
        most_axes: the most axes of a place's mesh.

    Raises:
        ClusterError: the devices do not divide into so many equal parts of whole link levels.
    """
    found = []
    for inner in _place_of(cluster, places).meshes(most_axes):
        axes = [(size, name) for size, name in zip(inner.shape, inner.names, strict=True) if size > 1]
        found.append(
            Mesh(shape=(places, *(size for size, _ in axes)), names=(STAGE_AXIS, *(name for _, name in axes)))
        )
    return tuple(found)


def degrees_of(cluster: Cluster) -> tuple[int, ...]:
    """Return the numbers of places into which a cluster can be divided."""
    found = []
    for places in range(2, cluster.device_count + 1):
        if cluster.device_count % places == 0:
            try:
                _place_of(cluster, places)
            except ClusterError:
                continue
            found.append(places)
    return tuple(found)


def kinds_at(cluster: Cluster, places: int) -> tuple[tuple[DeviceKind, ...], ...]:
    """Return the kinds of devices at each place of a pipeline; places hold the ranks in order."""
    size = cluster.device_count // places
    parts = (cluster.devices[place * size : (place + 1) * size] for place in range(places))
    return tuple(tuple({kind.name: kind for kind in part}.values()) for part in parts)


def _place_of(cluster: Cluster, places: int) -> Cluster:
    """Return the first of the equal parts.

    Raises:
        ClusterError: there are no such parts.
    """
    devices = cluster.device_count
    if places < 2 or devices % places:
        raise ClusterError(
            f"{devices} devices are not in {places} equal parts of a pipeline; give a divisor of the number "
            "of devices that is at least 2"
        )
    part = cluster.subset(devices // places)
    # A level may not divide into parts of this size, such as 3 devices of a node of 4.
    if part.levels:
        level, within = part.levels[0], cluster.levels[-len(part.levels)]
        if within.size % level.size:
            raise ClusterError(
                f"{places} equal parts of cluster '{cluster.name}' would lie across its links: each has "
                f"{level.size} of the {within.size} of a level ({level.name}); give a number "
                "of parts that divides them"
            )
    return part
