"""What each verb of the command line calls, and how it words the answer."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from tensoropt.console import Progress
from tensoropt.verbs.answer import Answer as Answer
from tensoropt.verbs.checking import verify
from tensoropt.verbs.listing import listing
from tensoropt.verbs.machine import dashboard, demo, measure_links, profiles
from tensoropt.verbs.saved import choose, export, recost, show
from tensoropt.verbs.searching import compare, explore

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
