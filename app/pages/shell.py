"""The frame of every page: the header, the choice of exploration, the theme, and the state in the URL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dash_mantine_components as dmc
from dash import Dash, dcc, html, no_update

from ..context import Context
from ..state import PAGES
from . import explore, export, fit, frontier, plan, runs
from .parts import aria, button, stores
from .wiring import Callbacks

CALLBACKS = Callbacks()

_DARK_SCALE = (
    "#e6ecf2", "#a3b1bf", "#8795a3", "#5d6b78", "#43505d", "#34414e", "#26313c", "#1a222b", "#151c23",
    "#11171d",
)  # fmt: skip
"""The controls' greys in the dark scheme, from text to page, in the hue of the rest."""
PARTS = ("frame", "listing", "controls", "selection", "pick")
"""Stores of the state by what depends on it: the plot, the words about the whole frontier, controls, what
moves in the plot (:func:`.frontier.look.selection`), and everything."""


LATER = ("fit", "explore", "plan")
"""Pages with much content, whose controls are of no use to others: they are made once the first picture is
drawn, or when they are requested."""


_STORES = (
    "state", "frame", "listing", "controls", "renewed", "selection", "pick", "page", "plan-pick",
    "export-pick", "narrow", "key", "answered", "queued", "scheme", "written", "drawn",
    "finished", "told", "heard", "waited", "active-jobs", "titled", "waiting", "making", "looked",
    "fit-asked",
)  # fmt: skip
"""The data that every page keeps in the browser."""


def layout(context: Context, first: str = "") -> Any:
    """Return the document, which contains all pages and shows one of them.

    Args:
        context: the state that callbacks share.
        first: the page that is shown first, if known: other pages of :data:`LATER` have no content yet.
    """
    kept = [
        dcc.Location(id="url", refresh=False),
        *stores(*_STORES),
        dcc.Store(id="made", data=[name for name in LATER if first in ("", name)]),
        dcc.Store(id="chosen-scheme", storage_type="local"),
    ]
    pages = {
        name: None if name in LATER and first not in ("", name) else body(name, context) for name in PAGES
    }
    return dmc.MantineProvider(
        [
            *kept,
            html.A("Skip to content", href="#content", className="skip"),
            _header(),
            _connection(context),
            html.Div(
                [html.Div(id="notice", role="status"), button("Close", "notice-close")], className="notice"
            ),
            html.Div(id="problem", role="alert", **aria(live="assertive")),
            html.Main(
                [html.Div(content, id=f"page-{name}", className="page") for name, content in pages.items()],
                id="content",
                tabIndex=-1,
            ),
            # Drawn in the header; behind the content for the keyboard, which is on its way to the answer.
            dmc.Button("Dark", id="scheme-button", variant="default", size="sm", className="scheme"),
        ],
        id="mantine",
        forceColorScheme="light",
        theme={
            "colors": {"dark": list(_DARK_SCALE)},
            "primaryColor": "blue",
            "fontFamily": "inherit",
            "cursorType": "pointer",
            "defaultRadius": "sm",
        },
    )


def body(name: str, context: Context) -> Any:
    """Return the content of a page."""
    made: dict[str, Callable[[], Any]] = {
        "fit": lambda: fit.layout(context),
        "explore": lambda: explore.layout(context),
        "frontier": lambda: frontier.layout(context),
        "runs": runs.layout,
        "plan": plan.layout,
        "export": export.layout,
    }
    return made[name]()


def _connection(context: Context) -> html.Div:
    """Return the notice that the server is gone, with the state of the jobs when the page was made."""
    jobs: Any = {} if context.jobs is None else {"data-jobs": context.jobs.sign()}
    return html.Div(
        id="connection", role="alert", hidden=True, className="note note-error connection", **jobs
    )


def _header() -> html.Header:
    links = [
        dcc.Link(name.capitalize(), href=f"/{name}", id=f"nav-{name}", className=f"nav nav-{name}")
        for name in PAGES
    ]
    return html.Header(
        [
            html.Span("TensorOpt", className="brand"),
            html.Nav(links, **aria(label="Pages")),
            dmc.Select(
                id="exploration", data=[], searchable=True, clearSearchOnFocus=True, allowDeselect=False,
                placeholder="no exploration yet", nothingFoundMessage="nothing by that name", size="sm",
                className="which", comboboxProps={"width": 420, "position": "bottom-end"},
                **aria(label="Exploration"),
            ),
        ],
        className="top",
    )  # fmt: skip


CALLBACKS.in_browser(
    "tensoropt.scheme",
    sets="mantine.forceColorScheme scheme.data scheme-button.children chosen-scheme.data",
    when="scheme-button.n_clicks",
    given="chosen-scheme.data",
    at_start=True,
)
CALLBACKS.in_browser("tensoropt.page", sets="page.data narrow.data", when="url.pathname", at_start=True)
CALLBACKS.in_browser("pulse.heard", sets="waited.data", when="heard.data")
CALLBACKS.in_browser(
    "tensoropt.title",
    sets="titled.data",
    when="page.data exploration.value exploration.data notice.children",
    at_start=True,
)
CALLBACKS.in_browser("tensoropt.closed", sets="+notice.children", when="notice-close.n_clicks")
CALLBACKS.in_browser("tensoropt.answered", sets="queued.data", when="answered.data")
CALLBACKS.in_browser(
    "tensoropt.split",
    sets=[f"{name}.data" for name in PARTS],
    when="state.data renewed.data",
    given=[*(f"{name}.data" for name in PARTS), "drawn.data"],
    at_start=True,
)
CALLBACKS.in_browser("tensoropt.shown", sets="plan-pick.data export-pick.data", when="page.data pick.data")
CALLBACKS.in_browser(
    "tensoropt.write",
    sets=["written.data", *(f"nav-{name}.href" for name in PAGES)],
    when="state.data runs-view.data",
    given="page.data",
    at_start=True,
)
CALLBACKS.in_browser(
    "tensoropt.making", sets="waiting.data", when="page.data drawn.data", given="made.data", at_start=True
)

CALLBACKS.in_browser("tensoropt.made", sets="looked.data", when="made.data", at_start=True)


@CALLBACKS.answer(
    sets=[*(f"page-{name}.children" for name in LATER), "made.data"], when="making.data", given="made.data"
)
def _make(context: Context, _: Any, made: Any) -> Any:
    """Make the pages that have no content yet."""
    kept = made if isinstance(made, list) else []
    return *(no_update if name in kept else body(name, context) for name in LATER), list(LATER)


def register(app: Dash, context: Context) -> None:
    """Register the callbacks of all pages; those that run in the browser come first."""
    pages = (frontier, runs, plan, export, fit, explore)
    for callbacks in (CALLBACKS, *(page.CALLBACKS for page in pages)):
        callbacks.register(app, context)
