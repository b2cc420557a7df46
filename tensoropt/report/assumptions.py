"""The basis of an exploration's figures, and what was chosen about it, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tensoropt.plan.exploration import Exploration
from tensoropt.plan.facts_table import Fact
from tensoropt.plan.settings import settings_fields


def settings_facts(exploration: Exploration) -> list[Fact]:
    """Return what was chosen about an exploration, and what its figures are.

    Of settings that say little at their default there is a row where something else was chosen.
    """
    chosen = exploration.settings
    rows = []
    for setting in settings_fields():
        value = chosen.get(setting.name, setting.default)
        if (setting.assumed or value != setting.default) and setting.name != "constraints":
            rows.append(Fact(setting.label[:1].lower() + setting.label[1:], setting.row(value)))
    return [
        *rows,
        Fact("time", "one simulated step: compute, communication it waits for, idle"),
        Fact("memory", "simulated peak of the largest device; inputs and buffers left out"),
    ]


def notes_of(exploration: Exploration) -> list[str]:
    """Return all that was estimated, approximated or left out, in the words of the run."""
    report = exploration.report
    notes = [*report.get("notes", []), *(note for space in exploration.spaces for note in space.notes)]
    unknown = report.get("operators_without_rule") or []
    if unknown:
        notes.append(f"operators without a rule (kept whole): {', '.join(map(str, unknown))}")
    if report.get("micro_batches_refused"):
        notes.append(f"micro-batches refused: {report['micro_batches_refused']}")
    return list(dict.fromkeys(map(str, notes)))


def batch_words(exploration: Exploration) -> str:
    """Say the global batch, as far as it is known."""
    model = exploration.model
    return str(model.batch or _first_size(model.call) or "the model's own")


def _first_size(call: Any) -> int | None:
    """Return the first size of the first tensor that the model was called with."""
    if not isinstance(call, Mapping):
        return None
    for value in [*call.get("args", []), *dict(call.get("kwargs", {})).values()]:
        if isinstance(value, Mapping) and value.get("tensor"):
            return int(value["tensor"][0])
    return None
