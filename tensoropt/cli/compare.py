"""``compare``: published planners beside the frontier of a model."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from tensoropt.cli.arguments import Answer, Verb, add_question, explored, question_option
from tensoropt.console import ProgressDisplay


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """What the verb takes."""
    add_question(verb, but=("memory_bytes",))
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
    return compare(question_option(options), progress, options.out, options.csv)


def compare(question: Any, progress: ProgressDisplay, out: str | None, csv: str | None = None) -> Answer:
    """The answer to a question about planners; the result is saved in ``out``, the table in ``csv``."""
    from tensoropt.planners.compare import asked

    asked(question.planners)  # an unknown name is refused before anything is computed
    found = explored(question, progress, out)
    from tensoropt.exploration.export import compared, limits_asked, write_comparison_csv
    from tensoropt.report.table import comparison_text

    written = []
    if out:
        write_comparison_csv(found, Path(out) / "comparison.csv")
        written.append(f"saved: {out} (exploration, frontier.csv, comparison.csv)")
    if csv:
        write_comparison_csv(found, csv)
        written.append(f"saved: {csv}")
    rows = [row.to_dict() for limit in limits_asked(found) for row in compared(found, limit)]
    data = {"comparison": rows, "points": len(found.points)}
    return Answer(data, "\n".join([comparison_text(found), *written]))


VERB = Verb(
    "compare",
    "run published planners beside the frontier, all evaluated by one simulator",
    add_arguments,
    answer,
)
