"""Verbs that search: ``explore`` and ``compare``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from tensoropt.cli.answer import Answer
from tensoropt.cli.question import explored, writable_folder
from tensoropt.console import Progress, columns
from tensoropt.errors import InfeasibleError, TensorOptError
from tensoropt.units import format_bytes, format_seconds, parse_bytes


def explore(options: argparse.Namespace, progress: Progress) -> Answer:
    if options.devices:
        return profiled(options, progress)
    memory_bytes = parse_bytes(options.memory) if options.memory else None
    folder, found = explored(options, progress, memory_bytes)
    from tensoropt.report.table import frontier_text, points_data, summary_lines

    data = {
        "out": str(folder),
        "files": ["exploration.json", "points.npz", "frontier.csv"],
        "model": found.model.model_dump(mode="json"),
        "settings": dict(found.settings),
        "points": points_data(found),
        "report": dict(found.report),
    }
    text = "\n".join(
        [
            frontier_text(found),
            "",
            *summary_lines(found),
            f"saved: {folder}/frontier.csv and all that `tensoropt choose {folder} --memory ...` needs",
        ]
    )
    return data, text, 0


def profiled(options: argparse.Namespace, progress: Progress) -> Answer:
    """Profiling mode: the same question on several numbers of devices."""
    from tensoropt.cluster import load_cluster

    sizes = part_sizes(options.devices, load_cluster(options.cluster))
    memory_bytes = parse_bytes(options.memory) if options.memory else None
    found, refused = [], []
    with writable_folder(options.out) as folder:
        for number, size in enumerate(sizes):
            progress("devices", number, len(sizes), str(size))
            part = argparse.Namespace(**vars(options))
            part.cluster, part.out = f"{options.cluster}[{size}]", str(folder / f"{size}-devices")
            try:
                found.append(explored(part, progress, memory_bytes)[1])
            except InfeasibleError as error:
                refused.append(f"{size} devices: {error}")
        progress("devices", len(sizes), len(sizes), "")
        if not found:
            raise InfeasibleError("; ".join(refused))
    data, text = profile_answer(found)
    data = {"out": str(folder), "refused": refused, **data}
    return data, "\n".join([text, *refused, f"saved: {folder}/N-devices, one exploration each"]), 0


def part_sizes(text: str, cluster: Any) -> tuple[int, ...]:
    """``auto`` or ``1,2,4`` as numbers of devices that are parts of a cluster."""
    if text == "auto":
        return tuple(cluster.part_sizes)
    try:
        wanted = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise TensorOptError(f"--devices '{text}' is neither auto nor a list such as 1,2,4") from None
    return tuple(cluster.subset(size).device_count for size in wanted)


def profile_answer(family: Sequence[Any]) -> tuple[dict[str, Any], str]:
    """Devices × memory → time, as data and as a table."""
    from dataclasses import asdict

    from tensoropt.plan.device_sweep import profile

    found = profile(family)
    rows = [["devices", "kind", *(f"<= {format_bytes(b)}" for b in found.budgets_bytes)]]
    for row in found.rows:
        cells = ("-" if cell is None else format_seconds(cell.time_s) for cell in row.cells)
        rows.append([str(row.devices), row.kind, *cells])
    return {"profile": asdict(found)}, columns(rows, left=(1,))


def compare(options: argparse.Namespace, progress: Progress) -> Answer:
    limits = [parse_bytes(part) for part in options.memory.split(",")] if options.memory else [None]
    from tensoropt.planners.compare import asked

    asked(options.planners)  # an unknown name is refused before anything is computed
    folder, found = explored(options, progress, None, planners=options.planners, limits=limits)
    from tensoropt.plan.export import write_comparison_csv
    from tensoropt.report.table import comparison_text

    written = []
    if folder is not None:
        write_comparison_csv(found, folder / "comparison.csv")
        written.append(f"saved: {folder} (exploration, frontier.csv, comparison.csv)")
    if options.csv:
        write_comparison_csv(found, options.csv)
        written.append(f"saved: {options.csv}")
    data = {"comparison": [dict(row) for row in found.comparison], "points": len(found.points)}
    return data, "\n".join([comparison_text(found), *written]), 0
