"""Explorations of the plans that a launcher can be told: each is told as it is, and all plans are as good."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
from torch import nn

import tensoropt
from tensoropt.cli.parser import main
from tensoropt.errors import InfeasibleError, TensorOptError
from tensoropt.exploration.exploration import Exploration, load_exploration
from tensoropt.launchers.registry import LAUNCHERS
from tensoropt.profiling.store import ProfileStore
from tensoropt.question.settings import ANY_SPACE, Settings
from tensoropt.saved import export_job
from tensoropt.session.launched import job_prices
from tensoropt.session.told import nearest

pytest.importorskip("transformers")
SPACES = [name for name, launcher in LAUNCHERS.items() if launcher.write is not None]


def explored(store: ProfileStore, cluster: str = "dgx-a100[4]", **asked: Any) -> Exploration:
    model = tensoropt.load_model("zoo:llama-tiny?sequence=32", device="meta", batch=8)
    asked = {"dtype": "bfloat16", "measure": "never", "micro_batches": (1, 2), "progress": False, **asked}
    return tensoropt.explore(model, cluster=cluster, store=store, **asked)


@pytest.fixture(scope="module")
def store() -> Any:
    with ProfileStore(":memory:") as opened:
        yield opened


@pytest.fixture(scope="module")
def space_of(store: ProfileStore) -> Callable[[str], Exploration]:
    return cache(lambda name: explored(store, space=name))


def test_the_spaces_are_those_of_the_launchers_that_are_written() -> None:
    choices = get_args(Settings.__pydantic_fields__["space"].annotation)  # type: ignore[attr-defined]
    assert choices == (ANY_SPACE, *SPACES)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "deepspeed")) for name in SPACES]
)
def test_every_point_is_one_that_the_launcher_is_told_as_it_is(
    name: str, space_of: Callable[[str], Exploration], store: ProfileStore
) -> None:
    found = space_of(name)
    memory = [point.memory_bytes for point in found.points]
    times = [point.time_s for point in found.points]
    assert memory == sorted(memory)
    assert times == sorted(times, reverse=True)
    assert any(f"only plans that {name} can be told" in note for note in found.report["notes"])
    with job_prices(found, store) as prices:
        for index in range(len(found.points)):
            told = nearest(prices, index, name)
            assert told.is_the_point, (found.names[index], told.reason)


@pytest.mark.slow
def test_a_search_of_all_plans_is_as_good_at_the_ends(
    space_of: Callable[[str], Exploration], store: ProfileStore
) -> None:
    """What launchers do that plans here do not, as keeping parameters gathered, is a little faster."""
    every = explored(store, pipelines="never", placements="never")
    for found in map(space_of, SPACES):
        assert every.fastest.time_s <= found.fastest.time_s * 1.05
        assert every.leanest.memory_bytes <= found.leanest.memory_bytes * 1.05


def test_it_is_saved_and_exported_like_any_other(
    space_of: Callable[[str], Exploration], tmp_path: Path
) -> None:
    found = space_of("deepspeed")
    found.save(tmp_path)
    assert [p.time_s for p in load_exploration(tmp_path).points] == [p.time_s for p in found.points]
    assert "zero_optimization" in export_job(tmp_path, "deepspeed", 1, progress=False).text


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"mode": "inference"}, "about training, and the mode is inference; leave it out"),
        ({"planners": "megatron"}, "leave out one of the two"),
        ({"space": "horovod"}, "unknown space 'horovod'"),
        ({"constraints": {"together": [["a", "b"]]}}, "and constraints pin others"),
    ],
)
def test_what_cannot_be_is_refused_before_the_model_is_captured(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(TensorOptError, match=words):
        tensoropt.explore(nn.Identity(), cluster="dgx-a100[4]", **{"space": "deepspeed", **asked})


def test_planners_are_not_run_beside_it(
    space_of: Callable[[str], Exploration],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TensorOptError, match="space=deepspeed has none"):
        tensoropt.recost(space_of("deepspeed"), planners="megatron", progress=False)
    asked = ["explore", "zoo:mlp", "--cluster", "dgx-a100", "--planners", "zero", "--space", "deepspeed"]
    assert main([*asked, "--out", "x"]) == 2
    assert "space=deepspeed has none" in capsys.readouterr().err


def test_a_launcher_that_can_be_told_nothing_says_why(store: ProfileStore) -> None:
    with pytest.raises(
        InfeasibleError, match=r"a batch of 16 in the micro-batches .*explore without --space"
    ):
        tensoropt.explore(
            tensoropt.load_model("zoo:gpt2-demo", device="meta"), cluster="dgx-a100[4]", store=store,
            space="deepspeed", measure="never", micro_batches=(16,), progress=False,
        )  # fmt: skip
