"""Files that a page offers, made on demand from an exploration of the library; no path comes from outside."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

from dash import Dash
from flask import Response, request

from tensoropt.errors import TensorOptError
from tensoropt.plan import Exploration
from tensoropt.plan.export import write_frontier_csv, write_strategies_csv

from .context import Context
from .page_file import standalone
from .views.detail import NoDetailError, detail_of


def address(key: str, what: str, point: int | None) -> str:
    """Where a file of an exploration is found."""
    return f"/download/{quote(key, safe='')}/{what}?point={point or 0}"


def _plan(exploration: Exploration, point: int) -> str:
    return exploration.plan(point).to_json()


def _written(write: Callable[[Exploration, Path], None], exploration: Exploration) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file.csv"
        write(exploration, path)
        with open(path, encoding="utf-8", newline="") as file:
            return file.read()


def _trace(exploration: Exploration, point: int) -> str:
    return json.dumps(detail_of(exploration, point).trace())


MAKERS: dict[str, tuple[str, Callable[[Exploration, int], str]]] = {
    "plan.json": ("application/json", _plan),
    "frontier.csv": ("text/csv", lambda found, _: _written(write_frontier_csv, found)),
    "strategies.csv": ("text/csv", lambda found, _: _written(write_strategies_csv, found)),
    "frontier.html": ("text/html", standalone),
    "trace.json": ("application/json", _trace),
}
"""Per name: the media type, and what makes the text from an exploration and a point."""


def register(app: Dash, context: Context) -> None:
    """Add the route; unknown names and points are 404, what cannot be made is 409 with the reason."""

    @app.server.get("/download/<key>/<what>")
    def download(key: str, what: str) -> Response:
        point = request.args.get("point", "0")
        if what not in MAKERS or not re.fullmatch(r"[0-9]{1,9}", point):
            return _words(404, "there is no such file")
        try:
            found = context.library.load(key)
        except TensorOptError as error:
            return _words(404, str(error))
        if int(point) >= len(found.all_points):
            count = len(found.all_points)
            return _words(404, f"there is no point {int(point)}; this exploration has {count}")
        media, make = MAKERS[what]
        try:
            text = make(found, int(point))
        except (NoDetailError, TensorOptError) as error:
            return _words(409, str(error))
        headers = {"Content-Disposition": f'attachment; filename="{what}"'}
        return Response(text, mimetype=media, headers=headers)


def _words(status: int, text: str) -> Response:
    return Response(text + "\n", status=status, mimetype="text/plain")
