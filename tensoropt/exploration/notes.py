"""What an exploration noted: what it left out or did not time, and where its figures come from."""

from __future__ import annotations

from tensoropt.plan.findings import Findings

_MISSING = (
    "left out", "left whole", "kept whole", "not searched", "not tried", "not part of", "no plan of",
    "no pipelines", "refused", "failed", "could not", "cannot", "not timed", "kept from",
)  # fmt: skip
"""Words of notes about what is not in the points, and about points that are of an earlier run."""


def notes_of(findings: Findings, *, missing: bool) -> list[str]:
    """Return the sentences that an exploration and its spaces noted, each once: those about what was left out
    or not timed, or the others, which say where figures come from and what was counted."""
    notes = [*findings.report.get("notes", []), *(note for space in findings.spaces for note in space.notes)]
    return [note for note in dict.fromkeys(map(str, notes)) if _is_missing(note) == missing]


def _is_missing(note: str) -> bool:
    """Return whether a note is about what is not in the points."""
    return any(words in note for words in _MISSING)
