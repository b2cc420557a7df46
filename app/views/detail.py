"""Everything there is to say about one point's plan: from :mod:`tensoropt.plan.detail`, where it is known."""

from __future__ import annotations

import importlib
from typing import Any

from tensoropt.errors import TensorOptError
from tensoropt.plan import Exploration


class NoDetailError(TensorOptError):
    """An exploration that was saved without what its points' details are made from."""


def detail_of(exploration: Exploration, point: int) -> Any:
    """Operators, reshardings, timeline, memory curve and breakdown of one point.

    Raises:
        NoDetailError: this exploration does not hold what that needs; says so.
    """
    try:
        module = importlib.import_module("tensoropt.plan.detail")
    except ModuleNotFoundError as error:
        raise NoDetailError("the details of a plan are not part of this version") from error
    return module.detail(exploration, point)


def graph_edges(exploration: Exploration, detail: Any) -> list[tuple[str, str, bool]]:
    """(from group, to group, whether the tensor is resharded on the way) of every edge between groups.

    Explorations without details know no edges.
    """
    return [] if detail is None else [(e.source, e.target, e.bytes > 0) for e in detail.edges]
