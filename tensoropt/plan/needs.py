"""The memory that a plan needs on a device, divided into parts."""

from __future__ import annotations

from collections.abc import Sequence

from tensoropt.cluster import Cluster
from tensoropt.costs.device_fit import DeviceFit, device_fit
from tensoropt.costs.process_memory import CONTEXT, memory_of_process, terms_of_collectives
from tensoropt.plan.point import Point
from tensoropt.plan.space import Space


def point_needs(point: Point, spaces: Sequence[Space], cluster: Cluster | None, room: float) -> DeviceFit:
    """Return the memory that a point needs on a device, compared with the device's usable bytes, ``room``.

    If a point counts only tensors, the other memory of a GPU process is estimated from its collectives.
    """
    terms, tensors = point.terms, point.memory_bytes - sum(point.terms.values())
    if cluster is None or cluster.device_type != "cuda":
        return device_fit(tensors, terms, 0.0, room, estimated=False)
    if CONTEXT not in terms:
        # A message is between neighbouring ranks of the first axis.
        over = ((kind, (0,) if kind == "send" else axes) for kind, axes, *_ in point.collectives)
        shape = spaces[point.space].mesh.shape
        terms = {**terms_of_collectives(memory_of_process(cluster, 0.0), over, shape), **terms}
    return device_fit(tensors, terms, cluster.memory_bytes, room, estimated=True)
