"""A frontier as a table: which points are shown, in which units, and what is said of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from tensoropt.console import columns
from tensoropt.plan.findings import Findings
from tensoropt.plan.plan_names import UNSPLIT, placed_words

SHOWN = 20
"""Rows of a printed frontier: a screenful."""
HEADER = [
    "point", "memory/{size}", "time/{time}", "compute/{time}", "comm./{time}", "mesh", "micro",
    "parameters/{size}", "operators split by", "figures", "gap", "",
]  # fmt: skip
LEFT = (8, 9, 11)
"""Columns that hold words."""


def shown_points(found: Findings, most: int = SHOWN) -> list[int]:
    """At most ``most`` points spread evenly over the logarithm of time, both ends and the knee among them."""
    count = len(found.points)
    if count <= most:
        return list(range(count))
    kept = {0, count - 1, found.knee}
    times = np.log([p.time_s for p in found.points])
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


def split_words(found: Findings, index: int) -> str:
    """Shares of operators (groups) split along the batch (data), otherwise (model), not at all (whole)."""
    point = found.all_points[index]
    space = found.spaces[point.space]
    if point.placed is not None:
        return placed_words(point.placed, ", ")
    if point.pipeline is not None:
        info, again = point.pipeline.info, len(point.pipeline.recomputed)
        recomputed = f", {again} blocks recomputed" if again else ""
        return f"{len(info.stages)} stages, {info.schedule}{recomputed}"
    if not space.mesh.shape:
        return "one device"
    known = any(group["micro"] not in UNSPLIT for group in space.groups.values())
    counts: Counter[str] = Counter()
    for which, (name, group) in zip(point.choice, space.groups.items(), strict=False):
        labels = space.labels(name, which)
        kinds = {_kind(label, group["micro"], known) for label in labels} - {"whole"}
        counts["+".join(sorted(kinds)) or "whole"] += 1
    total = sum(counts.values())
    parts = [f"{kind} {round(100 * n / total)} %" for kind, n in counts.most_common()]
    again = len(space.recomputed(point.choice))
    if again:
        parts.append(f"{again}/{len(set(space.regions.values()))} recomputed")
    return ", ".join(parts)


def _kind(label: str, batch: str, known: bool) -> str:
    """``data`` for a split along the batch, ``model`` for any other, ``split`` where that is not known."""
    if label in UNSPLIT:
        return "whole"
    if not known:
        return "split"
    return "data" if label == batch else "model"


def source_words(sources: dict[str, float]) -> str:
    """Where the time comes from, largest share first."""
    parts = [(share, name) for name, share in sources.items() if share >= 0.005]
    return ", ".join(f"{name} {round(100 * share)} %" for share, name in sorted(parts, reverse=True))


def table_rows(found: Findings, indices: Sequence[int]) -> list[list[str]]:
    """Header and one row of words per point."""
    marks = marks_of(found)
    (size, size_bytes), (time, time_s) = units_of(found)
    rows = [[cell.format(size=size, time=time) for cell in HEADER]]
    for i in indices:
        p = found.points[i]
        space = found.spaces[p.space]
        rows.append(
            [
                str(i + 1),
                f"{p.memory_bytes / size_bytes:.2f}",
                f"{p.time_s / time_s:.2f}",
                f"{p.compute_s / time_s:.2f}",
                f"{p.communication_s / time_s:.2f}",
                space.mesh.label,
                str(space.micro_batches),
                f"{p.memory[0] / size_bytes:.2f}",
                split_words(found, i),
                source_words(p.sources),
                p.proven,
                "<- " + ", ".join(marks[i]) if i in marks else "",
            ]
        )
    return rows


def frontier_text(found: Findings) -> str:
    """The frontier as a table, thinned for the eye."""
    indices = shown_points(found)
    text = columns(table_rows(found, indices), left=LEFT)
    if len(indices) < len(found.points):
        text += f"\n{len(indices)} of {len(found.points)} points shown; frontier.csv has them all"
    return text


def units_of(found: Findings) -> tuple[tuple[str, float], tuple[str, float]]:
    """((name, bytes), (name, seconds)) in which a person reads this frontier: one unit for a whole column."""
    memory, time_s = found.points[-1].memory_bytes, found.points[0].time_s
    size = ("GiB", 2.0**30) if memory >= 2**30 else ("MiB", 2.0**20) if memory >= 2**20 else ("KiB", 2.0**10)
    return size, ("s", 1.0) if time_s >= 10 else ("ms", 1e-3) if time_s >= 1e-3 else ("µs", 1e-6)


def marks_of(found: Findings) -> dict[int, list[str]]:
    """What is special about a point: ``leanest``, ``knee``, ``fastest``."""
    marks: dict[int, list[str]] = {}
    last = len(found.points) - 1
    for index, word in ((0, "leanest"), (found.knee, "knee"), (last, "fastest")):
        marks.setdefault(index, []).append(word)
    return marks
