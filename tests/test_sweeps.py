"""One model on several clusters: captured once, faults of one cluster apart, folders and answers."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tensoropt
from tensoropt import api, sweeps
from tensoropt.cli.offers import offers_answer
from tensoropt.cli.parser import main
from tensoropt.cluster import Cluster, load_cluster
from tensoropt.errors import CaptureError, InfeasibleError, TensorOptError
from tensoropt.exploration.exploration import Exploration
from tensoropt.exploration.rates import Tariff
from tensoropt.question.model_source import ModelSourceError, load_model
from tensoropt.sharding.constraints import ConstraintError, LackingDevicesError
from tests.exploration.test_cluster_offers import CHEAP, FAST

QUICK = ["--micro-batches", "1", "--placements", "never", "--pipelines", "never", "--epsilon", "0.1"]


def test_a_model_is_captured_once_and_explored_on_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TENSOROPT_CACHE", str(tmp_path / "cache"))
    captures: list[object] = []
    whole = api.capture

    def counted(*args: object, **kwargs: object) -> object:
        captures.append(args)
        return whole(*args, **kwargs)

    monkeypatch.setattr(api, "capture", counted)
    asked = ("explore", "zoo:lenet?classes=2", "--anew", *QUICK)
    several = ("--cluster", "dgx-h100[2]", "--also-on", "dgx-a100[2], dgx-a100[2]")
    assert main([*asked, *several, "--price", "2", "--json", "--out", str(tmp_path / "out")]) == 0
    told = json.loads(capsys.readouterr().out)
    assert main([*asked, "--cluster", "dgx-a100[2]", "--out", str(tmp_path / "alone")]) == 0
    assert len(captures) == 2  # for all clusters together, and alone
    assert [(row["cluster"], row["reason"]) for row in told["clusters"]] == [
        ("dgx-h100[2]", ""), ("dgx-a100[2]", ""),
    ]  # fmt: skip
    assert not told["refused"]
    # The second one, of saved operators, is what it would have been alone.
    again, alone = tensoropt.load(tmp_path / "out" / "dgx-a100[2]"), tensoropt.load(tmp_path / "alone")
    assert again.points == alone.points
    assert again.report["model_flops"] == alone.report["model_flops"]


CHOSEN: dict[str, Any] = {
    "cluster": "dgx-h100[1]", "micro_batches": (1,), "placements": "never", "pipelines": "never",
    "epsilon": 0.1,
}  # fmt: skip


def at(**more: Any) -> Callable[[int], Exploration]:
    """Explores LeNet at a batch."""

    return lambda batch: tensoropt.explore(
        load_model("zoo:lenet?classes=2", device="meta", batch=batch), **CHOSEN | more
    )


def quiet(*_: object) -> None:
    """Progress that nobody hears of."""


def over_batches(batches: Any, out: Path, memory_bytes: float | None = None, **more: Any) -> sweeps.Sweep:
    explored = at(**more if memory_bytes is None else {"memory_bytes": memory_bytes})
    return sweeps.over_batches(
        batches, "zoo:lenet", explored, memory_bytes=memory_bytes, out=out, progress=quiet
    )


def test_batches_are_explored_up_to_the_largest_that_fits(tmp_path: Path) -> None:
    limit = sum(at()(batch).needs.min() for batch in (64, 128)) / 2
    found = over_batches("auto", tmp_path, limit)
    batches = [one.model.batch for one in found.explorations]
    assert batches[:2] == [32, 64]
    assert batches[2:] == [96] or list(found.refused) == ["batch-128", "batch-96"]
    assert "smallest plan needs" in found.refused["batch-128"]
    saved = {path.name for path in tmp_path.iterdir()}
    assert {"batch-32", "batch-64"} <= saved
    told = offers_answer(found, {"memory_bytes": limit}, tmp_path).data
    assert next(row for row in told["clusters"] if row["cluster"] == "batch-128")["batch"] == 128
    plan = tensoropt.choose(tmp_path, batch="auto", memory_bytes=limit)
    best = max((row for row in told["clusters"] if row["point"]), key=lambda row: row["samples_per_s"])
    assert (plan.model.batch, plan.predicted.time_s) == (best["batch"], best["time_s"])
    with pytest.raises(TensorOptError, match=r"holds \d explorations; .* --batch auto"):
        tensoropt.choose(tmp_path)


@pytest.mark.slow
def test_a_list_of_batches_is_explored_whatever_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = over_batches((3, 2), tmp_path, micro_batches=(2,))
    assert [one.model.batch for one in found.explorations] == [2]
    assert "batch-3" in found.refused
    # Without an end to it, the search ends.
    monkeypatch.setattr(sweeps, "_MOST_BATCHES", 2)
    assert [one.model.batch for one in over_batches("auto", tmp_path).explorations] == [32, 64]


def test_a_model_that_brings_its_inputs_has_no_batch_to_choose(tmp_path: Path) -> None:
    with pytest.raises(ModelSourceError, match="with a parameter 'batch'"):
        sweeps.over_batches(
            "auto", f"{__file__}:quiet", at(), memory_bytes=None, out=tmp_path, progress=quiet
        )


def over(names: list[str], explore_on: Any, out: Path) -> sweeps.Sweep:
    return sweeps.over_clusters(
        {name: load_cluster(name) for name in names}, explore_on, out=out, progress=quiet
    )


FAST_LOST = replace(FAST, costs=None)
OUR_FAULT = "TensorOpt itself failed with ZeroDivisionError: oh"


def raising(fault: Exception) -> Callable[[Cluster, Exploration | None], Exploration]:
    """Explores dgx-h100; on other clusters this fault happens."""

    def explore_on(cluster: Cluster, first: Exploration | None) -> Exploration:
        if cluster.name == "dgx-h100":
            return FAST_LOST
        raise fault

    return explore_on


@pytest.mark.parametrize(
    ("names", "fault", "said"),
    [
        (["dgx-h100", "dgx-a100"], ZeroDivisionError("oh"), OUR_FAULT),
        (["dgx-a100", "dgx-h100"], LackingDevicesError("no device 7"), "no device 7"),
    ],
)
def test_a_fault_of_one_cluster_costs_the_others_nothing(
    names: list[str], fault: Exception, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        found = over(names, raising(fault), tmp_path)
    assert ("exploring dgx-a100 failed" in caplog.text) is isinstance(fault, ZeroDivisionError)
    assert found.explorations == [FAST_LOST]
    assert found.refused == {"dgx-a100": said}


@pytest.mark.parametrize("fault", [CaptureError("it branches"), ConstraintError("no such operator")])
def test_a_fault_of_the_model_or_a_constraint_is_no_cluster_s(fault: Exception, tmp_path: Path) -> None:
    with pytest.raises(type(fault)):
        over(["dgx-a100"], raising(fault), tmp_path)


def test_where_no_cluster_will_do_each_says_why(tmp_path: Path) -> None:
    with pytest.raises(InfeasibleError, match="dgx-b200: too small; dgx-a100: too small"):
        over(["dgx-b200", "dgx-a100"], raising(InfeasibleError("too small")), tmp_path)


def test_offers_list_what_is_left_out(tmp_path: Path) -> None:
    sweep = sweeps.Sweep([FAST, CHEAP], {"dgx-b200": "no plan fits"})
    tariff = Tariff(None, {"H100-80GB": 3.0, "A100-80GB": 1.0})
    told = offers_answer(sweep, {"tariff": tariff}, tmp_path)
    assert "Cheapest without limits: dgx-a100" in told.text
    assert "no plan fits" in told.text
    unpriced = offers_answer(sweep, {"tariff": Tariff(None, {"A100-80GB": 1.0})}, tmp_path)
    assert "no price of a device-hour is known for H100-80GB" in unpriced.text
    assert (told.data["cheapest"], told.data["fastest"]) == ("dgx-a100", "dgx-h100")
    assert {row["cluster"] for row in told.data["clusters"]} == {"dgx-a100", "dgx-h100", "dgx-b200"}
