"""What plans need of a device: of one point with its parts, and of a whole table as a column."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tensoropt.cluster import Cluster
from tensoropt.costs.device_fit import DeviceFit, device_fit, needed_bytes, process_parts
from tensoropt.costs.process_memory import CONSTANTS, CONTEXT, TERMS, memory_of_process, terms_of_collectives
from tensoropt.plan.figures import BREAKDOWNS
from tensoropt.plan.point import Point
from tensoropt.plan.point_table import SENT, PointTable
from tensoropt.plan.space import Space

_Sent = Sequence[tuple[str, tuple[int, ...]]]


def device_of(cluster: Mapping[str, Any]) -> Cluster | None:
    """Return the cluster of a saved one; None if its devices were not saved."""
    return Cluster.from_dict(cluster) if cluster.get("devices") else None


def point_needs(point: Point, space: Space, cluster: Cluster, room: float) -> DeviceFit:
    """Return what a point needs of the smallest device, beside a part of its memory.

    Where its memory counts tensors alone, what its process takes is estimated from what it sends.
    """
    terms, tensors = point.terms, point.memory_bytes - sum(point.terms.values())
    if CONTEXT not in terms:
        sent = tuple((kind, axes) for kind, axes, *_ in point.collectives)
        terms = {**_estimated(cluster, sent, space), **terms}
    is_gpu = cluster.device_type == "cuda"
    return device_fit(tensors, terms, cluster.memory_bytes, room, estimated=is_gpu)


def all_needs(
    table: PointTable, spaces_of: Callable[[], Sequence[Space]], cluster: Cluster | None
) -> np.ndarray:
    """Return what each point of a table needs of the smallest device, in bytes, as :func:`point_needs`.

    Args:
        spaces_of: returns the spaces of the points; called only where what a process takes is estimated.
    """
    terms = {name: table.column(column) for name, column in BREAKDOWNS["terms"].items()}
    tensors = table.column("memory_bytes") - sum(terms.values()) + terms[CONSTANTS]
    if cluster is None or cluster.device_type != "cuda":
        return needed_bytes(tensors, {})
    (rows,) = np.nonzero(terms[CONTEXT] == 0.0)
    if len(rows):
        terms = {name: column.copy() for name, column in terms.items()}
        sent, of_space = table.column(SENT)[rows].tolist(), table.column("space")[rows].tolist()
        keys = list(zip(of_space, sent, strict=True))
        # Points differ little in what they send.
        spaces = spaces_of()
        known = {key: _estimated(cluster, key[1], spaces[key[0]]) for key in dict.fromkeys(keys)}
        for name in TERMS:
            if name != CONSTANTS:
                terms[name][rows] = [known[key].get(name, 0.0) for key in keys]
    return needed_bytes(tensors, process_parts(tensors, terms, cluster.memory_bytes))


def _estimated(cluster: Cluster, sent: _Sent, space: Space) -> dict[str, float]:
    # Of a message its two ranks are known, which follow one another on the first axis.
    over = ((kind, (0,) if kind == "send" else axes) for kind, axes in sent)
    return terms_of_collectives(memory_of_process(cluster, 0.0), over, space.mesh.shape)
