"""``export``: a saved frontier as CSV."""

from __future__ import annotations

import argparse

from tensoropt.cli.arguments import add_folder
from tensoropt.cli.verb import Answer, Verb
from tensoropt.console import ProgressDisplay


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """What the verb takes."""
    add_folder(verb)
    verb.add_argument("--csv", required=True, metavar="FILE", help="one row per point")
    verb.add_argument("--strategies", metavar="FILE", help="one row per point and operator")


def answer(options: argparse.Namespace, progress: ProgressDisplay) -> Answer:
    """How many points were written, and where."""
    from tensoropt.saved import export_csv

    found = export_csv(options.dir, options.csv, strategies=options.strategies)
    lines = [f"{len(found.points)} points written to {options.csv}"]
    if options.strategies:
        lines.append(f"their strategies written to {options.strategies}")
    data = {"points": len(found.points), "csv": options.csv, "strategies": options.strategies}
    return Answer(data, "\n".join(lines))


VERB = Verb("export", "write a saved frontier as CSV", add_arguments, answer)
