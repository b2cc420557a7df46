"""The panel that takes a measured file for a plan: figures beside each other, lines over the curves."""

from __future__ import annotations

from typing import Any

import dash_mantine_components as dmc
from dash import ctx, dcc, html, no_update

from tensoropt.errors import TensorOptError
from tensoropt.report.beside import Beside, beside

from ...context import Context
from ...figures.timeline import below_timeline, over_curve
from ...measured import MOST_BYTES
from ...views.frontier import FrontierData
from ...views.plan import align_options, figure_rows, left_words
from .. import parts
from ..parts import button, hint, note, panel, plain_table, point_shown, row, scrolled, spoken, visible
from ..wiring import Callbacks

CALLBACKS = Callbacks()

ENDINGS = (".pickle", ".pkl", ".json", ".json.gz")
_HINT = (
    "A memory snapshot (torch.cuda.memory._dump_snapshot), a trace of torch.profiler (.json, .json.gz) or "
    "verified.json of tensoropt verify --save. It is read as data, kept in memory only, and never leaves "
    "this machine."
)


def measured_panel() -> Any:
    """Return the panel where a file is dropped, with what it says."""
    return panel(
        dcc.Store(id="measured"),
        parts.upload(
            "measured-upload", "measured-place", "a measured file", ENDINGS, MOST_BYTES,
            said="measured-said", remedy="record it again",
            larger="Use tensoropt show DIR --point N --beside FILE", accept=",".join((*ENDINGS, ".gz")),
        ),
        hint(_HINT),
        spoken("measured-said"),
        row(
            html.Span(id="measured-name"),
            dmc.Select(id="measured-align", label="Its step", data=[], allowDeselect=False, size="xs", w=230),
            button("Remove the file", "measured-remove"),
            id="measured-bar",
            names="measured-bar",
            style=visible(False),
        ),
        scrolled("Measured beside predicted", id="measured-figures"),
        title="Measured beside predicted",
    )  # fmt: skip


def comparison(context: Context, data: FrontierData, detail: Any, kept: Any) -> tuple[str, Beside] | None:
    """Return (name of a measured file, its comparison with a plan); None if no file was dropped.

    Args:
        detail: the plan's detail.
        kept: the token of the file and how it is aligned, as the page keeps them.

    Raises:
        TensorOptError: the file is gone, or is not about this plan.
    """
    if not isinstance(kept, dict) or not kept.get("token"):
        return None
    label, observation = context.measured.get(kept["token"])
    align = kept.get("align")
    return label, beside(data.exploration, detail, observation, str(align) if align else None)


def overlaid(
    context: Context, data: FrontierData, detail: Any, kept: Any, curve: Any, timeline: Any, scheme: str
) -> tuple[Any, Any]:
    """Return the memory curve and the timeline, with measurements if there are any."""
    try:
        measured = comparison(context, data, detail, kept)
    except TensorOptError:  # said beside the upload
        return curve, timeline
    if measured is None:
        return curve, timeline
    units = data.units
    return over_curve(curve, measured[1], units, scheme), below_timeline(timeline, measured[1], units, scheme)


def _standing_out(cells: list[str]) -> list[Any]:
    """Return a row of figures, whose miss is marked if it is far."""
    *rest, ratio = cells
    return [*rest, html.Strong(ratio, className="worse") if "far off" in ratio else ratio]


@CALLBACKS.answer(
    sets="measured.data measured-said.children measured-upload.contents",
    when="measured-upload.contents measured-remove.n_clicks",
    given="measured-upload.filename measured.data",
)
def _take(context: Context, contents: Any, _: Any, name: Any, kept: Any) -> Any:
    """Take a file, or remove it."""
    token = kept.get("token") if isinstance(kept, dict) else None
    # The field is emptied once a file was taken: a file in it may have come with an earlier call, whose
    # answer the browser dropped.
    if contents is None:
        if "measured-remove" not in ctx.triggered_prop_ids.values():
            return no_update, no_update, no_update
        context.measured.remove(token)
        return None, None, None
    try:
        new = context.measured.keep(contents, name)
    except TensorOptError as error:
        return no_update, note(str(error), "error"), None
    context.measured.remove(token)
    # Emptied, so that the same file can be chosen again.
    return {"token": new, "align": None}, None, None


# Not part of the above: what is told of a file sets the select, and Dash starts no callback that its own
# chain has passed, so that a file that came as the page was opened was never told of.
@CALLBACKS.answer(sets="+measured.data", when="measured-align.value", given="measured.data")
def _lay(context: Context, align: Any, kept: Any) -> Any:
    """Align the file differently."""
    token = kept.get("token") if isinstance(kept, dict) else None
    if token is None or align is None or kept.get("align") == align:
        return no_update
    return {"token": token, "align": align}


@CALLBACKS.answer(
    sets="measured-bar.style measured-name.children measured-align.data measured-align.value "
    "measured-figures.children",
    when="measured.data plan-pick.data",
    given="page.data",
)
def _tell(context: Context, kept: Any, pick: Any, page: Any) -> Any:
    data, _, point = point_shown(context, pick, page, "plan")
    if not kept:
        return visible(False), "", [], None, None
    try:
        detail = context.detail(data, point)
        measured = comparison(context, data, detail, kept)
    except TensorOptError as error:
        return visible(True), "", [], None, note(str(error), "error")
    assert measured is not None, "there is a file"
    name, compared = measured
    head = ["", "predicted", "measured", "ratio"]
    hints = [*compared.notes, *([left_words(compared)] if left_words(compared) else [])]
    return (
        visible(True),
        f"{name}: {compared.kind}",
        align_options(compared),
        compared.align,
        [
            plain_table(head, [_standing_out(row) for row in figure_rows(compared, data.units)], (1, 2, 3)),
            hint("; ".join(hints)) if hints else None,
        ],
    )
