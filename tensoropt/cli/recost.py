"""``recost``: a saved exploration at the costs of now."""

from __future__ import annotations

import argparse

from tensoropt.cli.arguments import CLUSTER_HELP, Answer, Verb, add_folder, writable_folder
from tensoropt.console import ProgressDisplay
from tensoropt.errors import TensorOptError


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """What the verb takes."""
    add_folder(verb)
    verb.add_argument("--out", required=True, metavar="DIR", help="folder for the result")
    verb.add_argument("--cluster", help="another one; default: the saved one. " + CLUSTER_HELP)
    verb.add_argument(
        "--planners", metavar="all|a,b", help="published planners beside it; see: tensoropt list planners"
    )
    verb.add_argument(
        "--only-beside",
        action="store_true",
        help="with --planners: use tables and frontiers that were kept where nothing has changed since, and "
        "leave out what the old strategies take at the costs of now",
    )


def answer(options: argparse.Namespace, progress: ProgressDisplay) -> Answer:
    """The frontier searched again, and the old strategies at its costs."""
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
        found, again = recost(
            before,
            cluster=options.cluster,
            progress=progress,
            planners=options.planners or (),
            keep=options.only_beside,
            old_points=not options.only_beside,
        )
        found.save(folder)
        if options.only_beside:
            same = only_planners_differ(before, found)
            words = "published planners beside it" if same else "the costs of now, and planners beside it"
            save_changed(folder, Changed(fingerprint(before), PLANNERS if same else COSTS, words))
    data = {
        "out": str(folder),
        "points": points_data(found),
        "report": dict(found.report),
        "same_strategies": [vars(point) for point in again],
    }
    old = recosted_lines(before, found, again) if again else []
    text = "\n".join(
        [frontier_text(found), "", *summary_lines(found), *old,
         *([comparison_text(found)] if found.comparison else []), f"saved: {folder}"]
    )  # fmt: skip
    return Answer(data, text)


VERB = Verb(
    "recost",
    "search a saved exploration again with the costs of now, without its model",
    add_arguments,
    answer,
)
