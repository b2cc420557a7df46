"""Memory that plans need on a device: one point in parts, many points as a column."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tensoropt.cluster import Cluster
from tensoropt.costs.device_fit import DeviceFit, device_fit
from tensoropt.costs.process_memory import CONTEXT, memory_of_process, terms_of_collectives
from tensoropt.plan.point import Point
from tensoropt.plan.space import Space


def device_of(cluster: Mapping[str, Any]) -> Cluster | None:
    """Return the cluster from its saved data; None if its devices were not saved."""
    return Cluster.from_dict(cluster) if cluster.get("devices") else None


def point_needs(
    point: Point, spaces_of: Callable[[], Sequence[Space]], cluster: Cluster | None, room: float
) -> DeviceFit:
    """Return the memory that a point needs, compared with that of the smallest device or a part of it.

    Args:
        spaces_of: returns the points' spaces; called only if a point counts tensors alone, to estimate the
            process memory from what it sends.
    """
    terms, tensors = point.terms, point.memory_bytes - sum(point.terms.values())
    if cluster is None or cluster.device_type != "cuda":
        return device_fit(tensors, terms, 0.0, room, estimated=False)
    if CONTEXT not in terms:
        # A message is between neighbouring ranks of the first axis.
        over = ((kind, (0,) if kind == "send" else axes) for kind, axes, *_ in point.collectives)
        shape = spaces_of()[point.space].mesh.shape
        terms = {**terms_of_collectives(memory_of_process(cluster, 0.0), over, shape), **terms}
    return device_fit(tensors, terms, cluster.memory_bytes, room, estimated=True)


def all_needs(
    points: Sequence[Point], spaces_of: Callable[[], Sequence[Space]], cluster: Cluster | None
) -> np.ndarray:
    """Return the memory in bytes that each point needs on the smallest device, as :func:`point_needs`."""
    return np.array([point_needs(point, spaces_of, cluster, 0.0).needed_bytes for point in points])
