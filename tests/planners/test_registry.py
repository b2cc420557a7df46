"""Refusals that are said before planners are asked are those that planners give."""

from __future__ import annotations

import re

import pytest

from tensoropt.errors import TensorOptError
from tensoropt.planners.compare import requested_planners
from tensoropt.planners.registry import ENTRIES, foreseen_refusal


@pytest.mark.parametrize(
    ("name", "devices", "training", "attention", "why"),
    [
        ("pesto", 8, True, None, "on 2 devices, not on 8"),
        ("gpipe", 8, False, None, "training only"),
        ("alpa", 1, True, None, "at least 2 devices"),
        ("megatron", 8, True, False, "no"),
    ],
)
def test_refusals_are_foreseen(
    name: str, devices: int, training: bool, attention: bool | None, why: str
) -> None:
    assert why in foreseen_refusal(ENTRIES[name], devices, training=training, attention=attention)


def test_what_may_find_something_is_not_refused() -> None:
    for name in ("data_parallel", "zero", "megatron", "optcnn", "gpipe", "dpos"):
        assert foreseen_refusal(ENTRIES[name], 8, training=True) == ""


def test_a_solver_that_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "tensoropt[solvers]" in foreseen_refusal(ENTRIES["netsplit"], 8, training=True)


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
