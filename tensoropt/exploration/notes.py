"""The notes of an exploration: what the search left out, what was not timed, and where figures come from."""

from __future__ import annotations

from tensoropt.plan.findings import Findings

_MISSING = (
    "left out", "left whole", "kept whole", "not searched", "not tried", "not part of", "no plan of",
    "no pipelines", "refused", "failed", "could not", "cannot", "not timed", "kept from",
)  # fmt: skip
"""Phrases that mark a note as one on missing points, or on points of an earlier run."""


def notes_of(findings: Findings, *, missing: bool) -> list[str]:
    """Return an exploration's notes, without repeats: with ``missing`` those on what was left out of the
    search or not timed, otherwise all others."""
    notes = [*findings.report.get("notes", []), *(note for space in findings.spaces for note in space.notes)]
    about = {note: any(words in note for words in _MISSING) for note in map(str, notes)}
    return [note for note, is_missing in about.items() if is_missing == missing]
