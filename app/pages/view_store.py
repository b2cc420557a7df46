"""The form in which a page keeps the view in its store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from dash.exceptions import PreventUpdate

from ..context import Context
from ..state import View
from ..views.frontier import FrontierData

_DEFAULTS = asdict(View())


def stored(view: View) -> dict[str, Any]:
    """Return a view for the store ``state``; the browser leaves what equals the defaults out of the URL."""
    return {"view": view.to_data(), "defaults": _DEFAULTS}


def view_of(data: Any) -> View:
    """Return the view in the store ``state`` or ``pick``."""
    return View.from_data(data.get("view", data)) if isinstance(data, Mapping) else View()


def shown_point(context: Context, pick: Any, page: Any, name: str) -> tuple[FrontierData | None, View]:
    """Return the frontier and the view for page ``name``; None while another is shown, or without such a
    point."""
    view = view_of(pick)
    data = context.frontier(view) if page == name else None
    if data is None or view.point is None or view.point >= len(data):
        return None, view
    return data, view


def point_shown(context: Context, pick: Any, page: Any, name: str) -> tuple[FrontierData, View, int]:
    """Return the frontier, the view and its point for page ``name``.

    Raises:
        PreventUpdate: another page is shown, or there is no such point: nothing on the page changes.
    """
    data, view = shown_point(context, pick, page, name)
    if data is None or view.point is None:
        raise PreventUpdate
    return data, view, view.point
