"""The page of clusters: one model on all clusters on which it was explored, and which of them to take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dash import dcc, html, no_update

from tensoropt.exploration.notable import CARDS_GIB
from tensoropt.units import format_bytes, format_number

from ..context import Context
from ..figures.clusters import clusters_figure
from ..state import View
from ..views.clusters import ClustersData, clusters_data, point_view, strange_prices, unpriced_kinds
from ..views.frontier import FrontierData
from . import parts
from .parts import view_of
from .wiring import Callbacks

CALLBACKS = Callbacks()

CLUSTER_FIELDS = (
    "shop-budget", "shop-within", "shop-cost", "shop-amount", "shop-currency", "shop-prices"
)  # fmt: skip
"""The controls of this page whose values are the view's."""
_MORE = (
    "Explore the model on other clusters (“Also on” of the Explore page, or --also-on) to compare them here."
)


def shown_fields(view: View, data: FrontierData) -> dict[str, str]:
    """Return what the controls of this page show for a view."""
    within = "" if view.within_s is None else data.units.time.text(view.within_s).replace(",", "")
    budget = "" if view.budget_bytes is None else data.units.memory.limit(view.budget_bytes).replace(",", "")
    return {
        "shop-budget": budget,
        "shop-within": within,
        "shop-cost": "" if view.within_cost is None else f"{view.within_cost:.10g}",
        "shop-amount": view.amount,
        "shop-currency": view.currency,
        "shop-prices": view.prices,
    }


def layout() -> Any:
    """Return the page, empty."""
    fields = (
        ("shop-budget", "Memory of a device", "all it has", 160),
        ("shop-within", "Step at most", "no limit", 160),
        ("shop-cost", "Cost at most", "no limit", 130),
        ("shop-amount", "Hours and cost of", "1,000 steps", 220),
        ("shop-currency", "Currency", "such as EUR", 110),
        ("shop-prices", "Prices per device-hour", "H100-80GB=2.5, A100-80GB=1.6", 380),
    )
    cards = [parts.button(f"{size} GiB", f"shop-budget-{size}") for size in CARDS_GIB]
    label = "Cost against time of every cluster; the table below has the figures."
    return html.Div(
        [
            parts.heading(
                "Clusters",
                "This model on every cluster that it was explored on: each mark is a cluster at its fastest "
                "plan that fits, which is its cheapest too, as money is time times a price.",
            ),
            *parts.stores("clusters-open", "clusters-opened"),
            html.Div(id="clusters-empty"),
            parts.stack(
                parts.panel(
                    parts.row(
                        *(
                            parts.number_field(name, title, placeholder=none, w=width, debounce=True)
                            for name, title, none, width in fields
                        ),
                        names="fields",
                    ),
                    parts.row(html.Span("Devices of", className="muted small"), *cards, names="fields tight"),
                    parts.spoken("clusters-answer"),
                    html.Div(parts.plot("clusters-graph", 420), role="group", **parts.aria(label=label)),
                    parts.hint(
                        "Hollow marks are beyond a limit; where nothing fits, the leanest plan is grey. "
                        "A click opens the plan."
                    ),
                    title="Which cluster",
                ),
                parts.panel(parts.scrolled("Clusters", id="clusters-table"), title="Clusters"),
                id="clusters-body",
            ),
        ]
    )


@CALLBACKS.answer(
    sets="clusters-empty.children clusters-body.style clusters-answer.children clusters-table.children "
    "clusters-graph.figure",
    when="clusters-pick.data scheme.data",
    given="page.data",
)
def _show(context: Context, kept: Any, scheme: Any, page: Any) -> Any:
    if page != "clusters" or not kept:
        return (no_update,) * 5
    view = view_of(kept)
    data = clusters_data(context.library, view) if view.exploration else None
    if data is None or not data.rows:
        said = parts.empty(
            "No cluster to show", "Pick an exploration above, or start one on the Explore page."
        )
        return said, parts.visible(False), None, None, no_update
    return None, {}, answer(data, view), table(data, view), clusters_figure(data, view, str(scheme))


@CALLBACKS.answer(sets="clusters-open.data", when="clusters-graph.clickData", given="state.data")
def _open_point(context: Context, click: Any, kept: Any) -> Any:
    view = view_of(kept)
    data = clusters_data(context.library, view)
    hit = None if data is None else clicked(click, data)
    if data is None or hit is None:
        return no_update
    return f"/frontier?{point_view(view, data.rows[hit[0]], hit[1]).to_query()}"


CALLBACKS.in_browser("tensoropt.follow", sets="clusters-opened.data", when="clusters-open.data")


def clicked(click: Any, data: ClustersData) -> tuple[int, int] | None:
    """Return (row, point) of a click; None for a click on no point, or one that a page made up."""
    for hit in click.get("points", ()) if isinstance(click, Mapping) else ():
        custom = hit.get("customdata") if isinstance(hit, Mapping) else None
        if not isinstance(custom, list) or len(custom) < 2 or not all(type(c) is int for c in custom[:2]):
            continue
        place, point = custom[:2]
        if 0 <= place < len(data.rows) and 0 <= point < len(data.rows[place].curve.time):
            return place, point
    return None


def answer(data: ClustersData, view: View) -> Any:
    """Say which cluster to take, and what is lacking."""
    lacking = unpriced_kinds(data, view)
    without = ""
    if not data.priced:
        without = (
            "No price is known, so the plot shows device-hours: enter prices per device-hour above, "
            f"for example {lacking[0]}=2.5."
        )
    return [
        *(html.P(sentence, className="answer") for sentence in data.answer),
        parts.note(strange_prices(data, view), "warn"),
        parts.note(data.fault and f"Hours and cost are of 1,000 steps: {data.fault}.", "warn"),
        parts.note(without),
        parts.note("" if len(data.rows) > 1 else _MORE),
    ]


def table(data: ClustersData, view: View) -> Any:
    """Return a row per cluster with the point it offers, as a link, or the reason why it offers none."""
    money = view.currency or "cost"
    titles = ("time per step", "memory per device", f"{money} per hour", "hours", money)
    rows = []
    for place, on in enumerate(data.rows):
        offer, rates = on.offer, on.offer.rates
        per_hour = None if rates is None else rates.per_hour
        name: Any = on.label
        if offer.index is not None:
            name = dcc.Link(on.label, href=f"/frontier?{point_view(view, on, offer.index).to_query()}")
        marks = [w for w, at in (("cheapest", data.cheapest), ("fastest", data.fastest)) if at == place]
        unknown = rates.whys["per_hour"] if rates is not None and per_hour is None else ""
        figures = (
            (data.time.text, None if rates is None else rates.step_s),
            (format_bytes, offer.memory_bytes),
            (format_number, per_hour),
            (format_number, offer.hours),
            (format_number, offer.cost),
        )
        cells = ["—" if figure is None else text(figure) for text, figure in figures]
        words = ", ".join(filter(None, [*marks, offer.reason or unknown]))
        rows.append([name, offer.devices, *cells, words])
    rows += [[name, *["—"] * 6, why] for name, why in data.refused]
    caption = parts.hint(
        f"For every cluster, its fastest plan that fits, also its cheapest. Hours and {money} are for "
        f"{data.amount}."
    )
    return [parts.plain_table(["cluster", "devices", *titles, ""], rows, numbers=(2, 3, 4, 5, 6)), caption]
