"""Downloads, made on demand from an exploration of the library; no path comes from outside."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from dash import Dash
from flask import Response, request

from tensoropt.errors import TensorOptError
from tensoropt.exploration.exploration import Exploration
from tensoropt.exploration.export import write_frontier_csv, write_strategies_csv
from tensoropt.exploration.verified import Verified
from tensoropt.report.detail import detail

from .context import Context
from .standalone import frontier_page
from .state import View
from .views.frontier import FrontierData


def address(key: str, name: str, point: int | None, view: View | None = None) -> str:
    """Return the download URL of an exploration's file, with the view's limits, price and training length."""
    path = f"/download/{quote(key, safe='')}/{name}?point={(point or 0) + 1}"
    if view is None:
        return path
    limits = View(
        budget_bytes=view.budget_bytes, headroom=view.headroom, price=view.price, amount=view.amount
    ).to_query()
    return f"{path}&{limits}" if limits else path


@dataclass(frozen=True)
class _Query:
    """The data of a requested download. ``model``: the display name; ``view``: memory limit and price."""

    exploration: Exploration
    model: str
    point: int
    verified: tuple[Verified, ...]
    view: View


def _csv(write: Callable[[Any, Path], None], explorations: Exploration | Mapping[str, Exploration]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file.csv"
        write(explorations, path)
        return path.read_bytes()


def _page(query: _Query) -> str:
    view = replace(query.view, point=query.point)
    return frontier_page(FrontierData.of(query.exploration, query.model), view, query.verified)


def _trace(query: _Query) -> str:
    return json.dumps(detail(query.exploration, query.point).trace())


def _plain(data: Mapping[str, Any]) -> str:
    return json.dumps(data, indent=1) + "\n"


def _constraints(query: _Query) -> str:
    constraints = query.exploration.settings.get("constraints")
    if not constraints:
        raise TensorOptError("this exploration was made without constraints")
    return _plain(constraints)


_MAKERS: dict[str, tuple[str, Callable[[_Query], str | bytes]]] = {
    "plan.json": ("application/json", lambda query: query.exploration.plan(query.point).to_json()),
    "frontier.csv": ("text/csv", lambda query: _csv(write_frontier_csv, query.exploration)),
    "strategies.csv": ("text/csv", lambda query: _csv(write_strategies_csv, query.exploration)),
    "frontier.html": ("text/html", _page),
    "trace.json": ("application/json", _trace),
    "cluster.json": ("application/json", lambda query: _plain(query.exploration.cluster)),
    "constraints.json": ("application/json", _constraints),
}
"""The media type, and the function that makes the content, by file name."""


def register(app: Dash, context: Context) -> None:
    """Add the download routes: 404 for unknown names and points, 409 with the reason for impossible files."""

    @app.server.get("/download/<key>/<name>")
    def download(key: str, name: str) -> Response:
        point = request.args.get("point", "1")
        if name not in _MAKERS or not re.fullmatch(r"[0-9]{1,9}", point):
            return _words(404, "there is no such file")
        try:
            exploration = context.library.load(key)
        except TensorOptError as error:
            return _words(404, str(error))
        if not 1 <= int(point) <= len(exploration.all_points):
            count = len(exploration.points)
            return _words(404, f"there is no point {int(point)}; this exploration has {count}")
        media, make = _MAKERS[name]
        try:
            model = context.library.model_name(exploration.model.source)
            view = View.from_query(request.query_string.decode("ascii", "replace"))
            verified = context.library.verified(key)
            text = make(_Query(exploration, model, int(point) - 1, verified, view))
        except TensorOptError as error:
            return _words(409, str(error))
        headers = {"Content-Disposition": f'attachment; filename="{name}"'}
        return Response(text, mimetype=media, headers=headers)

    @app.server.get("/download/several/<names>")
    def several(names: str) -> Response:
        found: dict[str, Exploration] = {}
        for key in View.from_query(f"beside={quote(names, safe=',')}").beside:
            try:
                found[key] = context.library.load(key)
            except TensorOptError as error:
                return _words(404, str(error))
        text = _csv(write_frontier_csv, found)
        headers = {"Content-Disposition": 'attachment; filename="frontiers.csv"'}
        return Response(text, mimetype="text/csv", headers=headers)


def _words(status: int, text: str) -> Response:
    return Response(text + "\n", status=status, mimetype="text/plain")
