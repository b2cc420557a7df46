"""``why``: what binds a point of a saved frontier, and what would make it faster."""

from __future__ import annotations

import argparse
from typing import Any

from tensoropt.cli.arguments import Answer, Verb, add_folder, add_point, limits, point_option, writable_folder
from tensoropt.console import ProgressDisplay
from tensoropt.errors import TensorOptError


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """What the verb takes."""
    add_folder(verb)
    add_point(verb.add_mutually_exclusive_group(), memory=False)
    verb.add_argument(
        "--memory",
        metavar="24GiB",
        help="the budget per device, which everything is to fit; default: what the point needs. Alone: the "
        "fastest point within it",
    )
    verb.add_argument(
        "--deep",
        metavar="CHANGE",
        help="explore a change from the saved operator graph: bandwidth:LEVEL, bandwidth:all, bfloat16, "
        "micro-batches:N, devices:N; without it the answer lists those there are",
    )
    verb.add_argument("--out", metavar="DIR", help="with --deep: folder for the exploration")


def answer(options: argparse.Namespace, progress: ProgressDisplay) -> Answer:
    """Why a point is not faster; with ``--deep`` one change is explored first."""
    wanted = limits(options)
    if (options.deep is None) != (options.out is None):
        raise TensorOptError("--deep CHANGE explores and --out DIR says where to: give both, or neither")
    from tensoropt.report.why import why_lines
    from tensoropt.saved import opened, why

    found = opened(options.dir)
    told = why(found, point_option(options, found), folder=str(options.dir), **wanted)
    out = None
    if options.deep:
        told, out = explored(options, found, told, progress)
    data = {**told.to_dict(), "out": out}
    return Answer(data, "\n".join([*why_lines(told), *([f"saved: {out}"] if out else [])]))


def explored(
    options: argparse.Namespace, found: Any, told: Any, progress: ProgressDisplay
) -> tuple[Any, str]:
    """(the answer with what a change's exploration found, the folder where that is)."""
    from tensoropt.exploration.verified import Changed, fingerprint, save_changed
    from tensoropt.report.changes import change_named
    from tensoropt.report.levers import moved_words

    change = change_named(found, options.deep)
    with writable_folder(options.out) as folder:
        from tensoropt.api import explore_changed

        new = explore_changed(found, change.key, progress=progress, keep=True)
        new.save(folder)
        save_changed(folder, Changed(fingerprint(found), change.key, change.title))
    lever = told.answered(change.key, change.title, new)
    return told.with_explored(lever, moved_words(found, new)), str(folder)


VERB = Verb(
    "why", "say what binds a point of a saved frontier, and what would buy time", add_arguments, answer
)
