"""What a command writes where; that a user's code stays out of it is in ``test_cli.py``."""

import inspect
import io
import json
import math
import os
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import tensoropt
from tensoropt import console
from tensoropt.console import ProgressDisplay, json_text, reserved_stdout
from tensoropt.errors import TensorOptError
from tensoropt.types import heard


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


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def drawn(monkeypatch):
    """The display, a function that reports at a moment and returns the share of the bar, what is written."""
    clock = [100.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: clock[0])
    stream = Terminal()
    display = ProgressDisplay(stream)

    def report(now, *words):
        clock[0] = now
        display(*words)
        bar = stream.getvalue().rsplit("[", 1)[1].split("]")[0]
        return bar.count("#") / len(bar)

    return display, report, stream


def test_one_line_is_redrawn_whose_bar_is_the_stages(drawn):
    _, report, stream = drawn
    assert report(100.0, "check", 1, 2, "links") == 0.5
    assert report(101.0, "check", 2, 2, "links") == 1.0
    assert report(102.0, "search", 0, 4, "mesh 8") == 0
    assert "\n" not in stream.getvalue()


def test_a_shorter_line_leaves_nothing_of_a_longer_one(drawn):
    display, report, stream = drawn
    report(100.0, "facts", 0, 2, "many words")
    report(110.0, "facts", 1, 2, "few")
    _, longer, shorter = stream.getvalue().split("\r")
    assert len(shorter) == len(longer)
    assert "\x1b" not in stream.getvalue()  # notebooks know no other control than the carriage return
    display.end()
    assert re.search(r"\r\[#+\] done in 10 s +\n$", stream.getvalue())


@console.shows_progress
def long_function(*, progress=None):
    """What a public function does with its progress."""
    heard(progress)("search", 0, 2, "mesh 8")
    return progress


def kernel():
    return SimpleNamespace(kernel=None)


def test_a_bar_is_shown_where_a_person_watches(monkeypatch):
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))
    for stream, bars in ((Terminal(), 1), (io.StringIO(), 0)):
        monkeypatch.setattr(sys, "stderr", stream)
        long_function()
        assert stream.getvalue().count("done in 0 s") == bars
        before = stream.getvalue()
        assert long_function(progress=False) is False
        assert stream.getvalue() == before
        long_function(progress=True)
        assert stream.getvalue() != before
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=kernel))
    monkeypatch.setattr(sys, "stderr", io.StringIO())  # as a notebook's is no terminal
    long_function()
    assert "\r[#" in sys.stderr.getvalue()


def test_a_function_of_ones_own_hears_of_progress_instead(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    told = []
    long_function(progress=lambda *report: told.append(report))
    assert told == [("search", 0, 2, "mesh 8")]
    with pytest.raises(TensorOptError, match=r"progress='yes' is not valid"):
        long_function(progress="yes")
    assert sys.stderr.getvalue() == ""


def test_a_failure_ends_the_line_without_calling_it_done(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())

    @console.shows_progress
    def failing(*, progress=None):
        progress("search", 0, 2, "mesh 8")
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        failing()
    assert sys.stderr.getvalue().endswith("\n")
    assert "done" not in sys.stderr.getvalue()


def test_every_public_function_that_takes_progress_takes_a_choice():
    for name in tensoropt.__all__:
        function = getattr(tensoropt, name)
        if inspect.isfunction(function) and "progress" in inspect.signature(function).parameters:
            assert inspect.signature(function).parameters["progress"].annotation == "ProgressChoice", name
            assert function.__wrapped__, name
