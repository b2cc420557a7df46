"""The basis of the figures: settings, defaults, sources of figures, what was left out."""

from __future__ import annotations

from collections.abc import Sequence

from tensoropt.plan.facts_table import Fact
from tensoropt.plan.verified import Verified
from tensoropt.report.assumptions import batch_words, settings_facts
from tensoropt.report.table import timing_words

from ..state import View
from .frontier import FrontierData, price_of
from .units import digits, percent, unit_for
from .verified import verified_lines

NOTE = "note"
"""The label of each sentence that an exploration noted."""


def assumptions(
    data: FrontierData, view: View, verified: Sequence[Verified] = (), fault: str = ""
) -> tuple[Fact, ...]:
    """Return labels and values, in the order in which people ask.

    Args:
        verified: what is known about plans that were run.
        fault: why that cannot be read, "" if it can.
    """
    exploration = data.exploration
    settings, report = exploration.settings, exploration.report
    whole = unit_for(data.capacity_bytes)
    price = price_of(data, view)
    found = [
        Fact(
            "model",
            f"{data.model}, {_count(exploration.model.parameters)} parameters",
        ),
        Fact("batch", batch_words(exploration)),
        Fact(
            "cluster", f"{exploration.cluster['name']}, {len(exploration.cluster['devices'])} × {data.device}"
        ),
        Fact("memory of a device", f"{whole.text(data.capacity_bytes)}, {percent(view.headroom)} kept free"),
        *settings_facts(exploration),
        Fact("price", "unknown" if price is None else f"{digits(price)} per device-hour"),
        Fact("figures", timing_words(exploration)),
        *(
            Fact("predicted / measured", line)
            for line in ((fault,) if fault else verified_lines(data, verified))
        ),
    ]
    if settings.get("constraints"):
        found.append(Fact("constraints", "as given; constraints.json on the Export page has them"))
    found += [Fact(NOTE, str(text)) for text in report.get("notes", [])]
    return tuple(found)


def _count(number: int) -> str:
    for name, factor in (("billion", 1e9), ("million", 1e6)):
        if number >= factor:
            return f"{digits(number / factor)} {name}"
    return f"{number:,}"
