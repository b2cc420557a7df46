"""The dashboard: it shows frontiers, a selected plan and why it costs what it costs, and exports plans.

The folder ``app`` is installed as ``tensoropt_app``, so its imports are relative. It depends on
:mod:`tensoropt`, never the reverse.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .library import Library
    from .server import create_app, serve

_MODULE_OF = {"Library": ".library", "create_app": ".server", "serve": ".server"}

__all__ = ["Library", "create_app", "serve"]


# Imported on use: a job's process also imports this package, and needs neither Dash nor Plotly.
def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(importlib.import_module(_MODULE_OF[name], __name__), name)
