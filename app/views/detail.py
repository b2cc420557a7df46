"""The details of one point's plan: from :mod:`tensoropt.report.detail`, if they are known."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tensoropt.errors import TensorOptError
from tensoropt.plan import Exploration
from tensoropt.simulate.recording import MEMORY_KINDS


class NoDetailError(TensorOptError):
    """An exploration that was saved without the data from which its points' details are made."""


def detail_of(exploration: Exploration, point: int) -> Any:
    """Return operators, reshardings, timeline, memory curve and breakdown of one point.

    Raises:
        NoDetailError: this exploration does not hold what that needs; the message says so.
    """
    try:
        module = importlib.import_module("tensoropt.report.detail")
    except ModuleNotFoundError as error:
        raise NoDetailError("the details of a plan are not part of this version") from error
    return module.detail(exploration, point)


@dataclass(frozen=True)
class GraphEdge:
    """The tensors that go from one operator group to another.

    Attributes:
        tensors: name -> (bytes of the whole tensor, its shape and dtype in words).
    """

    source: str
    target: str
    resharded: bool = False
    tensors: Mapping[str, tuple[int, str]] = field(default_factory=dict)


def graph_edges(exploration: Exploration, detail: Any) -> list[GraphEdge]:
    """Return every edge between groups; none for explorations without their graph."""
    recorded = getattr(exploration, "recorded", None)
    if recorded is None:
        return []
    resharded = (
        {(e.producer, e.consumer) for e in detail.edges if e.bytes > 0} if detail is not None else set()
    )
    grouped = recorded.grouped
    graph, group_of = grouped.atoms.graph, grouped.group_of
    producer = graph.producer
    found: dict[tuple[str, str], dict[str, tuple[int, str]]] = {}
    for group in grouped.groups:
        for op in group.operators:
            for tensor in op.inputs():
                maker = producer.get(tensor)
                if maker is not None and group_of[maker.name].name != group.name:
                    pair = (group_of[maker.name].name, group.name)
                    of = graph.tensors[tensor]
                    words = f"{tensor} [{', '.join(map(str, of.shape))}] {of.dtype}"
                    found.setdefault(pair, {})[tensor] = (of.bytes, words)
    return [GraphEdge(a, b, (a, b) in resharded, tensors) for (a, b), tensors in found.items()]


def curve_of(detail: Any) -> tuple[list[float], dict[str, list[float]]]:
    """Return (moments in seconds, bytes by kind at each) of a step's memory."""
    kinds = {kind: [getattr(at, kind) for at in detail.memory_curve] for kind in MEMORY_KINDS}
    return [at.time_s for at in detail.memory_curve], kinds
