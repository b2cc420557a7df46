"""Solvers that planners use and that not everybody has installed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tensoropt.errors import import_extra

if TYPE_CHECKING:
    pass


def cp_sat(name: str) -> Any:
    """Return the module of OR-tools' CP-SAT, for the planner ``name``.

    Raises:
        MissingExtraError: OR-tools is not installed.
    """
    return import_extra("ortools.sat.python.cp_model", "solvers", f"the planner {name}")
