"""``compare``: published planners compared with the frontier of a model."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from tensoropt.cli.arguments import Answer, Verb, add_question, explored, question_option
from tensoropt.console import ProgressDisplay


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    add_question(verb, comparing=True)
    verb.add_argument(
        "--planners",
        default="all",
        metavar="all|a,b",
        help="see: tensoropt list planners; default: %(default)s",
    )
    verb.add_argument(
        "--planner-option",
        action="append",
        default=[],
        metavar="PLANNER.OPTION=VALUE",
        help="a setting of a planner, such as netsplit.seconds=600; may be given several times",
    )
    verb.add_argument(
        "--memory", metavar="8GiB,24GiB", help="limits per device; default: all trade-offs a planner knows"
    )
    verb.add_argument("--out", metavar="DIR", help="save the exploration with all points, and the table")
    verb.add_argument("--csv", metavar="FILE", help="write the table as CSV")


def answer(options: argparse.Namespace, progress: ProgressDisplay) -> Answer:
    """Return a row per planner and limit, next to the frontier's."""
    return compare(question_option(options), progress, options.out, options.csv)


def compare(question: Any, progress: ProgressDisplay, out: str | None, csv: str | None = None) -> Answer:
    """Return the answer to a question about planners; save the exploration in ``out``, the table in
    ``csv``."""
    from tensoropt.planners.compare import requested_planners

    # An unknown name is refused before anything is computed.
    requested_planners(question.planners, question.planner_options)
    exploration = explored(question, progress, out)
    from tensoropt.exploration.export import compared, limits_asked, write_comparison_csv
    from tensoropt.report.table import comparison_text

    written = []
    if out:
        write_comparison_csv(exploration, Path(out) / "comparison.csv")
        written.append(f"saved: {out} (exploration, frontier.csv, comparison.csv)")
    if csv:
        write_comparison_csv(exploration, csv)
        written.append(f"saved: {csv}")
    rows = [row.to_dict() for limit in limits_asked(exploration) for row in compared(exploration, limit)]
    data = {"comparison": rows, "points": len(exploration.points)}
    return Answer(data, "\n".join([comparison_text(exploration), *written]))


VERB = Verb(
    "compare",
    "run published planners beside the frontier, all evaluated by one simulator",
    add_arguments,
    answer,
    measures=True,
)
