"""Plans and explorations: what was found, choosing from it, and the files that keep it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensoropt.plan.exploration import Exploration, load_exploration
    from tensoropt.plan.model_source import LoadedModel, load_model
    from tensoropt.plan.plan import Plan, load_plan
    from tensoropt.plan.point import Point
    from tensoropt.plan.space import Space

_MODULE_OF = {
    "Exploration": "exploration",
    "LoadedModel": "model_source",
    "Plan": "plan",
    "Point": "point",
    "Space": "space",
    "load_exploration": "exploration",
    "load_model": "model_source",
    "load_plan": "plan",
}
"""The module that each name is imported from when it is first used: the command line needs the settings to
say what it takes, and must not wait for NumPy."""

__all__ = [
    "Exploration",
    "LoadedModel",
    "Plan",
    "Point",
    "Space",
    "load_exploration",
    "load_model",
    "load_plan",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'tensoropt.plan' has no attribute '{name}'")
    importlib.import_module("tensoropt.plan.facts")  # by which they are shown
    return getattr(importlib.import_module(f"tensoropt.plan.{_MODULE_OF[name]}"), name)
