"""What a command writes where; that a user's code stays out of it is in ``test_cli.py``."""

from __future__ import annotations

import io
import json
import math
import os
import sys

import numpy as np
import pytest

from tensoropt.console import ProgressDisplay, json_text, reserved_stdout


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, np.float64("nan")])
def test_json_has_null_for_what_is_not_finite(value):
    data = {"a": value, "b": [1.5, (value, "x")], 3: {"c": value}}
    expected = {"a": None, "b": [1.5, [None, "x"]], "3": {"c": None}}
    assert json.loads(json_text(data), parse_constant=pytest.fail) == expected


def test_stdout_is_the_answers_alone_and_comes_back(capfd):
    before = sys.stdout
    with reserved_stdout(for_good=False) as answers:
        print("a user's")
        os.write(1, b"and theirs\n")
        ProgressDisplay(answers=answers).say("ours")
    assert sys.stdout is before
    os.write(1, b"after\n")
    assert capfd.readouterr() == ("ours\nafter\n", "a user's\nand theirs\n")


def test_stdout_comes_back_after_an_error(capfd):
    with pytest.raises(ValueError, match="broken"), reserved_stdout(for_good=False):
        raise ValueError("broken")
    os.write(1, b"after\n")
    assert capfd.readouterr().out == "after\n"


def test_a_closed_stdout_is_no_error(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    with reserved_stdout(for_good=False) as answers:
        ProgressDisplay(io.StringIO(), answers).say("to nobody")
