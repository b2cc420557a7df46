"""Files that a page offers, made on demand from an exploration of the library; no path comes from outside."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from dash import Dash
from flask import Response, request

from tensoropt.errors import TensorOptError
from tensoropt.plan import Exploration
from tensoropt.plan.export import write_frontier_csv, write_strategies_csv
from tensoropt.plan.verified import Verified
from tensoropt.report.detail import detail
from tensoropt.report.sheet import SheetOptions, decision_sheet

from .context import Context
from .page_file import standalone
from .state import View
from .views.export import command_folder
from .views.frontier import FrontierData
from .views.rates import amount_in, tariff_of


def address(key: str, what: str, point: int | None, view: View | None = None) -> str:
    """Return the address of a file of an exploration; with a view, the address also has its limits and its
    money settings."""
    found = f"/download/{quote(key, safe='')}/{what}?point={(point or 0) + 1}"
    if view is None:
        return found
    limits = View(
        budget_bytes=view.budget_bytes, headroom=view.headroom, price=view.price, prices=view.prices,
        currency=view.currency, amount=view.amount,
    ).to_query()  # fmt: skip
    return f"{found}&{limits}" if limits else found


@dataclass(frozen=True)
class Asked:
    """The inputs of a file; ``model``: what people call the model; ``view``: limits and price; ``folder``:
    what commands call the exploration's folder."""

    exploration: Exploration
    model: str
    point: int
    verified: tuple[Verified, ...]
    view: View
    folder: str


def _plan(asked: Asked) -> str:
    return asked.exploration.plan(asked.point).to_json()


def _written(write: Callable[[Exploration, Path], None]) -> Callable[[Asked], str]:
    def make(asked: Asked) -> str:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "file.csv"
            write(asked.exploration, path)
            # CSV has its own line ends, which must not be translated.
            with open(path, encoding="utf-8", newline="") as file:
                return file.read()

    return make


def _page(asked: Asked) -> str:
    return standalone(FrontierData.of(asked.exploration, asked.model), asked.point, asked.verified)


def _sheet(asked: Asked) -> str:
    view = asked.view
    try:
        known = detail(asked.exploration, asked.point)
    except TensorOptError:
        known = None  # the sheet leaves out what only the saved costs say
    options = SheetOptions(
        model=asked.model,
        folder=asked.folder,
        memory_bytes=view.budget_bytes,
        headroom=view.headroom,
        tariff=tariff_of(view),
        amount=amount_in(view),
        verified=asked.verified,
        detail=known,
    )
    return decision_sheet(asked.exploration, asked.point, options)


def _trace(asked: Asked) -> str:
    return json.dumps(detail(asked.exploration, asked.point).trace())


def _cluster(asked: Asked) -> str:
    return json.dumps(dict(asked.exploration.cluster), indent=1) + "\n"


def _constraints(asked: Asked) -> str:
    found = asked.exploration.settings.get("constraints")
    if not found:
        raise TensorOptError("this exploration was made without constraints")
    return json.dumps(found, indent=1) + "\n"


MAKERS: dict[str, tuple[str, Callable[[Asked], str]]] = {
    "plan.json": ("application/json", _plan),
    "frontier.csv": ("text/csv", _written(write_frontier_csv)),
    "strategies.csv": ("text/csv", _written(write_strategies_csv)),
    "frontier.html": ("text/html", _page),
    "decision.html": ("text/html", _sheet),
    "trace.json": ("application/json", _trace),
    "cluster.json": ("application/json", _cluster),
    "constraints.json": ("application/json", _constraints),
}
"""For each name, the media type, and the function that makes the text."""


def register(app: Dash, context: Context) -> None:
    """Add the route; unknown names and points are 404, what cannot be made is 409 with the reason."""

    @app.server.get("/download/<key>/<what>")
    def download(key: str, what: str) -> Response:
        point = request.args.get("point", "1")
        if what not in MAKERS or not re.fullmatch(r"[0-9]{1,9}", point):
            return _words(404, "there is no such file")
        try:
            found = context.library.load(key)
        except TensorOptError as error:
            return _words(404, str(error))
        if not 1 <= int(point) <= len(found.all_points):
            count = len(found.points)
            return _words(404, f"there is no point {int(point)}; this exploration has {count}")
        media, make = MAKERS[what]
        try:
            model = context.library.model_name(found.model.source)
            view = View.from_query(request.query_string.decode("ascii", "replace"))
            folder = command_folder(context.library.entry(key))
            verified = context.library.verified(key)
            text = make(Asked(found, model, int(point) - 1, verified, view, folder))
        except TensorOptError as error:
            return _words(409, str(error))
        headers = {"Content-Disposition": f'attachment; filename="{what}"'}
        return Response(text, mimetype=media, headers=headers)


def _words(status: int, text: str) -> Response:
    return Response(text + "\n", status=status, mimetype="text/plain")
