"""A frontier as a text table, one point per row, with units and remarks."""

from __future__ import annotations

from collections.abc import Sequence

from tensoropt.console import columns
from tensoropt.costs.device_fit import MARKS
from tensoropt.exploration.notable import notable, unconstrained_words
from tensoropt.exploration.rates import RatesOf
from tensoropt.exploration.your_jobs import your_jobs
from tensoropt.plan.findings import Findings
from tensoropt.plan.plan_names import brief_name
from tensoropt.units import counted, format_number, share_words

_HEADER = [
    "point", "needs/{size}", "time/{time}", "{rate}", "MFU", "compute/{time}", "comm./{time}", "mesh",
    "micro", "parameters/{size}", "plan", "figures", "gap", "",
]  # fmt: skip
_IF_KNOWN = (3, 4)
"""The columns that are left out if no point has a value."""
_WORDS = ("plan", "figures", "")
"""The columns that hold words."""
_UNKNOWN = "-"


def source_words(sources: dict[str, float]) -> str:
    """Return the share of the step time by source of the prediction: ``measured 90 %, data sheet 10 %``. The
    largest come first, those below 0.5 % are left out."""
    parts = [(share, name) for name, share in sources.items() if share >= 0.005]
    return ", ".join(f"{name} {round(100 * share)} %" for share, name in sorted(parts, reverse=True))


def left_of(header: Sequence[str]) -> tuple[int, ...]:
    """Return the indices of the text columns, which are aligned to the left."""
    return tuple(i for i, name in enumerate(header) if name in _WORDS)


def table_rows(findings: Findings, indices: Sequence[int]) -> list[list[str]]:
    """Return the cells of a header and of a row per point, with a remark last. Tokens (or else samples) per
    second of all devices, and MFU, have columns only if they are known."""
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
    """Return a text table of the frontier's notable points (fastest, leanest, ...) and of users' jobs."""
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
    """Return the units in which to show a frontier: (name, size in bytes) of the unit of memory, and (name,
    duration in seconds) of the unit of time."""
    memory, time_s = findings.points[-1].memory_bytes, findings.points[0].time_s
    size = ("GiB", 2.0**30) if memory >= 2**30 else ("MiB", 2.0**20) if memory >= 2**20 else ("KiB", 2.0**10)
    return size, ("s", 1.0) if time_s >= 10 else ("ms", 1e-3) if time_s >= 1e-3 else ("µs", 1e-6)
