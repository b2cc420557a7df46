"""The frontier as a single HTML file for people without a server: plot and table, nothing fetched."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from tensoropt.plan.facts_table import Html, filled
from tensoropt.plan.verified import Verified

from .delivery import plotly
from .figures.frontier import frontier_figure
from .figures.palette import FONT, GRAPH_CONFIG
from .state import View
from .views.assumptions import assumptions
from .views.frontier import FrontierData
from .views.points_table import table_columns, table_rows

SHOWN_ROWS = 500
"""The most rows of the table; the plot has every point."""
TEMPLATE = Path(__file__).with_suffix(".html")


def standalone(data: FrontierData, point: int, verified: Sequence[Verified] = ()) -> str:
    """Return the whole file as text, with the given point marked."""
    view = View(exploration="file", point=point, lines=True)
    title = f"{data.model} on {data.exploration.cluster['name']}"
    # A name that contains `</script>` would end the script that it stands in.
    figure = json.dumps(frontier_figure(data, view, "light", thinned=False)).replace("</", "<\\/")
    table = table_columns(data, view)
    size, time = data.units.memory.name, data.units.time.name
    columns = {
        "point": "point", "memory": f"memory, {size}", "time": f"time, {time}", "compute": f"compute, {time}",
        "network": f"network, {time}", "mesh": "mesh", "micro": "micro-batches", "gap": "proof",
        "planner": "planner", "name": "plan",
    }  # fmt: skip
    # Evenly thinned rather than cut off, so that the table covers the whole frontier.
    step = max(1, -(-len(data) // SHOWN_ROWS))
    rows = table_rows(table, range(0, len(data), step))
    cells = [["" if row[name] is None else row[name] for name in columns] for row in rows]
    return filled(
        TEMPLATE,
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
