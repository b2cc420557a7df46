"""The names that ``tensoropt`` shows, and what it takes to import them."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

import tensoropt
from tensoropt.cli.parser import VERBS
from tensoropt.errors import InfeasibleError, TensorOptError
from tests.plan.explorations import MIB, small_exploration

ROOT = Path(__file__).parents[1]
FUNCTIONS = {
    "export": ["export_job"],
    "verify": ["verify_plan", "verify_random"],
    "list": [],
    "measure": ["measure_links", "detect"],
}
"""Functions of verbs that are not called like them."""


def test_dir_lists_the_public_names() -> None:
    assert dir(tensoropt) == sorted(tensoropt.__all__)
    assert set(tensoropt._MODULE_OF) <= set(tensoropt.__all__)
    for name in tensoropt.__all__:
        assert getattr(tensoropt, name) is not None


def test_every_verb_has_its_function() -> None:
    for name in (name for verb in VERBS for name in FUNCTIONS.get(verb, [verb])):
        function = getattr(tensoropt, name)
        assert inspect.isfunction(function)
        assert (function.__doc__ or "").strip()
        assert name in dir(tensoropt)


def test_submodules_of_the_same_names_do_not_hide_functions() -> None:
    import tensoropt.plan.plan
    import tensoropt.verify

    for name in tensoropt._MODULE_OF:
        assert not inspect.ismodule(getattr(tensoropt, name))


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="module 'tensoropt' has no attribute 'exlpore'"):
        tensoropt.exlpore  # noqa: B018


def test_choosing_from_an_exploration_or_its_folder(tmp_path: Path) -> None:
    found = small_exploration()
    found.save(tmp_path)
    for saved in (found, tmp_path, str(tmp_path)):
        assert tensoropt.choose(saved) == found.plan(3)
        assert tensoropt.choose(saved, memory_bytes=12 * MIB) == found.plan(1)
        assert tensoropt.choose(saved, time_s=0.15) == found.plan(2)
        assert tensoropt.choose(saved, knee=True) == found.plan(found.knee)
        assert tensoropt.choose(saved, memory="12MiB") == found.choose(memory=12 * MIB) == found.plan(1)
        assert tensoropt.choose(saved, time="150ms") == found.choose(time=0.15) == found.plan(2)
        assert tensoropt.choose(saved, point=3) == found.choose(point=3) == found.plan(2)
    with pytest.raises(InfeasibleError, match="no plan fits 1 MiB"):
        tensoropt.choose(found, memory_bytes=MIB)


@pytest.mark.parametrize(
    ("asked", "refusal"),
    [
        ({"point": 0}, "no point 0; the frontier has points 1 to 4"),
        ({"point": 5}, "no point 5; the frontier has points 1 to 4"),
        ({"point": 2, "knee": True}, "point 2 is given with a limit, knee or fastest"),
        ({"point": 2, "memory": 1.0}, "point 2 is given with a limit"),
        ({"point": 2, "devices": "auto"}, "a point belongs to one exploration; .* instead of --devices"),
        ({"memory": "12MiB", "memory_bytes": 1.0}, "memory_bytes=1 and memory='12MiB' both set the limit"),
        ({"time": 1, "time_s": 2.0}, "time_s=2 and time=1 both set the limit"),
        ({"memory": "12 apples"}, "12 apples"),
    ],
)
def test_what_cannot_be_chosen_says_why(asked: dict[str, Any], refusal: str) -> None:
    with pytest.raises(TensorOptError, match=refusal):
        tensoropt.choose(small_exploration(), **asked)


def test_points_are_numbered_from_1_and_sequences_indexed_from_0() -> None:
    folder = ROOT / "app" / "data" / "gpt2-dgx-h100"
    found = tensoropt.load(folder)
    assert (found.leanest, found.fastest) == (found.frontier[0], found.frontier[-1])
    assert found.choose(point=1) == found.plan(found.leanest) == found.plan(0)
    assert found.choose(point=len(found.points)) == found.choose(fastest=True) == found.plan(found.fastest)
