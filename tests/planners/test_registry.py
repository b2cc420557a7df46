"""Planners by name, and their settings."""

from __future__ import annotations

import re

import pytest

from tensoropt.errors import TensorOptError
from tensoropt.planners.compare import requested_planners
from tensoropt.planners.registry import ENTRIES


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("netsplit.second=6", "did you mean 'seconds'"),
        ("netsplit.seconds=six", "the default is 60"),
        ("netsplit.seconds=nan", "should be a finite number"),
        ("netsplit.most_blocks=0", "should be greater than 0"),
        ("netsplit.as_published=true", "it has no such option"),
        ("m_etf.seconds=6", "it has no options"),
        ("netsplit=6", "is not PLANNER.OPTION=VALUE"),
        ("netsplit.seconds", "is not PLANNER.OPTION=VALUE"),
        ("pesto.seconds=6", "does not run; add it to --planners"),
        ("netsplat.seconds=6", "did you mean 'netsplit'"),
    ],
)
def test_options_that_cannot_be_taken_are_refused(option: str, words: str) -> None:
    with pytest.raises(TensorOptError, match=re.escape(words)):
        requested_planners("netsplit,m_etf", [option])


def test_an_option_reaches_its_planner_and_no_other() -> None:
    pytest.importorskip("ortools")
    options = ("netsplit.seconds=600", "netsplit.most_blocks=20")
    entries = {entry.name: entry for entry in requested_planners("all", options)}
    assert list(entries) == list(ENTRIES)
    settings = entries["netsplit"].settings["settings"]
    assert (settings.seconds, settings.most_blocks) == (600.0, 20)
    assert entries["netsplit_shared"].settings["settings"].seconds == 60.0
    assert ENTRIES["netsplit"].settings["settings"].seconds == 60.0
    assert entries["m_etf"].settings == {}
