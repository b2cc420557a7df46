"""The rows of a timeline: streams of a device, links, and the stages of a pipeline, each in its own row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tensoropt.simulate.recording import TimelineEvent


def in_rows(events: Sequence[TimelineEvent]) -> list[TimelineEvent]:
    """Return the events with the rows in which they are drawn.

    If a device computes several stages of a pipeline, each of them has a row.
    """
    stages: dict[str, set[str]] = {}
    for event in events:
        stages.setdefault(event.lane, set()).add(event.group)
    several = {
        lane for lane, of in stages.items() if len(of) > 1 and all(group.startswith("stage ") for group in of)
    }
    found = [replace(e, lane=f"{e.lane} · {e.group}") if e.lane in several else e for e in events]
    return sorted(found, key=lambda e: _place(e.lane))


def _place(lane: str) -> tuple[bool, tuple[object, ...]]:
    """Return a sort key: devices before links; numbers in words are compared as numbers."""
    parts = tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in lane.split())
    return lane.startswith("link"), parts
