"""The verbs of the command line, in the order in which ``--help`` lists them."""

from __future__ import annotations

from tensoropt.cli import (
    choose,
    compare,
    dashboard,
    demo,
    explore,
    export,
    list_names,
    measure_links,
    profiles,
    recost,
    selftest,
    shop,
    show,
    verify,
    why,
)
from tensoropt.cli.verb import Verb

_IN_ORDER = (
    explore.VERB,
    compare.VERB,
    choose.VERB,
    show.VERB,
    why.VERB,
    shop.VERB,
    recost.VERB,
    export.VERB,
    verify.VERB,
    list_names.VERB,
    measure_links.VERB,
    profiles.VERB,
    dashboard.VERB,
    demo.VERB,
    selftest.VERB,
)
VERBS: dict[str, Verb] = {verb.name: verb for verb in _IN_ORDER}
