"""``selftest``: everything that can be tried on this machine, with a report to send."""

from __future__ import annotations

import argparse
from pathlib import Path

from tensoropt.cli.arguments import Answer, Verb
from tensoropt.console import NUMBER, ProgressDisplay


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    where = verb.add_mutually_exclusive_group()
    where.add_argument(
        "--gpu",
        dest="device",
        action="store_const",
        const="gpu",
        help="the first GPU; default where there is one",
    )
    where.add_argument(
        "--cpu", dest="device", action="store_const", const="cpu", help="CPU ranks, and fake CUDA devices"
    )
    verb.add_argument(
        "--out", default="tensoropt-selftest", metavar="REPORT",
        help="write REPORT.json and REPORT.txt; default: %(default)s",
    )  # fmt: skip
    verb.add_argument(
        "--only",
        nargs="+",
        metavar="NAME",
        help="run only these checks (every report lists their names)",
    )
    verb.add_argument(
        "--minutes", type=NUMBER, default=10.0, metavar="N",
        help="minutes that all checks may take; what does not fit is left out, and the report says so; "
        "default: %(default)g",
    )  # fmt: skip
    verb.set_defaults(device="auto")


def answer(options: argparse.Namespace, progress: ProgressDisplay) -> Answer:
    """Run the self-test and return its report; exit code 1 if a check failed."""
    from tensoropt.selftest import run_selftest

    # People may give the name of one of the two files instead of their common stem.
    out = Path(options.out.removesuffix(".json").removesuffix(".txt"))
    report = run_selftest(
        options.device, only=options.only, minutes=options.minutes, out=out, progress=progress
    )
    text = f"{report}\n\nwritten to {out}.json and {out}.txt: no names of users, hosts or folders are in them"
    return Answer(report.to_dict(), text, 0 if report.ok else 1)


VERB = Verb(
    "selftest",
    "try everything that this machine can run, above all on a GPU, and write a report",
    add_arguments,
    answer,
)
