"""A frontier as a table (which points are shown, in which units, with which remarks) and as a small SVG.

The SVG is drawn without any plotting library, for notebooks, READMEs and reports.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from xml.sax.saxutils import escape

import numpy as np

from tensoropt.console import columns
from tensoropt.costs.device_fit import MARKS
from tensoropt.exploration.notable import marks_of, notable, unconstrained_words
from tensoropt.exploration.rates import RatesOf
from tensoropt.exploration.your_jobs import your_jobs
from tensoropt.files import write_text
from tensoropt.plan.findings import Findings
from tensoropt.plan.plan_names import brief_name
from tensoropt.plan.point_table import PointTable
from tensoropt.units import (
    counted,
    format_bytes,
    format_number,
    format_seconds,
    share_words,
)

_HEADER = [
    "point", "needs/{size}", "time/{time}", "{rate}", "MFU", "compute/{time}", "comm./{time}", "mesh",
    "micro", "parameters/{size}", "plan", "figures", "gap", "",
]  # fmt: skip
_IF_KNOWN = (3, 4)
"""Columns that are left out if no point has them."""
_WORDS = ("plan", "figures", "")
"""Columns that hold words."""
_UNKNOWN = "-"


def shown_points(findings: Findings, most: int) -> list[int]:
    """Return at most ``most`` points spread evenly over the logarithm of time, with both ends and the
    knee.
    """
    count = len(findings.points)
    if count <= most:
        return list(range(count))
    kept = {0, count - 1, findings.knee}
    times = np.log(PointTable.of(findings.points).time)
    for wanted in np.linspace(times[0], times[-1], most):
        # Several wanted times may have the same nearest point; what is left is filled by index below.
        if len(kept) >= most:
            break
        kept.add(int(np.argmin(np.abs(times - wanted))))
    for index in np.linspace(0, count - 1, most).astype(int):  # where the frontier is flat in time
        if len(kept) >= most:
            break
        kept.add(int(index))
    return sorted(kept)


def source_words(sources: dict[str, float]) -> str:
    """Return the sources of the seconds, largest share first."""
    parts = [(share, name) for name, share in sources.items() if share >= 0.005]
    return ", ".join(f"{name} {round(100 * share)} %" for share, name in sorted(parts, reverse=True))


def left_of(header: Sequence[str]) -> tuple[int, ...]:
    """Return the columns of a table of points that are words, which are aligned to the left."""
    return tuple(i for i, name in enumerate(header) if name in _WORDS)


def table_rows(findings: Findings, indices: Sequence[int]) -> list[list[str]]:
    """Return a header and one row of words per point, with what it is last; tokens (or else samples) per
    second of all devices and MFU stand beside the time where they are known.
    """
    marks = notable(findings) | {
        job.row: [f"you are here ({job.launcher})"] for job in your_jobs(findings) if job.row is not None
    }
    (size, size_bytes), (time, time_s) = units_of(findings)
    rated = RatesOf(findings)
    rate = "samples" if rated.work.tokens is None else "tokens"
    rows = [[cell.format(size=size, time=time, rate=f"{rate}/s") for cell in _HEADER]]
    for i in indices:
        p, rates = findings.all_points[i], rated.of(i)
        per_s = getattr(rates, f"{rate}_per_s")
        space = findings.spaces[p.space]
        rows.append(
            [
                str(i + 1),
                f"{findings.needs[i] / size_bytes:.2f}{MARKS[findings.verdict(i)]}",
                f"{p.time_s / time_s:.2f}",
                _UNKNOWN if per_s is None else format_number(per_s),
                _UNKNOWN if rates.mfu is None else share_words(rates.mfu),
                f"{p.compute_s / time_s:.2f}",
                f"{p.communication_s / time_s:.2f}",
                space.mesh.label,
                str(space.micro_batches),
                f"{p.memory[0] / size_bytes:.2f}",
                brief_name(findings.names[i]),
                source_words(p.sources),
                p.proven,
                "<- " + ", ".join(marks[i]) if marks.get(i) else "",
            ]
        )
    unknown = [i for i in _IF_KNOWN if all(row[i] == _UNKNOWN for row in rows[1:])]
    return [[cell for i, cell in enumerate(row) if i not in unknown] for row in rows]


def frontier_text(findings: Findings) -> str:
    """Return the frontier's notable points as a table, then the jobs that people run today."""
    indices = list(notable(findings))
    jobs = [job.row for job in your_jobs(findings) if job.row is not None]
    rows = table_rows(findings, [*indices, *jobs])
    text = columns(rows, left=left_of(rows[0]))
    if words := unconstrained_words(findings):
        text += f"\n{words}"
    if len(indices) < len(findings.points):
        of = counted(len(findings.points), "point")
        text += f"\n{len(indices)} of {of}; all: tensoropt export DIR --csv FILE"
    return text


def units_of(findings: Findings) -> tuple[tuple[str, float], tuple[str, float]]:
    """Return ((name, bytes), (name, seconds)), the units in which a person reads this frontier: one for a
    whole column.
    """
    memory, time_s = findings.points[-1].memory_bytes, findings.points[0].time_s
    size = ("GiB", 2.0**30) if memory >= 2**30 else ("MiB", 2.0**20) if memory >= 2**20 else ("KiB", 2.0**10)
    return size, ("s", 1.0) if time_s >= 10 else ("ms", 1e-3) if time_s >= 1e-3 else ("µs", 1e-6)


_WIDTH, _HEIGHT = 720, 400
_LEFT_MARGIN, _RIGHT, _TOP, _BOTTOM = 70, 20, 44, 52
_INK, _GRID, _LINE, _MARK = "#1f2933", "#e4e7eb", "#2f6fb2", "#c2410c"
_TICKS = 6
"""Lines of the grid each way: so few that their labels have room in a picture of 720 by 400 units."""


def ticks(low: float, high: float) -> list[float]:
    """Return round numbers between two ends, at most about :data:`_TICKS`."""
    if high <= low:
        return [low]
    raw = (high - low) / _TICKS
    base = 10.0 ** math.floor(math.log10(raw))
    step = next(f * base for f in (1, 2, 5, 10) if f * base >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def frontier_svg(findings: Findings, path: str | os.PathLike[str], *, title: str) -> None:
    """Write the picture that :func:`draw_frontier` returns to a file."""
    write_text(path, draw_frontier(findings, title=title) + "\n")


def draw_frontier(findings: Findings, *, title: str, indices: Sequence[int] | None = None) -> str:
    """Return the SVG of memory against time as a staircase, with the ends and the knee named.

    Args:
        indices: ascending, of the points to draw; None for all. The ends and the knee must be among them.
    """
    (size_name, size), (time_name, second) = units_of(findings)
    drawn = range(len(findings.points)) if indices is None else indices
    xs = [findings.points[i].memory_bytes / size for i in drawn]
    ys = [findings.points[i].time_s / second for i in drawn]
    right, left_end, high, low = max(xs), min(xs), max(ys), min(ys)
    pad_x, pad_y = 0.04 * (right - left_end) or 0.1 * left_end, 0.06 * (high - low) or 0.1 * high
    x0, x1, y0, y1 = left_end - pad_x, right + 3 * pad_x, low - 2 * pad_y, high + pad_y

    def at(x: float, y: float) -> tuple[float, float]:
        across, up = (x - x0) / (x1 - x0), (y - y0) / (y1 - y0)
        return _LEFT_MARGIN + across * (_WIDTH - _LEFT_MARGIN - _RIGHT), _HEIGHT - _BOTTOM - up * (
            _HEIGHT - _TOP - _BOTTOM
        )

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'font-family="sans-serif" font-size="13" fill="{_INK}">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT_MARGIN}" y="26" font-size="16">{escape(title)}</text>',
    ]
    for x in ticks(x0, x1):
        px, base = at(x, y0)
        parts.append(f'<path d="M{px:.1f} {_TOP}V{base:.1f}" stroke="{_GRID}"/>')
        parts.append(f'<text x="{px:.1f}" y="{base + 18:.1f}" text-anchor="middle">{x:g}</text>')
    for y in ticks(y0, y1):
        left, py = at(x0, y)
        parts.append(f'<path d="M{left:.1f} {py:.1f}H{_WIDTH - _RIGHT}" stroke="{_GRID}"/>')
        parts.append(f'<text x="{left - 8:.1f}" y="{py + 4:.1f}" text-anchor="end">{y:g}</text>')
    middle = (_LEFT_MARGIN + _WIDTH - _RIGHT) / 2
    parts.append(
        f'<text x="{middle}" y="{_HEIGHT - 14}" text-anchor="middle">memory per device, {size_name}</text>'
        f'<text transform="translate(18 {_HEIGHT / 2}) rotate(-90)" text-anchor="middle">'
        f"time per step, {time_name}</text>"
    )
    stairs = "M{:.1f} {:.1f}".format(*at(xs[0], ys[0]))
    for x, y in zip(xs[1:], ys[1:], strict=True):
        stairs += "H{:.1f}V{:.1f}".format(*at(x, y))
    parts.append(f'<path d="{stairs}" fill="none" stroke="{_LINE}" stroke-width="1.5"/>')
    for x, y in zip(xs, ys, strict=True):
        px, py = at(x, y)
        parts.append(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="2" fill="{_LINE}"/>')
    for index, words in marks_of(findings).items():
        point = findings.points[index]
        px, py = at(point.memory_bytes / size, point.time_s / second)
        last = index == len(findings.points) - 1 and index > 0
        # The stairs come from above left: the last point's words stand below them, all others above.
        anchor, across, down = ("end", 4, 22) if last else ("start", 10, -10)
        figures = f"{format_bytes(point.memory_bytes)}, {format_seconds(point.time_s)}"
        label = f"{', '.join(words)}: {figures}"
        parts.append(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="5" fill="{_MARK}"/>')
        parts.append(
            f'<text x="{px + across:.1f}" y="{py + down:.1f}" text-anchor="{anchor}">{escape(label)}</text>'
        )
    return "\n".join([*parts, "</svg>"])
