"""TensorOpt: a multi-objective cost-frontier explorer for distributed training.

``import tensoropt`` is light; what a name needs is imported when the name is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from tensoropt.api import explore
    from tensoropt.capture.onnx import load_onnx
    from tensoropt.execute import parallelize, shutdown
    from tensoropt.plan import Exploration, Plan, load_plan
    from tensoropt.plan import load_exploration as load

_HOMES = {
    "explore": ("tensoropt.api", "explore"),
    "parallelize": ("tensoropt.execute", "parallelize"),
    "shutdown": ("tensoropt.execute", "shutdown"),
    "load": ("tensoropt.plan", "load_exploration"),
    "load_onnx": ("tensoropt.capture.onnx", "load_onnx"),
    "load_plan": ("tensoropt.plan", "load_plan"),
    "Exploration": ("tensoropt.plan", "Exploration"),
    "Plan": ("tensoropt.plan", "Plan"),
}

__all__ = [
    "Exploration",
    "Plan",
    "__version__",
    "explore",
    "load",
    "load_onnx",
    "load_plan",
    "parallelize",
    "shutdown",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tensoropt' has no attribute '{name}'")
    module, attribute = _HOMES[name]
    return getattr(importlib.import_module(module), attribute)
