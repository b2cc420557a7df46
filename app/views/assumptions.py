"""What the figures rest on: settings, defaults, where figures come from, what was left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tensoropt.plan.verified import Verified
from tensoropt.report.table import timing_words

from ..state import View
from .frontier import FrontierData, price_of, unit_for
from .point import Fact
from .units import digits, percent
from .verified import verified_lines


def assumptions(
    data: FrontierData, view: View, verified: Sequence[Verified] = (), fault: str = ""
) -> tuple[Fact, ...]:
    """Label and value, in the order in which people ask.

    Args:
        verified: what is known of plans that were run.
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
        Fact("batch", str(exploration.model.batch or _batch(exploration.model.call) or "the model's own")),
        Fact(
            "cluster", f"{exploration.cluster['name']}, {len(exploration.cluster['devices'])} × {data.device}"
        ),
        Fact("memory of a device", f"{whole.text(data.capacity_bytes)}, {percent(view.headroom)} kept free"),
        Fact("mode", str(settings.get("mode", "train"))),
        Fact("optimizer", str(settings.get("optimizer", "adam"))),
        Fact("computes in", str(settings.get("dtype", "float32"))),
        Fact("recompute", _recompute(settings.get("recompute", "auto"))),
        Fact("micro-batches", _micro(settings.get("micro_batches"))),
        Fact("allowed gap", percent(float(settings.get("epsilon") or 0.0))),
        Fact("time", "one simulated step: compute, communication it waits for, idle"),
        Fact("memory", "simulated peak of the largest device; inputs and buffers left out"),
        Fact("price", "unknown" if price is None else f"{digits(price)} per device-hour"),
        Fact("figures", timing_words(exploration)),
        *(
            Fact("predicted / measured", line)
            for line in ((fault,) if fault else verified_lines(data, verified))
        ),
    ]
    if settings.get("constraints"):
        found.append(Fact("constraints", "as given; constraints.json on the Export page has them"))
    found += [Fact("note", str(text)) for text in report.get("notes", [])]
    return tuple(found)


def _micro(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return "1, 2, 4, 8 where they divide the batch" if value == "auto" else str(value)


def _recompute(value: Any) -> str:
    return "repeated blocks may run again in backward" if value == "auto" else str(value)


def _count(number: int) -> str:
    for name, factor in (("billion", 1e9), ("million", 1e6)):
        if number >= factor:
            return f"{digits(number / factor)} {name}"
    return f"{number:,}"


def _batch(call: Any) -> int | None:
    """The first size of the first tensor the model was called with."""
    if not isinstance(call, Mapping):
        return None
    for value in [*call.get("args", []), *dict(call.get("kwargs", {})).values()]:
        if isinstance(value, Mapping) and value.get("tensor"):
            return int(value["tensor"][0])
    return None
