"""``recost``: a saved exploration under current costs."""

from __future__ import annotations

import argparse

from tensoropt.cli.arguments import CLUSTER_HELP, Answer, Verb, add_folder, add_notes, writable_folder
from tensoropt.console import ProgressDisplay
from tensoropt.errors import TensorOptError


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    add_folder(verb)
    verb.add_argument("--out", required=True, metavar="DIR", help="folder for the result")
    add_notes(verb)
    verb.add_argument("--cluster", help="another cluster; default: the saved one. " + CLUSTER_HELP)
    verb.add_argument(
        "--planners", metavar="all|a,b", help="published planners to run too; see: tensoropt list planners"
    )
    verb.add_argument(
        "--only-beside",
        action="store_true",
        help="with --planners: reuse kept tables and frontiers if nothing has changed since, and leave out "
        "the figures of the old strategies under current costs",
    )


def answer(options: argparse.Namespace, progress: ProgressDisplay) -> Answer:
    """Return the frontier searched again, and the old strategies under its costs."""
    from tensoropt.saved import opened

    if options.only_beside and not options.planners:
        raise TensorOptError("--only-beside is for --planners; name some, or leave it out")
    before = opened(options.dir)
    from tensoropt.api import recost
    from tensoropt.exploration.figure_rows import points_data
    from tensoropt.exploration.frontier_table import frontier_text
    from tensoropt.exploration.verified import (
        COSTS,
        PLANNERS,
        Changed,
        fingerprint,
        only_planners_differ,
        save_changed,
    )
    from tensoropt.report.explain import recosted_lines
    from tensoropt.report.table import comparison_text, summary_lines

    with writable_folder(options.out) as folder:
        after, recosted = recost(
            before,
            cluster=options.cluster,
            progress=progress,
            planners=options.planners or (),
            keep=options.only_beside,
            old_points=not options.only_beside,
        )
        after.save(folder)
        if options.only_beside:
            same = only_planners_differ(before, after)
            words = "published planners beside it" if same else "the costs of now, and planners beside it"
            save_changed(folder, Changed(fingerprint(before), PLANNERS if same else COSTS, words))
    data = {
        "out": str(folder),
        "points": points_data(after),
        "report": dict(after.report),
        "same_strategies": [one.to_dict() for one in recosted],
    }
    old = recosted_lines(before, after, recosted) if recosted else []
    text = "\n".join(
        [frontier_text(after), "", *summary_lines(after, every=options.notes), *old,
         *([comparison_text(after)] if after.comparison else []), f"saved: {folder}"]
    )  # fmt: skip
    return Answer(data, text)


VERB = Verb(
    "recost",
    "search a saved exploration again under current costs, without its model",
    add_arguments,
    answer,
)
