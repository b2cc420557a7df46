"""The details of one point's plan (:mod:`tensoropt.report.detail`), as pictures need them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tensoropt.plan import Exploration
from tensoropt.simulate.recording import MEMORY_KINDS


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
