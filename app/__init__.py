"""The dashboard: look at frontiers, pick a point, see why it costs what it costs, take the plan along.

The folder is ``app``; it is installed as ``tensoropt_app``, so imports inside it are relative. It sits on
top of :mod:`tensoropt` and nothing there knows of it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .library import Library
    from .server import create_app, serve

_MODULE_OF = {"Library": ".library", "create_app": ".server", "serve": ".server"}

__all__ = ["Library", "create_app", "serve"]


# Imported when first used: a job's own process imports this package too, and needs neither Dash nor Plotly.
def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(importlib.import_module(_MODULE_OF[name], __name__), name)
