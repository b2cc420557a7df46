"""The callbacks of the plan page: the point draws it."""

from __future__ import annotations

from typing import Any

from dash import html, no_update

from tensoropt.plan.facts_table import named
from tensoropt.plan.kinds import PlanKind

from ...context import Context
from ...downloads import address
from ...figures.memory import memory_figure
from ...state import View
from ...views.frontier import FrontierData
from ...views.operators import changed_operators, curve_of, recomputation_difference
from ...views.plan import Bar, Segment, device_bars, memory_bar, step_bar, step_rows
from ...views.point import point_card
from ...views.units import plural
from ..frontier.look import missed
from ..parts import (
    aria,
    big,
    difference_table,
    empty,
    hint,
    note,
    plain_table,
    point_shown,
    scrolled,
    shown_point,
)
from ..wiring import Callbacks

CALLBACKS = Callbacks()

_MOST_CHANGED = 60
"""The most rows of the difference of two plans; the table says how many more there are."""


@CALLBACKS.answer(
    sets="plan-empty.children plan-body.style plan-headline.children plan-memory.children "
    "plan-step.children plan-parts.children plan-note.children plan-difference.children",
    when="plan-pick.data",
)
def _words(context: Context, pick: Any) -> Any:
    data, view = shown_point(context, pick, "plan", "plan")
    if data is None:
        text = empty("No plan to show yet", "Pick an exploration above and a point on its frontier.")
        return text, {"display": "none"}, None, None, None, None, None, None
    assert view.point is not None
    detail, why = context.detail_or_why(data, view.point)
    return (
        None,
        {},
        _headline(context, data, view, detail),
        [*_bar(memory_bar(data, view, view.point)), *devices(device_bars(data, view.point))],
        _bar(step_bar(data, view.point)),
        None if detail is None else _parts(data, view, detail),
        note(about_rows(data.exploration.all_points[view.point].kind, why)),
        difference(data, view),
    )


@CALLBACKS.answer(
    sets="plan-curve.figure plan-time.style",
    when="plan-pick.data scheme.data",
    given="page.data",
)
def _figures(context: Context, pick: Any, scheme: Any, page: Any) -> Any:
    data, view, point = point_shown(context, pick, page, "plan")
    detail, _ = context.detail_or_why(data, point)
    if detail is None:
        return no_update, {"display": "none"}
    times, kinds = curve_of(detail)
    limit = data.limit_bytes(view)
    return memory_figure(times, kinds, limit, data.units, str(scheme)), {}


def about_rows(kind: PlanKind, why: str) -> str:
    """Say why costs of single operators are not shown, or whose they are; "" if they are every device's."""
    if why:
        return f"What the step goes into, and what single operators cost, is not shown: {why}"
    return kind.rows and f"Operators: {kind.rows}; below them, {kind.each}. Trace: {kind.lanes}."


def _parts(data: FrontierData, view: View, detail: Any) -> Any:
    """Return what the step goes into, what would make kernels fewer, and the way to the whole of it."""
    table = plain_table(["", "", "share"], step_rows(detail, data.units), numbers=(1, 2))
    trace = html.A(
        "The step as a trace for ui.perfetto.dev",
        href=address(view.exploration, "trace.json", view.point),
        download="trace.json",
    )
    return [table, html.P(trace)]


def _headline(context: Context, data: FrontierData, view: View, detail: Any) -> Any:
    """Return memory and time, whether the plan fits, and what dominates, in words."""
    assert view.point is not None
    verified = context.verified(view)[0]
    content = point_card(data, view, view.point, verified)
    by_name = {fact.name: fact for fact in content.facts}
    facts = [f"{fact.name} {fact.words}" for fact in named(by_name, "mesh", "micro-batches", "verified")]
    return [
        html.P(content.name, className="plan-name"),
        big(content, detail.headline() if detail is not None else content.dominant, wide=True),
        *missed(data, view.point, verified),
        hint(" · ".join([content.title, *facts])),
    ]


def _bar(bar: Bar) -> Any:
    """Return a stacked bar with its figures below it."""
    cells = [
        html.Span(
            className=f"seg-{s.kind}", style={"width": f"{100 * s.share:.3f}%"}, title=f"{s.title}: {s.size}"
        )
        for s in bar.segments
        if s.share > 0
    ]
    rows = [
        [html.Span([html.Span(className=f"swatch seg-{s.kind}"), s.title]), s.size, s.part]
        for s in bar.segments
    ]
    return [
        html.P(bar.summary, className="bar-summary"),
        html.Div(cells, className="bar", role="img", **aria(label=bar.summary)),
        plain_table(["", "", "share"], rows, numbers=(1, 2)),
    ]


def devices(segments: tuple[Segment, ...]) -> list[Any]:
    """Return one thin bar per device, if they differ."""
    rows = [
        [
            s.title,
            html.Div(
                html.Span(className=f"seg-{s.kind}", style={"width": f"{100 * s.share:.2f}%"}),
                className="bar thin",
            ),
            s.size,
        ]
        for s in segments
    ]
    table = plain_table(["", "", ""], rows, numbers=(2,))
    return [html.H3("Most that a device holds"), table] if rows else []


def difference(data: FrontierData, view: View) -> Any:
    """Return the figures and operators that differ between this plan and the compared one."""
    assert view.point is not None
    if view.other is None:
        return hint(
            "Choose a second point on the Frontier page (key c, or click to compare) to see what differs."
        )
    changed = changed_operators(data.exploration, view.point, view.other)
    head = ["operator", "module", data.label(view.other), data.label(view.point)]
    rows = [list(row) for row in changed[:_MOST_CHANGED]]
    if not any(module for _, module, *_ in changed):  # ONNX files know none
        head, rows = [head[0], *head[2:]], [[row[0], *row[2:]] for row in rows]
    more = len(changed) - len(rows)
    recomputed = recomputation_difference(data.exploration, view.point, view.other)
    where = {
        "only there": f"only in {data.label(view.other)}",
        "only here": f"only in {data.label(view.point)}",
    }
    return [
        difference_table(data, view),
        html.H3("Blocks recomputed"),
        plain_table(["", ""], [[where.get(title, title), blocks] for title, blocks in recomputed])
        if recomputed
        else hint("None, in either plan."),
        html.H3(f"{plural(len(changed), 'operator')} split otherwise"),
        scrolled("Operators split otherwise", plain_table(head, rows), names="tall"),
        hint(f"{more} more are not listed; strategies.csv has all of them.") if more else None,
    ]
