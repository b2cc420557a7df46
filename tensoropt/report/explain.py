"""A text that explains a point's costs: where its time and memory go, and what would make it faster."""

from __future__ import annotations

from collections.abc import Sequence

from tensoropt.console import columns
from tensoropt.exploration.facts import host_words
from tensoropt.report.faster import Faster
from tensoropt.report.owners import PointOwners
from tensoropt.report.step_parts import Detail, Part, Share, part_rows
from tensoropt.units import format_bytes, format_seconds

_TOP = 5
"""The number of owners of memory that are listed."""


def why_lines(detail: Detail, owners: PointOwners, faster: Sequence[Faster]) -> list[str]:
    """Return lines of text on the parts of the step, each device's share if devices differ, the largest
    tensors at the memory peak, and changes that would make the step shorter."""
    step = detail.step
    shares = ", ".join(f"{name} {100 * share:.0f} %" for name, share in detail.sources.items() if share)
    lines = [
        detail.headline(),
        *([f"host {host_words(step)}"] if step.host_s else []),
        f"assumed: {detail.overlap}; figures: {shares}",
        *("", "parts of the step", _parts_table(detail.parts)),
    ]
    if detail.places:
        lines += ["", step.kind.each, _table(detail.places)]
    lines += ["", *owners.at().lines(_TOP), *([owners.note] if owners.note else [])]
    if faster:
        rows = [
            [one.title, format_seconds(one.time_s), f"{100 * (one.time_s / step.time_s - 1):+.0f} %"]
            for one in faster
        ]
        lines += ["", columns([["this plan with", "the step", "change"], *rows], left=(0,))]
    return lines


def _parts_table(parts: Sequence[Part]) -> str:
    rows = [[title, format_seconds(s), f"{100 * share:.1f} %"] for title, s, share in part_rows(parts)]
    return columns([["the step", "time", "share"], *rows], left=(0,))


def _table(shares: Sequence[Share]) -> str:
    table = [["", "memory", "compute", "comm.", "idle"]]
    for share in shares:
        seconds = (share.compute_s, share.communication_s, share.idle_s or 0.0)
        table.append([share.title, format_bytes(share.memory_bytes), *map(format_seconds, seconds)])
    return columns(table, left=(0,))
