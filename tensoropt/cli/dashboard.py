"""The verb ``dashboard``, which shows frontiers and plans in a browser."""

from __future__ import annotations

import argparse

from tensoropt.cli.arguments import Answer, Verb
from tensoropt.console import WHOLE, ProgressDisplay


def _add_arguments(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "dir", nargs="?", metavar="DIR", help="a folder given to explore --out, or one that holds several"
    )
    verb.add_argument("--host", default="127.0.0.1", help="address to listen on; default: %(default)s")
    verb.add_argument("--port", type=WHOLE, default=8050, help="0 for any free one; default: %(default)s")


def _answer(options: argparse.Namespace, progress: ProgressDisplay) -> Answer:
    from tensoropt.machine import dashboard

    address = dashboard(options.dir, host=options.host, port=options.port, say=progress.note)
    return Answer({"address": address}, "")


VERB = Verb("dashboard", "look at frontiers, pick and export plans in a browser", _add_arguments, _answer)
