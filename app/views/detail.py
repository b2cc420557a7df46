"""All there is to say about one point's plan: from :mod:`tensoropt.report.detail`, where it is known."""

from __future__ import annotations

import importlib
from typing import Any

from tensoropt.errors import TensorOptError
from tensoropt.plan import Exploration
from tensoropt.simulate.recording import MEMORY_KINDS


class NoDetailError(TensorOptError):
    """An exploration that was saved without what its points' details are made from."""


def detail_of(exploration: Exploration, point: int) -> Any:
    """Operators, reshardings, timeline, memory curve and breakdown of one point.

    Raises:
        NoDetailError: this exploration does not hold what that needs; says so.
    """
    try:
        module = importlib.import_module("tensoropt.report.detail")
    except ModuleNotFoundError as error:
        raise NoDetailError("the details of a plan are not part of this version") from error
    return module.detail(exploration, point)


def graph_edges(exploration: Exploration, detail: Any) -> list[tuple[str, str, bool]]:
    """(from group, to group, whether the tensor is resharded on the way) of every edge between groups.

    Explorations without their graph know no edges.
    """
    recorded = getattr(exploration, "recorded", None)
    if recorded is None:
        return []
    resharded = (
        {(e.producer, e.consumer) for e in detail.edges if e.bytes > 0} if detail is not None else set()
    )
    grouped = recorded.grouped
    producer, group_of = grouped.atoms.graph.producer, grouped.group_of
    found: dict[tuple[str, str], bool] = {}
    for group in grouped.groups:
        for op in group.operators:
            for tensor in op.inputs():
                maker = producer.get(tensor)
                if maker is not None and group_of[maker.name].name != group.name:
                    pair = (group_of[maker.name].name, group.name)
                    found[pair] = pair in resharded
    return [(a, b, r) for (a, b), r in found.items()]


def curve_of(detail: Any) -> tuple[list[float], dict[str, list[float]]]:
    """(moments in seconds, bytes per kind at each) of a step's memory."""
    kinds = {kind: [getattr(at, kind) for at in detail.memory_curve] for kind in MEMORY_KINDS}
    return [at.time_s for at in detail.memory_curve], kinds
