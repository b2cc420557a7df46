"""A point's detail, and a recosted frontier, as text.

An exploration as text: what was found out on the way, one point in words, planners side by side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tensoropt.console import columns
from tensoropt.plan.exploration import Exploration
from tensoropt.plan.export import Compared, compared, limits_asked
from tensoropt.plan.facts import LISTED_NAMES, facts, host_words
from tensoropt.plan.facts_table import Fact, fact_lines, named
from tensoropt.plan.figure_rows import FigureRow
from tensoropt.plan.figures import worded
from tensoropt.plan.frontier_table import source_words
from tensoropt.plan.point import FRONTIER
from tensoropt.report.step_parts import Detail, Part, Share, shown_parts
from tensoropt.simulate.recording import EdgeRow, OperatorRow
from tensoropt.units import format_bytes, format_seconds


def timing_words(exploration: Exploration) -> str:
    """Say what was timed; if nothing was, say why not, and what the figures rest on instead."""
    report = exploration.report
    known, failed = report.get("workloads_measured", 0), report.get("failed_measurements", 0)
    pieces = f"{known} distinct pieces of work"
    if report.get("median_spread") is not None:
        pieces += f", median spread {100 * report['median_spread']:.0f} %"
    if failed:
        pieces += f", {failed} failed, see the notes"
    if known and report.get("timed_now", True):
        return f"timed: {pieces}"
    # If timing was not wanted, its absence does not mean that the device is absent.
    refused = exploration.settings.get("measure") == "never"
    absent = f"{report.get('device', 'the device')} is not here"
    reason = "timing was refused (--measure never)" if refused else absent
    bases = [f"the profile store, which knows {pieces}"] if known else []
    bases += ["a fit to what it knows"] if report.get("fit") else []
    bases += [] if known or report.get("fit") else ["data sheets"]
    return f"nothing was timed: {reason}; figures are of {' and '.join(bases)}"


def fit_lines(errors: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say how well timed work predicts work that was not timed, by class of operator."""
    if not errors:
        return []
    lines = [
        "fitted, what was not timed; error on timed work that the fit had not seen, median (9 of 10 below):"
    ]
    for error in errors:
        lines.append(
            f"  {error['cls']} {error['direction']}: {100 * error['median']:.0f} % "
            f"({100 * error['ninth_decile']:.0f} %), from {error['samples']}"
        )
    return lines


def summary_lines(exploration: Exploration) -> list[str]:
    """Return what was found out about the model and the search, in a few readable lines."""
    report: dict[str, Any] = dict(exploration.report)
    lines = [
        f"model: {exploration.model.parameters:,} parameters, {report['operators']} operators in "
        f"{report['groups']} groups, {report['hubs']} tensors with several readers, "
        f"{report['shared_parameters']} tied parameters"
    ]
    unknown = report.get("operators_without_rule") or []
    if unknown:
        lines.append(f"operators without a rule (kept whole): {', '.join(unknown)}")
    discovered = report.get("operators_discovered") or {}
    lines += [f"discovered rule for {target}: splits {found}" for target, found in discovered.items()]
    if not unknown and not discovered:
        lines.append("every operator has a rule")
    if "split_share_of_flops" in report:
        lines.append(
            f"{100 * report['split_share_of_flops']:.1f} % of the FLOPs can be split in two or more ways"
        )
    if report.get("micro_batches_refused"):
        lines.append(f"micro-batches refused: {report['micro_batches_refused']}")
    notes = [*report.get("notes", []), *(n for s in exploration.spaces for n in s.notes)]
    lines += [f"note: {note}" for note in dict.fromkeys(notes)]
    bound = sum(p.host_bound for p in exploration.points)
    if bound:
        lines.append(
            f"host-bound: {bound} of {len(exploration.points)} points, whose device waits for the host that "
            "issues its work"
        )
    lines.append(timing_words(exploration))
    lines += fit_lines(report.get("fit") or [])
    seconds = report.get("seconds", {})
    if "points_before_judging" in report:
        own = sum(p.planner == FRONTIER and p.record is None for p in exploration.points)
        lines.append(_simulated_words(report, own))
    lines.append("seconds: " + ", ".join(f"{k} {v:.1f}" for k, v in seconds.items()))
    return lines


def _simulated_words(report: Mapping[str, Any], shown: int) -> str:
    """Say how many strategies were found, simulated and left out."""
    simulated = report["points_before_judging"]
    found = report.get("points_found", simulated)
    unbeaten = report.get("points_unbeaten", shown)
    of = f"all {simulated:,}" if found <= simulated else f"{simulated:,} of {found:,}"
    rest = f"; {shown:,} of these stand for all" if unbeaten > shown else ""
    return f"simulated: {of} strategies that the search found; {unbeaten:,} are beaten by none{rest}"


def point_lines(row: FigureRow) -> list[str]:
    """Return one point in words."""
    point, known = row.point, facts(row)
    words = worded(point, "compute {compute_s}, communication {communication_s}")
    known["time"] = Fact("time", words, source=source_words(point.sources))
    return [
        worded(point, f"{row.found.title(row.index)}: {{memory_bytes}} per device, {{time_s}} per step"),
        f"  {row.name}",
        f"  mesh {row.space.mesh.label}, {row.space.micro_batches} micro-batch(es); operators split by: "
        f"{known['split by'].words}",
        *fact_lines(named(known, "memory", "allocator", "time", "host", *LISTED_NAMES)),
    ]


def run_line(devices: int, path: str, *, gpus: bool = False) -> str:
    """Return the command that runs a plan without a script; a plan for GPUs needs an option to run on CPU
    ranks."""
    line = f"torchrun --nproc-per-node {devices} -m tensoropt.execute {path} --steps 20"
    return f"{line} --cpu" if gpus else line


_COMPARISON_HEADER = ["planner", "limit", "memory", "time", "points", "search", "gap", ""]


GAP_CAPTION = "gap: time over the best known within the same memory, by the frontier or any planner here"


def comparison_text(exploration: Exploration) -> str:
    """Return a row per limit for the frontier and each planner, refusals in words, and what a gap is."""
    rows = [_COMPARISON_HEADER]
    for limit in limits_asked(exploration):
        rows += [_comparison_row(row) for row in compared(exploration, limit)]
    return "\n".join([columns(rows, left=(0, 7)), GAP_CAPTION])


def _comparison_row(row: Compared) -> list[str]:
    limit = format_bytes(row.limit_bytes) if row.limit_bytes is not None else "-"
    notes = "; ".join(row.notes)
    spent = format_seconds(row.search_s)
    if row.time_s is None or row.memory_bytes is None:
        return [row.planner, limit, "-", "-", "0", spent, "-", notes]
    gap = "-" if row.gap is None else f"{100 * row.gap:+.1f} %"
    figures = [format_bytes(row.memory_bytes), format_seconds(row.time_s), str(row.points)]
    return [row.planner, limit, *figures, spent, gap, notes]


def detail_lines(detail: Detail, top: int, *, summed: bool = True) -> list[str]:
    """Return the headline, the breakdown, and the operators and reshardings that cost most.

    Args:
        summed: whether to add the sums of the operators and of what is beside them; not for placed plans and
            pipelines, whose devices do different things.
    """
    step = detail.step
    shares = ", ".join(f"{name} {100 * share:.0f} %" for name, share in detail.sources.items() if share)
    lines = [
        detail.headline(),
        "",
        f"step {format_seconds(step.time_s)} = compute {format_seconds(step.compute_s)} + waiting for "
        f"communication {format_seconds(step.exposed_s)} + idle {format_seconds(step.idle_s)}; hidden "
        f"communication {format_seconds(step.hidden_s)}",
        *([f"host {host_words(step)}"] if step.host_s else []),
        f"assumed: {detail.overlap}; figures: {shares}",
    ]
    operators = sorted(detail.operators, key=_seconds, reverse=True)
    what = "operators that take longest"
    if detail.by_stage:
        what = "stages; seconds in the schedule, waits included"
    lines += ["", "what the step goes into", parts_table(detail.parts)]
    lines += ["", _counted(what, top, len(operators)), _operators(operators[:top], by_stage=detail.by_stage)]
    if summed:
        lines += ["", "all of it", _shares(detail)]
    if detail.places:
        lines += ["", "each place" if detail.by_stage else "each device", _table(detail.places)]
    edges = sorted(detail.edges, key=lambda e: e.seconds, reverse=True)
    if edges:
        lines += ["", _counted("reshardings that take longest", top, len(edges)), _edges(edges[:top])]
    return lines


def parts_table(parts: Sequence[Part]) -> str:
    """Return the parts of a step with their shares of it; parts that are not named are summed."""
    rows = [[p.title, format_seconds(p.seconds), f"{100 * p.share:.1f} %"] for p in shown_parts(parts)]
    return columns([["the step", "time", "share"], *rows], left=(0,))


def _counted(what: str, top: int, count: int) -> str:
    return f"{what} ({min(top, count)} of {count})"


def _seconds(row: OperatorRow) -> float:
    return row.compute_s + row.communication_s


def _operators(rows: Sequence[OperatorRow], *, by_stage: bool) -> str:
    # A stage's seconds include its waits.
    head = [
        "group",
        "module",
        "split by",
        "in all" if by_stage else "compute",
        "forward",
        "backward",
        "copies",
        "comm.",
    ]
    table = [[*head, "parameters", "kept", "figures"]]
    for r in rows:
        split = ", ".join(f"{axis}: {label}" for axis, label in r.configuration.items())
        table.append(
            [
                r.group, r.module, split or "-", *map(format_seconds, (
                    r.compute_s, r.forward_s, r.backward_s, r.copies_s, r.communication_s
                )),
                format_bytes(r.parameters_bytes), format_bytes(r.kept_bytes), r.source,
            ]
        )  # fmt: skip
    return columns(table, left=(0, 1, 2, 10))


def _shares(detail: Detail) -> str:
    """Return what all operators together and what is beside them take, and the total, which is the
    headline."""
    operators, beside = detail.shares()
    sums = [
        [sum(figures) for figures in zip(*map(_figures, rows), strict=True)]
        for rows in (operators, (*operators, *beside))
    ]
    return _table(
        (
            Share(f"{len(operators)} operators", *sums[0]),
            *(share for share in beside if any(abs(x) > 1e-12 for x in _figures(share))),
            Share("total", *sums[1]),
        )
    )


def _table(shares: Sequence[Share]) -> str:
    table = [["", "memory", "compute", "comm."]]
    for share in shares:
        memory, compute_s, sent_s = _figures(share)
        table.append([share.title, format_bytes(memory), format_seconds(compute_s), format_seconds(sent_s)])
    return columns(table, left=(0,))


def _figures(share: Share) -> tuple[float, float, float]:
    return share.memory_bytes, share.compute_s, share.communication_s


def _consumer(row: EdgeRow) -> str:
    return row.consumer or ("hub" if row.kind == "activation" else row.kind)


def _edges(rows: Sequence[EdgeRow]) -> str:
    table = [["tensor", "from", "to", "time", "bytes", "placement", "collectives"]]
    for r in rows:
        table.append(
            [
                r.tensor, r.producer or r.kind, _consumer(r), format_seconds(r.seconds),
                format_bytes(r.bytes), f"{','.join(r.source)} -> {','.join(r.target)}",
                "; ".join(r.collectives) or "none",
            ]
        )  # fmt: skip
    return columns(table, left=(0, 1, 2, 5, 6))


@dataclass(frozen=True)
class Recosted:
    """A point of a saved frontier at current costs; ``reason`` says why it could not be costed."""

    point: int
    memory_bytes: float | None
    time_s: float | None
    reason: str = ""


def recosted_lines(before: Exploration, found: Exploration, again: Sequence[Recosted]) -> list[str]:
    """Say what became of the old points, and what a new search changed."""
    costed = [r for r in again if r.time_s is not None]
    lines = [f"{len(costed)} of {len(again)} old strategies at the new costs:"]
    if costed:
        changes = sorted((r.time_s or 0.0) / before.points[r.point].time_s - 1 for r in costed)
        middle = changes[len(changes) // 2]
        lines[0] += (
            f" time changes by {100 * changes[0]:+.1f} % to {100 * changes[-1]:+.1f} %, median "
            f"{100 * middle:+.1f} %"
        )
        fastest = min(r.time_s or 0.0 for r in costed)
        lines.append(
            f"fastest of them {format_seconds(fastest)}, fastest found by searching again "
            f"{format_seconds(found.points[-1].time_s)}"
        )
    lines += [f"not costed: {reason}" for reason in dict.fromkeys(r.reason for r in again if r.reason)]
    return lines
