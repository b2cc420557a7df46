"""What each verb of the command line calls, and how it words the answer."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from tensoropt.cli.answer import Answer as Answer
from tensoropt.cli.checking import verify
from tensoropt.cli.listing import listing
from tensoropt.cli.machine import dashboard, demo, measure_links, profiles
from tensoropt.cli.saved import choose, export, recost, show
from tensoropt.cli.searching import compare, explore
from tensoropt.console import Progress

VERBS: dict[str, Callable[[argparse.Namespace, Progress], Answer]] = {
    "explore": explore,
    "compare": compare,
    "choose": choose,
    "show": show,
    "recost": recost,
    "export": export,
    "verify": verify,
    "list": listing,
    "measure-links": measure_links,
    "profiles": profiles,
    "dashboard": dashboard,
    "demo": demo,
}
