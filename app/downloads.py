"""Downloads that a page offers, made on demand from an exploration of the library; no path comes from
outside.

One of them is the standalone page: a frontier as a single HTML file (plot and table) that fetches nothing.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from urllib.parse import quote

from dash import Dash
from flask import Response, request

from tensoropt.errors import TensorOptError
from tensoropt.exploration.exploration import Exploration
from tensoropt.exploration.export import write_frontier_csv, write_strategies_csv
from tensoropt.exploration.verified import Verified
from tensoropt.plan.facts_table import Html, filled
from tensoropt.report.detail import detail
from tensoropt.report.sheet import SheetOptions, decision_sheet

from .context import Context
from .figures.frontier import frontier_figure
from .figures.palette import FONT, GRAPH_CONFIG
from .safety import plotly
from .state import View
from .views.export import command_folder
from .views.frontier import FrontierData, amount_in, tariff_of
from .views.point import assumptions
from .views.points_table import table_columns, table_rows

_SHOWN_ROWS = 500
"""The most rows of the table; the plot has every point."""
_TEMPLATE = Path(__file__).with_name("page_file.html")


def _standalone(data: FrontierData, point: int, verified: Sequence[Verified] = ()) -> str:
    """Return the whole file as text, with the given point marked."""
    view = View(exploration="file", point=point, lines=True)
    title = f"{data.model} on {data.exploration.cluster['name']}"
    # A name that contains `</script>` would end the script that it stands in.
    figure = json.dumps(frontier_figure(data, view, "light", thinned=False)).replace("<", "\\u003c")
    table = table_columns(data, view)
    size, time = data.units.memory.name, data.units.time.name
    columns = {
        "point": "point", "memory": f"memory, {size}", "time": f"time, {time}", "compute": f"compute, {time}",
        "network": f"network, {time}", "mesh": "mesh", "micro": "micro-batches", "gap": "proof",
        "name": "plan", "is": "what it is",
    }  # fmt: skip
    # Evenly thinned rather than cut off, so that the table covers the whole frontier.
    step = max(1, -(-len(data) // _SHOWN_ROWS))
    rows = table_rows(table, range(0, len(data), step))
    cells = [["" if row[name] is None else row[name] for name in columns] for row in rows]
    return filled(
        _TEMPLATE,
        title=title,
        font=Html(FONT),
        plotly=Html(plotly()),
        figure=Html(figure),
        config=Html(json.dumps(GRAPH_CONFIG)),
        thinned=Html(f"<p>Every {step}th of {len(data):,} points is listed." if step > 1 else ""),
        head=_joined("<th scope=col>", columns.values()),
        body=Html("".join("<tr>" + _joined("<td>", row) for row in cells)),
        said=_joined("<li>", (f"{f.name}: {f.words}" for f in assumptions(data, view, verified))),
    )


def _joined(tag: str, texts: Iterable[object]) -> Html:
    return Html("".join(tag + escape(str(text)) for text in texts))


def address(key: str, name: str, point: int | None, view: View | None = None) -> str:
    """Return the address of a file of an exploration; with a view, the address also has its limits and its
    money settings."""
    path = f"/download/{quote(key, safe='')}/{name}?point={(point or 0) + 1}"
    if view is None:
        return path
    limits = View(
        budget_bytes=view.budget_bytes, headroom=view.headroom, price=view.price, prices=view.prices,
        currency=view.currency, amount=view.amount,
    ).to_query()  # fmt: skip
    return f"{path}&{limits}" if limits else path


@dataclass(frozen=True)
class _Query:
    """The input of a download; ``model``: people's name for the model; ``view``: limits and price;
    ``folder``: the exploration's folder in commands."""

    exploration: Exploration
    model: str
    point: int
    verified: tuple[Verified, ...]
    view: View
    folder: str


def _plan(query: _Query) -> str:
    return query.exploration.plan(query.point).to_json()


def _written(write: Callable[[Exploration, Path], None]) -> Callable[[_Query], str]:
    def make(query: _Query) -> str:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "file.csv"
            write(query.exploration, path)
            # CSV has its own line ends, which must not be translated.
            with open(path, encoding="utf-8", newline="") as file:
                return file.read()

    return make


def _page(query: _Query) -> str:
    return _standalone(FrontierData.of(query.exploration, query.model), query.point, query.verified)


def _sheet(query: _Query) -> str:
    view = query.view
    try:
        point_detail = detail(query.exploration, query.point)
    except TensorOptError:
        point_detail = None  # the sheet leaves out what only the saved costs say
    options = SheetOptions(
        model=query.model,
        folder=query.folder,
        memory_bytes=view.budget_bytes,
        headroom=view.headroom,
        tariff=tariff_of(view),
        amount=amount_in(view),
        verified=query.verified,
        detail=point_detail,
    )
    return decision_sheet(query.exploration, query.point, options)


def _trace(query: _Query) -> str:
    return json.dumps(detail(query.exploration, query.point).trace())


def _cluster(query: _Query) -> str:
    return json.dumps(dict(query.exploration.cluster), indent=1) + "\n"


def _constraints(query: _Query) -> str:
    constraints = query.exploration.settings.get("constraints")
    if not constraints:
        raise TensorOptError("this exploration was made without constraints")
    return json.dumps(constraints, indent=1) + "\n"


_MAKERS: dict[str, tuple[str, Callable[[_Query], str]]] = {
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
    """Add the route: unknown names and points give 404, downloads that cannot be made give 409 with the
    reason."""

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
            folder = command_folder(context.library.entry(key))
            verified = context.library.verified(key)
            text = make(_Query(exploration, model, int(point) - 1, verified, view, folder))
        except TensorOptError as error:
            return _words(409, str(error))
        headers = {"Content-Disposition": f'attachment; filename="{name}"'}
        return Response(text, mimetype=media, headers=headers)


def _words(status: int, text: str) -> Response:
    return Response(text + "\n", status=status, mimetype="text/plain")
