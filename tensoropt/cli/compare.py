"""``compare``: published planners beside the frontier of a model."""

from __future__ import annotations

import argparse

from tensoropt.cli.question import add_question, explored
from tensoropt.cli.verb import Answer, Verb
from tensoropt.console import ProgressDisplay
from tensoropt.units import parse_bytes


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """What the verb takes."""
    add_question(verb)
    verb.add_argument(
        "--planners",
        default="all",
        metavar="all|a,b",
        help="see: tensoropt list planners; default: %(default)s",
    )
    verb.add_argument(
        "--memory", metavar="8GiB,24GiB", help="limits per device; default: all trade-offs a planner knows"
    )
    verb.add_argument("--out", metavar="DIR", help="save the exploration with all points, and the table")
    verb.add_argument("--csv", metavar="FILE", help="write the table as CSV")


def answer(options: argparse.Namespace, progress: ProgressDisplay) -> Answer:
    """A row per planner and limit beside the frontier."""
    limits = [parse_bytes(part) for part in options.memory.split(",")] if options.memory else [None]
    from tensoropt.planners.compare import asked

    asked(options.planners)  # an unknown name is refused before anything is computed
    folder, found = explored(options, progress, None, planners=options.planners, limits=limits)
    from tensoropt.plan.compared import compared, limits_asked
    from tensoropt.plan.export import write_comparison_csv
    from tensoropt.report.table import comparison_text

    written = []
    if folder is not None:
        write_comparison_csv(found, folder / "comparison.csv")
        written.append(f"saved: {folder} (exploration, frontier.csv, comparison.csv)")
    if options.csv:
        write_comparison_csv(found, options.csv)
        written.append(f"saved: {options.csv}")
    rows = [row.to_dict() for limit in limits_asked(found) for row in compared(found, limit)]
    data = {"comparison": rows, "points": len(found.points)}
    return Answer(data, "\n".join([comparison_text(found), *written]))


VERB = Verb(
    "compare",
    "run published planners beside the frontier, all evaluated by one simulator",
    add_arguments,
    answer,
)
