"""A prediction beside what was measured, in words and rows."""

from __future__ import annotations

from tensoropt.report.beside import PEAK, WHOLE, Beside, Figure

from .units import Units

ALIGN_WORDS = {PEAK: "by the peaks", WHOLE: "the whole recording as one step"}
NOT_TOLD = "not told"
MOST_EVENTS = 4000
"""Bars that are drawn of a trace: the longest."""


def align_options(found: Beside) -> list[dict[str, str]]:
    """What can be taken as the step, for a select."""
    return [{"value": way, "label": ALIGN_WORDS.get(way, f"step {way}")} for way in found.alignments]


def figure_rows(found: Beside, units: Units) -> list[list[str]]:
    """(name, predicted, measured, ratio with the change in words) per figure."""
    return [_row(figure, units) for figure in found.figures]


def _row(figure: Figure, units: Units) -> list[str]:
    unit = units.memory if figure.unit == "bytes" else units.time
    if figure.measured is None:
        return [figure.name, unit.text(figure.predicted), NOT_TOLD, ""]
    return [figure.name, unit.text(figure.predicted), unit.text(figure.measured), figure.ratio_words]


def left_words(found: Beside) -> str:
    """How many events are not drawn."""
    left = len(found.events) - MOST_EVENTS
    return f"the {left:,} shortest events are not drawn" if left > 0 else ""
