"""The plot of a frontier without a server: in a notebook's output, and on a standalone page.

Both are HTML that loads nothing: it contains the figure as data (``standalone.html``), and once per page
Plotly, compressed. Both adapt to light or dark and to the window's width.
"""

from __future__ import annotations

import base64
import gzip
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

from tensoropt.exploration.answer import answer
from tensoropt.exploration.exploration import Exploration
from tensoropt.exploration.verified import Verified
from tensoropt.plan.facts_table import Html, facts_rows, filled, table_html
from tensoropt.plan.plan_names import planner_title
from tensoropt.version import __version__

from .figures.frontier import BUDGET, frontier_figure
from .figures.palette import DARK, FONT, GRAPH_CONFIG, LIGHT, Palette
from .figures.traces import Json
from .state import View
from .views.frontier import FrontierData
from .views.point import assumptions, point_card
from .views.result import baseline_rows
from .views.units import digits

_SHOWN_ROWS = 500
"""Maximum number of rows of a page's table; the plot has every point."""
_PLOT, _PAGE = (Path(__file__).with_name(name) for name in ("standalone.html", "page_file.html"))
_PLOTLY = Path(__file__).parent / "vendored" / "plotly-basic.min.js"
_carriers: dict[int, str] = {}
"""The cell whose output contains Plotly, by IPython instance."""


def plotly() -> str:
    """Return Plotly's script, limited to lines, markers and bars, which suffice here.

    The script is ``plotly-basic.min.js`` 4.1.1 from npm's ``plotly.js-basic-dist-min``, MIT licence. Dash's
    full script is four times as long: half a second of a first load, and most of an exported page.
    """
    return _PLOTLY.read_text(encoding="utf-8")


@cache
def _packed() -> str:
    return base64.b64encode(gzip.compress(plotly().encode(), 9)).decode()


def notebook_plot(exploration: Exploration, picture: str) -> Html:
    """Return the plot for a notebook cell's output, with the recommended plan selected.

    The first plot of a kernel contains Plotly for all others (0.5 MB).

    Args:
        picture: HTML shown where scripts do not run.
    """
    return _plot(*_answered(exploration), Html(picture), carries=_carries())


def figure(exploration: Exploration) -> Json:
    """Return a notebook's plot as the data of a Plotly figure."""
    return _drawn(*_answered(exploration))


def _answered(exploration: Exploration) -> tuple[FrontierData, View]:
    data, row = FrontierData.of(exploration), answer(exploration).row
    return data, View("notebook", point=row, whole=True)


def _carries() -> bool:
    """Return whether an output must contain Plotly: a notebook's first cell with a plot, or no notebook."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if shell is None or not hasattr(shell, "get_parent") or "google.colab" in sys.modules:
        return True
    request = shell.get_parent()
    cell = request.get("metadata", {}).get("cellId") or request.get("header", {}).get("msg_id", "")
    return _carriers.setdefault(id(shell), cell) == cell


def _plot(data: FrontierData, view: View, picture: Html, *, carries: bool) -> Html:
    wide, narrow = (_drawn(data, view, narrow=narrow) for narrow in (False, True))
    told = {
        "wide": wide,
        "narrow": {
            "data": [_other(*traces) for traces in zip(wide["data"], narrow["data"], strict=True)],
            "layout": _other(wide["layout"], narrow["layout"]),
        },
        "dark": dict(zip(_colours(LIGHT), _colours(DARK), strict=True)),
        "config": GRAPH_CONFIG,
    }
    text = json.dumps(told, separators=(",", ":"))
    carried = f'<script type="text/plain" class="tensoropt-plotly">{_packed()}</script>' if carries else ""
    # In an attribute with single quotes, escaped to be well-formed XML, too.
    figure = Html(text.replace("&", "&amp;").replace("<", "&lt;").replace("'", "&#39;"))
    return Html(filled(_PLOT, title=data.model, figure=figure, picture=picture, carried=Html(carried)))


def _drawn(data: FrontierData, view: View, *, narrow: bool = False) -> Json:
    drawn = frontier_figure(data, view, data.answer(view), "light", narrow=narrow)
    # Nothing can be dragged here.
    drawn["layout"]["annotations"][BUDGET].pop("captureevents")
    return drawn


def _other(wide: Json, narrow: Json) -> Json:
    return {key: value for key, value in narrow.items() if value != wide.get(key)}


def _colours(palette: Palette) -> list[str]:
    return re.findall(r"#[0-9a-f]{6}|rgba\([^)]*\)", json.dumps(asdict(palette)))


def frontier_page(data: FrontierData, view: View, verified: Sequence[Verified] = ()) -> str:
    """Return a page that needs no server: the answer, the plot with the view's point and budget, the point's
    facts, usual strategies, all points and the assumptions."""
    found = data.answer(view)
    row = data.chosen(view, found)
    view = replace(view, exploration="file", point=row, whole=True)
    card = point_card(data, view, row, verified)
    size, time = data.units.memory.name, data.units.time.name
    columns = ["point", f"needs, {size}", f"time, {time}", "found by", "plan"]
    # Evenly thinned, not cut off, to cover the whole frontier; always with the selected point.
    step = max(1, -(-len(data) // _SHOWN_ROWS))
    listed = sorted({*range(0, len(data), step), row})
    points = [
        (
            f"{one + 1:,}{' ◂ chosen' if one == row else ''}",
            digits(data.units.memory.of(float(data.needs[one]))),
            digits(data.units.time.of(float(data.time[one]))),
            planner_title(data.planner[one]),
            data.exploration.names[one],
        )
        for one in listed
    ]
    return filled(
        _PAGE,
        title=f"{data.model} on {data.exploration.cluster['name']}",
        font=Html(FONT),
        **asdict(LIGHT),
        **{f"dark_{name}": colour for name, colour in asdict(DARK).items()},
        made=f"Made by TensorOpt {__version__}.",
        answer=found.sentence(),
        plot=_plot(data, view, Html(), carries=True),
        point=data.exploration.title(row),
        name=card.name,
        costs=f"{card.memory} per device, {card.time} per step",
        verdict=card.verdict,
        facts=facts_rows(card.facts),
        baselines=table_html(
            [("baseline", "plan", "memory", "time", "beside the answer"), *baseline_rows(data, found)],
            (0, 1, 4),
        ),
        thinned=Html(f"<p>Every {step}th of {len(data):,} is listed.</p>" if step > 1 else ""),
        points=table_html([columns, *points], left=(3, 4)),
        said=facts_rows(assumptions(data, view, verified)),
    )
