"""The frame of every page. The address holds the state: controls write it, and pages follow it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args
from urllib.parse import urlsplit

import dash_mantine_components as dmc
from dash import Dash, dcc, html, no_update
from flask import has_request_context, request

from ..context import Context
from ..figures.palette import Scheme
from ..state import PAGES
from ..views.explorations import choices
from . import details, new, result
from .parts import aria, button, stores
from .wiring import Callbacks

CALLBACKS = Callbacks()

_DARK_SCALE = (
    "#e6ecf2", "#a3b1bf", "#8795a3", "#5d6b78", "#43505d", "#34414e", "#26313c", "#1a222b", "#151c23",
    "#11171d",
)  # fmt: skip
"""Greys of the controls in the dark scheme, from text to page, in the page's hue."""
_TITLES = {"result": "Result", "new": "Plan it", "details": "Details"}
_STORES = (
    "page", "narrow", "scheme", "titled", "goto", "gone", "made", "finished", "told", "heard", "waited",
    "active-jobs", "written", "shown", "gridded",
)  # fmt: skip
"""Stores of every page in the browser."""
_SCHEME_COOKIE, _NARROW_COOKIE = "tensoropt-scheme", "tensoropt-narrow"
"""The cookies that ``assets/scheme.js`` sets before the layout is requested."""


def layout(context: Context) -> Any:
    """Return the document, with the requested address's page already filled, so that it needs no callback.

    Other pages are made when opened.
    """
    page, search, scheme, narrow = _asked()
    made = {name: _body(name, context) if name == page else None for name in PAGES}
    tree = dmc.MantineProvider(
        [
            dcc.Location(id="url", refresh=False),
            *stores(*_STORES),
            dcc.Store(id="chosen-scheme", storage_type="local"),
            html.A("Skip to content", href="#content", className="skip"),
            _header(context),
            _connection(context),
            html.Div(
                [html.Div(id="notice", role="status"), button("Close", "notice-close")], className="notice"
            ),
            html.Div(id="problem", role="alert", **aria(live="assertive")),
            html.Main(
                [html.Div(content, id=f"page-{name}", className="page") for name, content in made.items()],
                id="content",
                tabIndex=-1,
            ),
        ],
        id="mantine",
        forceColorScheme=scheme or "light",
        theme={
            "colors": {"dark": list(_DARK_SCALE)},
            "primaryColor": "blue",
            "fontFamily": "inherit",
            "cursorType": "pointer",
            "defaultRadius": "sm",
        },
    )
    tree["made"].data = [page] if page else []
    if page == "result" and scheme:
        for name, properties in result.content(context, search, scheme, narrow=narrow).items():
            for title, value in properties.items():
                if value is not no_update:
                    setattr(tree[name], title, value)
    return tree


def _asked() -> tuple[str, str, str, bool]:
    """Return (page, query, colour scheme, whether the window is narrow) of the requesting browser; without
    one, the page is ``result`` and the rest empty or False."""
    if not has_request_context() or not request.referrer:
        return "result", "", "", False
    address = urlsplit(request.referrer)
    name = address.path.strip("/")
    page = name if name in PAGES else "result"
    scheme = request.cookies.get(_SCHEME_COOKIE, "")
    known = scheme if scheme in get_args(Scheme) else ""
    return page, address.query, known, request.cookies.get(_NARROW_COOKIE) == "1"


def _body(name: str, context: Context) -> Any:
    made: dict[str, Callable[[], Any]] = {
        "result": lambda: result.layout(context), "new": lambda: new.layout(context),
        "details": details.layout,
    }  # fmt: skip
    return made[name]()


def _connection(context: Context) -> html.Div:
    """Return the hidden notice that the server is gone; its data tell the browser if jobs have changed."""
    jobs: Any = {} if context.jobs is None else {"data-jobs": context.jobs.sign()}
    return html.Div(
        id="connection", role="alert", hidden=True, className="note note-error connection", **jobs
    )


def _header(context: Context) -> html.Header:
    links = [
        dcc.Link(title, href=f"/{name}", id=f"nav-{name}", className=f"nav nav-{name}")
        for name, title in _TITLES.items()
    ]
    listed = choices(context.library)
    wide: Any = {"comboboxProps": {"width": 480, "position": "bottom-end"}, "size": "sm"}
    return html.Header(
        [
            html.Span("TensorOpt", className="brand"),
            html.Nav(links, **aria(label="Pages")),
            dmc.Select(
                id="exploration", data=listed, searchable=True, clearSearchOnFocus=True, allowDeselect=False,
                placeholder="no exploration yet", nothingFoundMessage="nothing by that name",
                className="which", **wide, **aria(label="Exploration"),
            ),
            dmc.MultiSelect(
                id="beside", data=listed, value=[], searchable=True, clearable=True,
                clearButtonProps={"aria-label": "clear"}, placeholder="compare with", hidePickedOptions=True,
                className="beside", **wide, **aria(label="Explorations to compare with"),
            ),
            dmc.Button("Dark", id="scheme-button", variant="default", size="sm"),
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
CALLBACKS.in_browser(
    "tensoropt.page",
    sets=["page.data", "narrow.data", *(f"nav-{name}.href" for name in PAGES)],
    when="url.pathname url.search",
    at_start=True,
)
CALLBACKS.in_browser("pulse.heard", sets="waited.data", when="heard.data")
CALLBACKS.in_browser(
    "tensoropt.title",
    sets="titled.data",
    when="page.data exploration.value exploration.data notice.children",
    at_start=True,
)
CALLBACKS.in_browser("tensoropt.grid", sets="+gridded.data", when="page.data", at_start=True)
CALLBACKS.in_browser("tensoropt.closed", sets="+notice.children", when="notice-close.n_clicks")
CALLBACKS.in_browser("tensoropt.follow", sets="gone.data", when="goto.data")
CALLBACKS.in_browser(
    "tensoropt.picked", sets="written.data", when="exploration.value beside.value", given="shown.data"
)


@CALLBACKS.answer(sets="exploration.data beside.data", when="finished.data")
def _list_explorations(context: Context, *_: Any) -> Any:
    return (listed := choices(context.library)), listed


@CALLBACKS.answer(
    sets="+exploration.value +beside.value shown.data", when="url.search finished.data", at_start=True
)
def _shown(context: Context, search: Any, _: Any) -> Any:
    """In the header's lists, select the explorations that the address names; also store which are shown."""
    view = context.view_from(search)
    return view.exploration or None, list(view.beside), [view.exploration, view.beside]


@CALLBACKS.answer(
    sets=["page-result.children", "page-new.children", "page-details.children", "made.data"],
    when="page.data",
    given="made.data",
    at_start=True,
)
def _make(context: Context, page: Any, made: Any) -> Any:
    kept = made if isinstance(made, list) else []
    if page not in PAGES or page in kept:
        return (no_update,) * 4
    return *(_body(name, context) if name == page else no_update for name in PAGES), [*kept, page]


def register(app: Dash, context: Context) -> None:
    """Register all pages' callbacks, browser ones first."""
    for callbacks in (CALLBACKS, *(page.CALLBACKS for page in (result, new, details))):
        callbacks.register(app, context)
