"""``export``: a saved frontier as CSV, a point of it as a decision sheet."""

from __future__ import annotations

import argparse
from typing import Any

from tensoropt.cli.arguments import (
    OF_AMOUNT,
    Answer,
    Verb,
    add_amount,
    add_folder,
    add_headroom,
    amount_option,
    point_option,
    tariff_option,
)
from tensoropt.console import ProgressDisplay
from tensoropt.errors import TensorOptError
from tensoropt.units import parse_bytes


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    add_folder(verb)
    verb.add_argument("--csv", metavar="FILE", help="one row per point")
    verb.add_argument("--strategies", metavar="FILE", help="with --csv: one row per point and operator")
    sheet = verb.add_argument_group("decision sheet")
    sheet.add_argument(
        "--sheet", metavar="FILE.html", help="one page to print: why a point was chosen, and over what"
    )
    sheet.add_argument(
        "--point", type=int, metavar="N", help="its number, from 1; default: the fastest that fits --memory"
    )
    sheet.add_argument(
        "--memory", metavar="24GiB", help="the budget per device; default: the device's memory"
    )
    add_headroom(verb)
    add_amount(verb)


def answer(options: argparse.Namespace, progress: ProgressDisplay) -> Answer:
    """Write the requested files; return what was written, and where."""
    if not options.csv and not options.sheet:
        raise TensorOptError(
            "nothing to write: give --csv FILE for the frontier, --sheet FILE.html for a point"
        )
    if options.strategies and not options.csv:
        raise TensorOptError("--strategies is written beside --csv; give both")
    of_sheet = ("point", "memory", "headroom", *OF_AMOUNT)
    alone = [name.replace("_", "-") for name in of_sheet if getattr(options, name) not in (None, "", [])]
    if alone and not options.sheet:
        raise TensorOptError(f"--{alone[0]} is for --sheet; give a FILE.html, or leave it out")
    data: dict[str, Any] = {"csv": options.csv, "strategies": options.strategies, "sheet": options.sheet}
    lines = []
    from tensoropt.saved import export_csv, opened

    exploration = opened(options.dir)
    data["points"] = len(exploration.points)
    sheet = _sheet(options, exploration) if options.sheet else None
    if options.csv:
        export_csv(exploration, options.csv, strategies=options.strategies)
        lines.append(f"{len(exploration.points)} points written to {options.csv}")
    if options.strategies:
        lines.append(f"their strategies written to {options.strategies}")
    if sheet is not None:
        from tensoropt.saved import export_sheet

        point = export_sheet(exploration, options.sheet, **sheet)
        data["point"] = point + 1
        lines.append(f"the decision sheet of {exploration.title(point)} written to {options.sheet}")
    return Answer(data, "\n".join(lines))


def _sheet(options: argparse.Namespace, exploration: Any) -> dict[str, Any]:
    """Return the arguments of the decision sheet; wrong values are refused before anything is written."""
    from tensoropt.cluster import Cluster
    from tensoropt.question.question import headroom_bytes

    point = point_option(options, exploration)
    whole = Cluster.from_dict(exploration.cluster).memory_bytes if options.headroom else 0
    return {
        "point": point,
        "memory_bytes": parse_bytes(options.memory) if options.memory is not None else None,
        "headroom": headroom_bytes(options.headroom, whole) / whole if options.headroom else 0.0,
        "tariff": tariff_option(options),
        "amount": amount_option(options),
        "folder": str(options.dir),
    }


VERB = Verb("export", "write a saved frontier as CSV, a point as a decision sheet", add_arguments, answer)
