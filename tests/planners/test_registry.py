"""Refusals that are said before planners are asked are those that planners give."""

from __future__ import annotations

import pytest

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
