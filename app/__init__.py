"""The dashboard: frontiers, the selected point, the reasons for its costs, and its plan as files.

The folder is ``app``, installed as ``tensoropt_app``; imports inside it are therefore relative. It builds on
:mod:`tensoropt`, which does not depend on it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .library import Library
    from .server import create_app, serve

_MODULE_OF = {"Library": ".library", "create_app": ".server", "serve": ".server"}

__all__ = ["Library", "create_app", "serve"]


# Imported at first use: a job's own process imports this package too, and needs neither Dash nor Plotly.
def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(importlib.import_module(_MODULE_OF[name], __name__), name)
