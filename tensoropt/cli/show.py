"""``show``: the reasons for the costs of a point of a saved frontier."""

from __future__ import annotations

import argparse

from tensoropt.cli.arguments import (
    Answer,
    Verb,
    add_amount,
    add_folder,
    add_notes,
    add_point,
    limits,
    told_point,
)
from tensoropt.console import WHOLE, ProgressDisplay
from tensoropt.errors import TensorOptError
from tensoropt.units import parse_seconds


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    add_folder(verb)
    add_point(verb.add_mutually_exclusive_group())
    verb.add_argument(
        "--trace", metavar="FILE", help="write its timeline for ui.perfetto.dev, chrome://tracing"
    )
    verb.add_argument(
        "--owners",
        nargs="?",
        const="",
        metavar="AT",
        help="the owners of the memory at AT of the step (seconds, 350ms); without AT, at its peak",
    )
    verb.add_argument(
        "--unordered",
        action="store_true",
        help="of a placed plan also the step without its order, every device taking what is ready first",
    )
    verb.add_argument(
        "--top", type=WHOLE, default=10, metavar="N", help="operators and edges listed; default: %(default)s"
    )
    verb.add_argument("--all", action="store_true", help="list all points of the frontier instead of one")
    add_notes(verb)
    add_amount(verb)


def answer(options: argparse.Namespace, progress: ProgressDisplay) -> Answer:
    """Return the detail of one point, or all points as a table."""
    wanted = limits(options)
    at_s = parse_seconds(options.owners) if options.owners else None
    if options.top < 1:
        raise TensorOptError(f"--top {options.top} lists nothing; give at least 1")
    from tensoropt.exploration.figure_rows import points_data
    from tensoropt.exploration.frontier_table import frontier_text
    from tensoropt.report.explain import detail_lines
    from tensoropt.report.owners import point_owners
    from tensoropt.report.step_parts import write_trace
    from tensoropt.report.table import summary_lines
    from tensoropt.report.unordered import point_unordered
    from tensoropt.saved import opened, show

    exploration = opened(options.dir)
    if options.all:
        return Answer({"points": points_data(exploration)}, frontier_text(exploration, every=True))
    detail = show(exploration, options.point, **wanted)
    rated_lines, told = told_point(options, exploration, detail.index)
    lines = [
        *rated_lines,
        "",
        *detail_lines(detail, options.top),
    ]
    if options.notes:
        lines += ["", *summary_lines(exploration, every=True)]
    if options.trace:
        write_trace(detail.trace(), options.trace)
        lines.append(
            f"trace written to {options.trace}; open it at https://ui.perfetto.dev or chrome://tracing"
        )
    owned = None
    if options.owners is not None:
        of_point = point_owners(exploration, detail.index)
        owned = of_point.at(None if at_s is None else of_point.number_at(at_s))
        lines += ["", *owned.lines(options.top), *([of_point.note] if of_point.note else [])]
    unordered = None
    if options.unordered:
        unordered = point_unordered(exploration, detail.index)
        lines += ["", *unordered.lines()]
    data = {
        **detail.to_dict(),
        "headline": detail.headline(),
        "trace": options.trace,
    }
    if owned is not None:
        data["owners"] = owned.to_dict()
    if unordered is not None:
        data["unordered"] = unordered.to_dict()
    data |= told
    return Answer(data, "\n".join(lines))


VERB = Verb("show", "say why a point of a saved frontier costs what it costs", add_arguments, answer)
