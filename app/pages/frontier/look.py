"""The content of the frontier page for a view, all at once: the plot, the card, the counts.

It is requested when a view comes whole, with the page's address or with another exploration. Then no callback
has to follow another before a person sees it: those that follow find it drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dash import dcc, html

from tensoropt.exploration.verified import Verified
from tensoropt.report.ran import miss_sentences

from ...context import Context
from ...figures.frontier import frontier_figure
from ...state import FRAME, View
from ...views.answer import answer_words
from ...views.frontier import FrontierData, count_words
from ...views.point import PROVEN, of_point, point_card
from ..parts import big, facts, note, term


def look(
    context: Context, data: FrontierData, view: View, scheme: str, *, narrow: bool
) -> dict[str, dict[str, Any]]:
    """Return component -> its properties, for a view with a selected point."""
    return {
        "graph": {"figure": frontier_figure(data, view, scheme, narrow=narrow)},
        "points-count": {"children": count_words(data, view)},
        "card": {"children": card(context, data, view)},
        **answered(data, view),
        "drawn": {"data": [_frame_of(view), scheme, selection(view)]},
    }


ANSWER = (
    ("budget-text", "placeholder"), ("answer-devices", "children"), ("answer-plan", "children"),
    ("answer-costs", "children"), ("answer-beside", "children"),
)  # fmt: skip
"""The components of the answer, each with the property that holds its words."""


def answered(data: FrontierData, view: View) -> dict[str, dict[str, Any]]:
    """Return component -> its properties: the words of the answer, in the order of :data:`ANSWER`."""
    words = answer_words(data, view)
    costs = f", {words.costs}." if words.plan else f"{words.costs}."
    said = (words.room, words.devices, words.plan, costs, words.beside)
    return {name: {title: text} for (name, title), text in zip(ANSWER, said, strict=True)}


def _frame_of(view: View) -> dict[str, Any]:
    """Return what the plot is drawn from, as the browser reports it (``assets/tensoropt.js``)."""
    kept = view.to_data()
    return {name: kept[name] for name in FRAME}


def selection(view: View) -> list[Any]:
    """Return the part of a view that moves in an existing plot."""
    return [view.point, view.other, view.budget_bytes, view.target_s]


def card(context: Context, data: FrontierData, view: View) -> Any:
    """Return the card of the selected point."""
    assert view.point is not None
    verified = context.verified(view)[0]
    content = point_card(data, view, view.point, verified)
    proven = data.exploration.all_points[view.point].proven
    why = next((fact.words for fact in content.facts if fact.name == PROVEN), "")
    return [
        html.H2(
            [
                content.title,
                html.Span(term("proof", "not proven" if proven == "-" else proven, why), className="badge"),
            ],
            className="panel-title",
            id="card-title",
        ),
        big(
            content,
            [f"{content.dominant} ", dcc.Link("What the step goes into", href=f"/plan?{view.to_query()}")],
        ),
        html.P(content.name, className="plan-name"),
        *missed(data, view.point, verified),
        facts(fact for fact in content.facts if fact.name != PROVEN),
    ]


def missed(data: FrontierData, point: int, verified: Sequence[Verified]) -> list[Any]:
    """Return notes for figures that turned out to be predicted far off when a point's plan was run."""
    ran = of_point(data, point, verified)
    return (
        []
        if ran is None
        else [note(words, "warn") for words in miss_sentences(ran, data.exploration.cluster)]
    )
