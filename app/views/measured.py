"""A prediction beside measurements, in words and rows."""

from __future__ import annotations

from tensoropt.report.beside import PEAK, WHOLE, Beside

from .units import Units

_ALIGN_WORDS = {PEAK: "by the peaks", WHOLE: "the whole recording as one step"}
MOST_EVENTS = 4000
"""The most bars of a trace that are drawn: the longest."""


def align_options(found: Beside) -> list[dict[str, str]]:
    """Return what can be taken as the step, for a select."""
    return [{"value": way, "label": _ALIGN_WORDS.get(way, f"step {way}")} for way in found.alignments]


def figure_rows(found: Beside, units: Units) -> list[list[str]]:
    """Return (name, predicted, measured, ratio with the change in words) for each figure."""
    return [list(figure.words(units.memory.text, units.time.text)) for figure in found.figures]


def left_words(found: Beside) -> str:
    """Say how many events are not drawn."""
    left = len(found.events) - MOST_EVENTS
    return f"the {left:,} shortest events are not drawn" if left > 0 else ""
