"""A cluster in equal parts, one behind the other: the places of a pipeline."""

from __future__ import annotations

from tensoropt.cluster import Cluster, Mesh
from tensoropt.errors import ClusterError
from tensoropt.plan.plan import STAGE_AXIS


def job_meshes(cluster: Cluster, places: int, most_axes: int) -> tuple[Mesh, ...]:
    """The meshes of a cluster whose first axis is a pipeline: its places follow one another over the
    outermost links, and each is one of the meshes of such a part of the cluster.

    Args:
        most_axes: of a place.

    Raises:
        ClusterError: the devices are not in so many equal parts of whole link levels.
    """
    devices = cluster.device_count
    if places < 2 or devices % places:
        raise ClusterError(
            f"{devices} devices are not in {places} equal parts of a pipeline; give a divisor of the number "
            "of devices that is at least 2"
        )
    found = []
    for inner in cluster.subset(devices // places).meshes(most_axes):
        axes = [(size, name) for size, name in zip(inner.shape, inner.names, strict=True) if size > 1]
        found.append(
            Mesh(shape=(places, *(size for size, _ in axes)), names=(STAGE_AXIS, *(name for _, name in axes)))
        )
    return tuple(found)


def degrees_of(cluster: Cluster) -> tuple[int, ...]:
    """The numbers of places in which a cluster can be put."""
    found = []
    for places in range(2, cluster.device_count + 1):
        if cluster.device_count % places == 0:
            try:
                cluster.subset(cluster.device_count // places)
            except ClusterError:
                continue
            found.append(places)
    return tuple(found)
