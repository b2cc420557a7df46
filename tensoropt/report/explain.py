"""A point's detail, and a recosted frontier, as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tensoropt.console import columns
from tensoropt.exploration.exploration import Exploration
from tensoropt.exploration.facts import host_words
from tensoropt.report.step_parts import Detail, Part, Share, part_rows
from tensoropt.simulate.recording import EdgeRow, OperatorRow
from tensoropt.units import format_bytes, format_seconds


def detail_lines(detail: Detail, top: int) -> list[str]:
    """Return the headline, the breakdown, and the operators and reshardings that cost most; then the sums of
    the operators and of what is beside them, or if devices do different things, what each has."""
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
    lines += ["", "what the step goes into", parts_table(detail.parts)]
    title = "; ".join(filter(None, ("operators that take longest", step.kind.rows)))
    lines += ["", _counted(title, top, len(operators)), _operators(operators[:top])]
    if detail.places:
        lines += ["", step.kind.each, _table(detail.places)]
    else:
        lines += ["", "all of it", _shares(detail)]
    edges = sorted(detail.edges, key=lambda e: e.seconds, reverse=True)
    if edges:
        lines += ["", _counted("reshardings that take longest", top, len(edges)), _edges(edges[:top])]
    return lines


def parts_table(parts: Sequence[Part]) -> str:
    """Return the parts of a step with their shares of it; parts that are not named are summed."""
    rows = [[title, format_seconds(s), f"{100 * share:.1f} %"] for title, s, share in part_rows(parts)]
    return columns([["the step", "time", "share"], *rows], left=(0,))


def _counted(title: str, top: int, count: int) -> str:
    return f"{title} ({min(top, count)} of {count})"


def _seconds(row: OperatorRow) -> float:
    return row.compute_s + row.copies_s + row.communication_s


def _operators(rows: Sequence[OperatorRow]) -> str:
    head = ["group", "module", "split by", "forward + backward", "forward", "backward", "copies", "comm."]
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
    operators, others = detail.shares()
    sums = [
        [sum(figures) for figures in zip(*map(_figures, rows), strict=True)]
        for rows in (operators, (*operators, *others))
    ]
    return _table(
        (
            Share(f"{len(operators)} operators", *sums[0]),
            *(share for share in others if any(abs(x) > 1e-12 for x in _figures(share))),
            Share("total", *sums[1]),
        )
    )


def _table(shares: Sequence[Share]) -> str:
    table = [["", "memory", "compute", "comm."]]
    for share in shares:
        memory, compute_s, sent_s = _figures(share)
        table.append([share.title, format_bytes(memory), format_seconds(compute_s), format_seconds(sent_s)])
        if share.idle_s is not None:
            table[0][4:], table[-1][4:] = ["idle"], [format_seconds(share.idle_s)]
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
    """The point at an index of a saved frontier at current costs; ``reason`` says why it could not be
    costed."""

    index: int
    memory_bytes: float | None
    time_s: float | None
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain data, the point by its number."""
        fields = asdict(self)
        return {"point": fields.pop("index") + 1, **fields}


def recosted_lines(before: Exploration, after: Exploration, recosted: Sequence[Recosted]) -> list[str]:
    """Say what became of the old points, and what a new search changed."""
    costed = [r for r in recosted if r.time_s is not None]
    lines = [f"{len(costed)} of {len(recosted)} old strategies at the new costs:"]
    if costed:
        changes = sorted((r.time_s or 0.0) / before.points[r.index].time_s - 1 for r in costed)
        middle = changes[len(changes) // 2]
        lines[0] += (
            f" time changes by {100 * changes[0]:+.1f} % to {100 * changes[-1]:+.1f} %, median "
            f"{100 * middle:+.1f} %"
        )
        fastest = min(r.time_s or 0.0 for r in costed)
        lines.append(
            f"fastest of them {format_seconds(fastest)}, fastest found by searching again "
            f"{format_seconds(after.points[-1].time_s)}"
        )
    lines += [f"not costed: {reason}" for reason in dict.fromkeys(r.reason for r in recosted if r.reason)]
    return lines
