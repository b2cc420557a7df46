"""The view as a page keeps it in its store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ..state import View

DEFAULTS = asdict(View())


def stored(view: View) -> dict[str, Any]:
    """For the store ``state``; the browser leaves what equals the defaults out of the URL."""
    return {"view": view.to_data(), "defaults": DEFAULTS}


def view_of(data: Any) -> View:
    """From the store ``state`` or ``pick``."""
    return View.from_data(data.get("view", data)) if isinstance(data, Mapping) else View()
