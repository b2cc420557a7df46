"""The frontier as a single HTML file for people without a server: plot and table, nothing fetched."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape

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
STYLE = f"""
body {{ font: 14px/1.5 {FONT}; color: #1b2733; margin: 24px auto; max-width: 1100px; padding: 0 16px;
  font-variant-numeric: tabular-nums; }}
table {{ border-collapse: collapse; font-size: 13px; margin-top: 16px; }}
td, th {{ text-align: right; padding: 3px 10px; border-bottom: 1px solid #d9e0e6; }}
#plot {{ height: 480px; }}
"""


def standalone(data: FrontierData, point: int, verified: Sequence[Verified] = ()) -> str:
    """Return the whole file as text, with the given point marked."""
    view = View(exploration="file", point=point, lines=True)
    title = f"{data.model} on {data.exploration.cluster['name']}"
    # A name that contains `</script>` would end the script that it stands in.
    figure = json.dumps(frontier_figure(data, view, "light", thinned=False)).replace("</", "<\\/")
    config = json.dumps(GRAPH_CONFIG)
    table = table_columns(data, view)
    size, time = data.units.memory.name, data.units.time.name
    columns = {
        "point": "point", "memory": f"memory, {size}", "time": f"time, {time}", "compute": f"compute, {time}",
        "network": f"network, {time}", "mesh": "mesh", "micro": "micro-batches", "gap": "proof",
        "planner": "planner", "name": "plan",
    }  # fmt: skip
    head = "".join(f"<th scope=col>{escape(text)}" for text in columns.values())
    # Evenly thinned rather than cut off, so that the table covers the whole frontier.
    step = max(1, -(-len(data) // SHOWN_ROWS))
    body = "".join(
        "<tr>" + "".join(f"<td>{escape('' if row[name] is None else str(row[name]))}" for name in columns)
        for row in table_rows(table, range(0, len(data), step))
    )
    said = "".join(f"<li>{escape(f.label)}: {escape(f.value)}" for f in assumptions(data, view, verified))
    thinned = f"<p>Every {step}th of {len(data):,} points is listed." if step > 1 else ""
    return (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        f"<title>{escape(title)}</title><style>{STYLE}</style>"
        f"<h1>{escape(title)}</h1><div id=plot></div><script>{plotly()}</script>"
        f"<script>const f={figure};Plotly.newPlot('plot',f.data,f.layout,{config})</script>"
        f"{thinned}<table><thead><tr>{head}</thead><tbody>{body}</tbody></table>"
        f"<h2>Assumptions in effect</h2><ul>{said}</ul></html>\n"
    )
