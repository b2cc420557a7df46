"""``why``: the bottleneck of a point of a saved frontier, and what would make it faster."""

from __future__ import annotations

import argparse
from typing import Any

from tensoropt.cli.arguments import Answer, Verb, add_folder, add_point, limits, writable_folder
from tensoropt.console import ProgressDisplay
from tensoropt.errors import TensorOptError


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    add_folder(verb)
    add_point(verb.add_mutually_exclusive_group(), memory=False)
    verb.add_argument(
        "--memory",
        metavar="24GiB",
        help="the budget per device that every answer must fit; default: what the point needs. Alone: the "
        "fastest point within it",
    )
    verb.add_argument(
        "--deep",
        metavar="CHANGE",
        help="explore a change from the saved operator graph: bandwidth:LEVEL, bandwidth:all, bfloat16, "
        "micro-batches:N, devices:N; without it, the answer lists the possible changes",
    )
    verb.add_argument("--out", metavar="DIR", help="with --deep: folder for the exploration")


def answer(options: argparse.Namespace, progress: ProgressDisplay) -> Answer:
    """Return the reasons why a point is not faster; with ``--deep``, explore one change first."""
    wanted = limits(options)
    if (options.deep is None) != (options.out is None):
        raise TensorOptError("--deep CHANGE explores and --out DIR says where to: give both, or neither")
    from tensoropt.report.why import why_lines
    from tensoropt.saved import opened, why

    exploration = opened(options.dir)
    reasons = why(exploration, options.point, folder=str(options.dir), **wanted)
    out = None
    if options.deep:
        reasons, out = explored(options, exploration, reasons, progress)
    data = {**reasons.to_dict(), "out": out}
    return Answer(data, "\n".join([*why_lines(reasons), *([f"saved: {out}"] if out else [])]))


def explored(
    options: argparse.Namespace, exploration: Any, reasons: Any, progress: ProgressDisplay
) -> tuple[Any, str]:
    """Return (the answer completed by the exploration of a change, the folder of that exploration)."""
    from tensoropt.exploration.verified import Changed, fingerprint, save_changed
    from tensoropt.report.changes import change_named
    from tensoropt.report.levers import moved_words

    change = change_named(exploration, options.deep)
    with writable_folder(options.out) as folder:
        from tensoropt.api import explore_changed

        new = explore_changed(exploration, change.key, progress=progress, keep=True)
        new.save(folder)
        save_changed(folder, Changed(fingerprint(exploration), change.key, change.title))
    lever = reasons.answered(change.key, change.title, new)
    return reasons.with_explored(lever, moved_words(exploration, new)), str(folder)


VERB = Verb(
    "why", "say what binds a point of a saved frontier, and what would make it faster", add_arguments, answer
)
