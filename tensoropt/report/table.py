"""An exploration as text: a summary with notes, a description of one point, and a comparison of planners."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tensoropt.console import columns
from tensoropt.exploration.exploration import Exploration
from tensoropt.exploration.export import Compared, compared, limits_asked
from tensoropt.exploration.facts import FIT, LISTED_NAMES, facts
from tensoropt.exploration.figure_rows import FigureRow
from tensoropt.exploration.notes import notes_of
from tensoropt.exploration.time_range import range_words
from tensoropt.plan.facts_table import fact_lines, named
from tensoropt.plan.figures import worded
from tensoropt.units import counted, format_bytes, format_seconds


def timing_words(exploration: Exploration) -> str:
    """Return how many workloads were timed; if none, why not, and from where the predictions come instead."""
    report = exploration.report
    measured, failed = report.get("workloads_measured", 0), report.get("failed_measurements", 0)
    pieces = f"{measured} distinct workloads"
    if report.get("median_spread") is not None:
        pieces += f", median spread {100 * report['median_spread']:.0f} %"
    if failed:
        pieces += f", {failed} failed, see the notes"
    if measured and report.get("timed_now", True):
        return f"timed: {pieces}"
    # If timing was not wanted, its absence does not mean that the device is absent.
    refused = exploration.settings.get("measure") == "never"
    absent = f"{report.get('device', 'the device')} is not here"
    reason = "timing was refused (--measure never)" if refused else absent
    bases = [f"the profile store, with timings of {pieces}"] if measured else []
    bases += ["a fit to the profile store's timings"] if report.get("fit") else []
    bases += [] if measured or report.get("fit") else ["data sheets"]
    return f"nothing was timed: {reason}; figures come from {' and '.join(bases)}"


def fit_lines(errors: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return lines of text on the cross-validation errors of the fits to timings, one per operator class and
    direction."""
    head = "what was not timed is fitted; the fit's error on held-out timings, median (90th percentile):"
    lines = [
        f"  {error['cls']} {error['direction']}: {100 * error['median']:.0f} % "
        f"({100 * error['ninth_decile']:.0f} %), from {error['samples']}"
        for error in errors
    ]
    return [head, *lines] if lines else []


def summary_lines(exploration: Exploration) -> list[str]:
    """Return lines on the model's size, on what the search left out, and on what was timed."""
    report: dict[str, Any] = dict(exploration.report)
    lines = [
        f"model: {exploration.model.parameters:,} parameters{_trained_words(exploration)}, "
        f"{report['operators']} operators"
    ]
    unknown = report.get("operators_without_rule") or []
    if unknown:
        lines.append(f"operators without a rule (kept whole): {', '.join(unknown)}")
    if report.get("micro_batches_refused"):
        lines.append(f"micro-batches refused: {report['micro_batches_refused']}")
    lines += [f"note: {note}" for note in notes_of(exploration, missing=True)]
    if "split_share_of_flops" in report:
        lines.append(
            f"{100 * report['split_share_of_flops']:.1f} % of the FLOPs can be split in two or more ways"
        )
    return [*lines, timing_words(exploration)]


def _trained_words(exploration: Exploration) -> str:
    model = exploration.model
    if model.trained in (None, model.parameters):
        return ""
    return f", {model.trained:,} of them trained" + (f" ({model.adapters})" if model.adapters else "")


def point_lines(row: FigureRow) -> list[str]:
    """Return lines of text that describe one point."""
    point = row.point
    between = f" ({said})" if (said := range_words(row.findings, row.index)) else ""
    title, needed = row.findings.title(row.index), format_bytes(row.needs)
    return [
        worded(point, f"{title}: {needed} per device, {{time_s}} per step") + between,
        f"  {row.name}",
        f"  mesh {row.space.mesh.label}, {counted(row.space.micro_batches, 'micro-batch', 'micro-batches')}",
        *fact_lines(named(facts(row), FIT, "memory", "time", "host", *LISTED_NAMES)),
    ]


def run_line(devices: int, path: str, *, gpus: bool = False) -> str:
    """Return the ``torchrun`` command that runs a plan; with ``gpus``, a plan for GPUs on CPU ranks."""
    line = f"torchrun --nproc-per-node {devices} -m tensoropt.execute {path} --steps 20"
    return f"{line} --cpu" if gpus else line


_COMPARISON_HEADER = ["planner", "limit", "needs", "time", "points", "search", "gap", ""]


_GAP_CAPTION = "gap: how much longer a step takes than with the fastest known plan that needs no more memory"


def comparison_text(exploration: Exploration) -> str:
    """Return a table of the best plan of the frontier and of each planner within each memory limit."""
    rows = [_COMPARISON_HEADER]
    for limit in limits_asked(exploration):
        rows += [_comparison_row(row) for row in compared(exploration, limit)]
    return "\n".join([columns(rows, left=(0, 7)), _GAP_CAPTION])


def _comparison_row(row: Compared) -> list[str]:
    limit = format_bytes(row.limit_bytes) if row.limit_bytes is not None else "-"
    notes = "; ".join(row.notes)
    spent = format_seconds(row.search_s)
    if row.time_s is None or row.needs_bytes is None:
        return [row.planner, limit, "-", "-", "0", spent, "-", notes]
    gap = "-" if row.gap is None else f"{100 * row.gap:+.1f} %"
    figures = [format_bytes(row.needs_bytes), format_seconds(row.time_s), str(row.points)]
    return [row.planner, limit, *figures, spent, gap, notes]
