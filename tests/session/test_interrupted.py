"""Ctrl-C during an exploration: what was found is kept, and what was not searched is said."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

from tensoropt import explore, load_model
from tensoropt.cli.parser import main
from tensoropt.exploration.exploration import InterruptedExplorationError, load_exploration
from tensoropt.processes import finished_when_interrupted
from tensoropt.session.pipelines import _Finder
from tensoropt.session.quick_plans import _Asking
from tensoropt.session.spaces import SpaceSearch

QUICK = (
    "explore", "zoo:mlp", "--cluster", "dgx-h100[2]", "--anew", "--pipelines", "never",
    "--placements", "never", "--micro-batches", "1,2",
)  # fmt: skip


def interrupted_after(count: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose later calls a person interrupts."""
    calls = iter(range(count))

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return function(*args, **kwargs)

    return interrupted


@pytest.mark.parametrize(("owner", "name", "missing", "asked"), [
    (_Asking, "ask", "zero", ()),
    (SpaceSearch, "_search", "meshes and micro-batch counts", ()),
    (_Finder, "_prepared", "pipelines other than", ("--pipelines", "always", "--micro-batches", "2,4")),
])  # fmt: skip
def test_what_was_found_is_saved(owner, name, missing, asked, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(owner, name, interrupted_after(1, getattr(owner, name)))
    monkeypatch.setattr("tensoropt.session.pipelines.cores", lambda: 1)  # one mesh after another
    assert main([*QUICK, *asked, "--out", str(tmp_path / "found")]) == 130
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("tensoropt: error: interrupted; not searched: ")
    assert missing in said
    assert said.endswith(f"the points are in {tmp_path}/found: tensoropt choose {tmp_path}/found")
    found = load_exploration(tmp_path / "found")
    assert found.points
    assert any(note.startswith("interrupted: not searched: ") for note in found.report["notes"])
    assert bool(asked) == any(note.startswith("pipelines: ") for note in found.report["notes"])


def test_before_anything_is_found_nothing_is(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(SpaceSearch, "_search", interrupted_after(0, SpaceSearch._search))
    assert main([*QUICK, "--out", str(tmp_path / "found")]) == 130
    assert capsys.readouterr().err.endswith("interrupted; saved results and timings are kept\n")
    assert not (tmp_path / "found").exists()


def test_a_script_is_ended_and_may_ask_for_what_was_found(monkeypatch):
    monkeypatch.setattr(_Asking, "ask", interrupted_after(0, _Asking.ask))
    with pytest.raises(KeyboardInterrupt) as caught:
        explore(load_model("zoo:mlp"), cluster="dgx-h100[2]", micro_batches=(1,), pipelines="never")
    assert isinstance(caught.value, InterruptedExplorationError)
    assert caught.value.exploration.points


@pytest.fixture
def heard():
    """Ctrl-C is heard, which shells switch off for what runs in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heard")
def test_the_second_interruption_ends_what_the_first_one_did_not():
    with finished_when_interrupted() as held:
        signal.raise_signal(signal.SIGINT)
    assert held
    with finished_when_interrupted() as held:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
