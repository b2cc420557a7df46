"""One model on several clusters: captured once, faults of one cluster apart, folders and answers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensoropt
from tensoropt import shopping
from tensoropt.cli.offers import offers_answer
from tensoropt.cluster import Cluster, load_cluster
from tensoropt.errors import CaptureError, ClusterError, InfeasibleError, TensorOptError
from tensoropt.exploration.batch import load_batch
from tensoropt.exploration.exploration import Exploration
from tensoropt.exploration.rates import Tariff
from tensoropt.profiling.store import ProfileStore
from tensoropt.question.model_source import LoadedModel
from tensoropt.sharding.constraints import ConstraintError, LackingDevicesError
from tests.exploration.test_cluster_offers import CHEAP, FAST


def net() -> tuple[nn.Module, tuple[torch.Tensor]]:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)), (torch.randn(16, 64),)


def loss(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean()


def test_a_model_is_captured_once_and_explored_on_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    captures: list[object] = []
    whole = tensoropt.api.capture

    def counted(*args: object, **kwargs: object) -> object:
        captures.append(args)
        return whole(*args, **kwargs)

    monkeypatch.setattr("tensoropt.api.capture", counted)
    model, inputs = net()
    with ProfileStore(tmp_path / "profiles.sqlite") as store:
        found = tensoropt.explore_clusters(
            model, inputs, clusters="dgx-h100[2],dgx-a100[2],dgx-a100[2]", out=tmp_path / "out",
            loss=loss, store=store, micro_batches=(1,), placements="never", pipelines="never",
        )  # fmt: skip
        alone = tensoropt.explore(
            model, inputs, cluster="dgx-a100[2]", loss=loss, store=store, micro_batches=(1,),
            placements="never", pipelines="never",
        )  # fmt: skip
    assert len(captures) == 2  # for all clusters together, and alone
    assert [one.cluster["name"] for one in found.explorations] == ["dgx-h100[2]", "dgx-a100[2]"]
    assert not found.refused
    # The second one, of saved operators, is what it would have been alone.
    again = found.explorations[1]
    assert [(p.memory_bytes, p.time_s) for p in again.points] == [
        (p.memory_bytes, p.time_s) for p in alone.points
    ]
    assert again.report["model_flops"] == alone.report["model_flops"]
    told = tensoropt.shop(tmp_path / "out", tariff=Tariff(2.0), time_s=1.0)
    assert [(row.cluster, bool(row.reason)) for row in told.rows] == [
        ("dgx-a100[2]", False), ("dgx-h100[2]", False),
    ]  # fmt: skip


CHOSEN: dict[str, Any] = {
    "cluster": "dgx-h100[1]", "micro_batches": (1,), "placements": "never", "pipelines": "never",
    "epsilon": 0.1,
}  # fmt: skip


def test_batches_are_explored_up_to_the_largest_that_fits(tmp_path: Path) -> None:
    lenet = tensoropt.load_model("zoo:lenet?classes=2", device="meta")
    alone = [tensoropt.explore(lenet.with_batch(batch), **CHOSEN).needs.min() for batch in (64, 128)]
    limit = sum(alone) / 2
    found = tensoropt.explore_batches(lenet, memory_bytes=limit, out=tmp_path / "out", **CHOSEN)
    batches = [one.model.batch for one in found.explorations]
    assert batches[:2] == [32, 64]
    assert batches[2:] == [96] or list(found.refused) == ["batch-128", "batch-96"]
    assert "smallest plan needs" in found.refused["batch-128"]
    saved = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"batch-32", "batch-64", "frontier.csv", "refused.json"} <= saved
    told = tensoropt.shop(tmp_path / "out", memory_bytes=limit)
    assert told.of_batches
    assert next(row for row in told.rows if row.cluster == "batch-128").batch == 128
    plan = tensoropt.choose(tmp_path / "out", batch="auto", memory_bytes=limit)
    assert told.fastest is not None
    assert (plan.model.batch, plan.predicted.time_s) == (told.fastest.batch, told.fastest.rates.step_s)
    with pytest.raises(TensorOptError, match=r"holds \d explorations; .* --batch auto"):
        tensoropt.choose(tmp_path / "out")
    # The folder's own frontier is none of the explorations that are exported.
    assert not [p for p in load_batch([tmp_path / "out"]).left_out if p.endswith(".csv")]


@pytest.mark.slow
def test_a_list_of_batches_is_explored_whatever_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    lenet = tensoropt.load_model("zoo:lenet?classes=2", device="meta")
    found = tensoropt.explore_batches(lenet, [3, 2, 3], **{**CHOSEN, "micro_batches": (2,)})
    assert [one.model.batch for one in found.explorations] == [2]
    assert "batch-3" in found.refused
    # Without an end to it, the search ends.
    monkeypatch.setattr(shopping, "MOST_BATCHES", 2)
    found = tensoropt.explore_batches(lenet, **CHOSEN)
    assert [one.model.batch for one in found.explorations] == [32, 64]


def test_batches_of_what_has_none_to_choose_are_refused() -> None:
    model, inputs = net()
    own = LoadedModel(model, inputs)
    sized = tensoropt.load_model("zoo:lenet", device="meta", batch=8)
    lenet = tensoropt.load_model("zoo:lenet", device="meta")
    for loaded, batches, message in (
        (own, "auto", "a module brings its own example inputs"),
        (sized, "auto", "was loaded with a batch of 8"),
        (lenet, "all", "neither auto nor a list"),
        (lenet, [4, 0], "must be some numbers of at least 1"),
        (lenet, [], "must be some numbers of at least 1"),
    ):
        with pytest.raises(TensorOptError, match=message):
            tensoropt.explore_batches(loaded, batches, **CHOSEN)


@pytest.mark.slow
def test_a_batch_per_device_grows_with_the_cluster(tmp_path: Path) -> None:
    clusters = "dgx-h100[1],dgx-h100[2]"
    chosen = {"clusters": clusters, "micro_batches": (1,), "placements": "never", "pipelines": "never"}
    lenet = tensoropt.load_model("zoo:lenet", device="meta")
    found = tensoropt.explore_clusters(lenet, batch_per_device=4, out=tmp_path / "out", **chosen)
    assert [one.model.batch for one in found.explorations] == [4, 8]
    assert found.batch_per_device == 4
    assert [row.batch for row in tensoropt.shop(tmp_path / "out").rows] == [4, 8]
    model, inputs = net()
    with pytest.raises(TensorOptError, match="a module brings its own example inputs"):
        tensoropt.explore_clusters(model, inputs, batch_per_device=4, loss=loss, **chosen)
    sized = tensoropt.load_model("zoo:lenet", device="meta", batch=8)
    with pytest.raises(TensorOptError, match=r"a batch of 4 per device grows .* a batch of 8 does not"):
        tensoropt.explore_clusters(sized, batch_per_device=4, **chosen)


def test_what_is_no_cluster_is_refused_before_anything_is_explored(tmp_path: Path) -> None:
    def explore_on(cluster: object, first: object) -> Exploration:
        raise AssertionError("nothing is to be explored")

    with pytest.raises(ClusterError, match="unknown cluster 'nonsense'"):
        shopping.over_clusters(
            ["dgx-h100", "nonsense"],
            explore_on,
            out=tmp_path / "out",
            progress=lambda *_: None,
        )
    assert not (tmp_path / "out").exists()


def test_a_fault_of_one_cluster_costs_the_others_nothing() -> None:
    def explore_on(cluster: object, first: Exploration | None) -> Exploration:
        if first is None:
            return FAST_RECORDED
        raise ZeroDivisionError("out of luck")

    names = ["dgx-h100", "dgx-a100"]
    found = shopping.over_clusters(names, explore_on, out=None, progress=lambda *_: None)
    assert found.explorations == (FAST_RECORDED,)
    assert found.refused == {"dgx-a100": "TensorOpt itself failed with ZeroDivisionError: out of luck"}


class _Recorded:
    graph = None


FAST_RECORDED = replace(FAST, recorded=_Recorded())


def test_a_model_that_cannot_be_captured_is_no_cluster_s_fault() -> None:
    def explore_on(cluster: object, first: object) -> Exploration:
        raise CaptureError("it branches")

    with pytest.raises(CaptureError):
        shopping.over_clusters(["dgx-h100"], explore_on, out=None, progress=lambda *_: None)


def test_a_constraint_is_a_cluster_s_fault_if_that_lacks_devices() -> None:
    def explore_on(cluster: Cluster, first: Exploration | None) -> Exploration:
        if cluster.device_count < 8:
            raise LackingDevicesError("no device 7")
        return FAST_RECORDED

    found = shopping.over_clusters(
        ["dgx-a100[2]", "dgx-h100"], explore_on, out=None, progress=lambda *_: None
    )
    assert found.explorations == (FAST_RECORDED,)
    assert found.refused == {"dgx-a100[2]": "no device 7"}

    def nowhere(cluster: object, first: object) -> Exploration:
        raise ConstraintError("no such operator")

    with pytest.raises(ConstraintError):
        shopping.over_clusters(["dgx-h100"], nowhere, out=None, progress=lambda *_: None)


def test_where_no_cluster_will_do_each_says_why() -> None:
    def explore_on(cluster: object, first: object) -> Exploration:
        raise InfeasibleError("too small")

    with pytest.raises(InfeasibleError, match="dgx-h100: too small; dgx-a100: too small"):
        shopping.over_clusters(
            ["dgx-h100", "dgx-a100"],
            explore_on,
            out=None,
            progress=lambda *_: None,
        )


def test_presets_are_all_but_families_and_nothing_is_refused() -> None:
    found = shopping.named_clusters("presets,dgx-h100, mine.yaml")
    assert "dgx-a100" in found
    assert not [name for name in found if str(name).endswith("xN")]
    assert found.count("dgx-h100") == 1
    assert found[-1] == "mine.yaml"
    assert all(load_cluster(name).device_count for name in found[:-1])
    with pytest.raises(TensorOptError, match="no cluster to explore on"):
        shopping.named_clusters(" , ")


def saved(folder: Path) -> Path:
    FAST.save(folder / "fast")
    CHEAP.save(folder / "cheap")
    (folder / "damaged").mkdir()
    (folder / "damaged" / "exploration.json").write_text("{")
    (folder / "refused.json").write_text(json.dumps({"dgx-b200": "no plan fits"}))
    return folder


def test_offers_list_what_is_left_out(tmp_path: Path) -> None:
    folder = str(saved(tmp_path))
    tariff = Tariff(None, {"H100-80GB": 3.0, "A100-80GB": 1.0}, "EUR")
    told = offers_answer(folder, {"time_s": 0.5, "tariff": tariff}).text
    assert "Cheapest within 500 ms a step: dgx-h100" in told
    assert "too slow: 600 ms a step" in told
    assert "no plan fits" in told
    assert "damaged" in told
    data = offers_answer(folder, {"cost": 0.4, "tariff": tariff}).data
    assert (data["cheapest"], data["fastest"]) == ("dgx-a100", "dgx-a100")
    assert {row["cluster"] for row in data["clusters"]} == {"dgx-a100", "dgx-h100", "damaged", "dgx-b200"}


def test_explorations_of_different_models_are_not_compared(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    other = replace(FAST, model=FAST.model.model_copy(update={"fingerprint": "0" * 64}))
    other.save(folder / "other")
    with pytest.raises(TensorOptError, match="different models or settings"):
        tensoropt.shop(folder)
