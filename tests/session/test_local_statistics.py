"""Data parallelism with the statistics of each device's rows: what it saves, and that it is no plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tensoropt.cluster import Mesh, load_cluster
from tensoropt.costs.communication import CommunicationModel
from tensoropt.exploration.answer import Baseline, answer
from tensoropt.exploration.exploration import Exploration, load_exploration
from tensoropt.plan.point import Point
from tensoropt.profiling.store import ProfileStore
from tests.session.captured_once import CapturedOnce

WIDTH = 96
LOCAL = "DDP, local statistics"


class Normed(nn.Module):
    """Three convolutions, each normalised over the batch or not."""

    def __init__(self, *, normed: bool):
        super().__init__()
        norm = nn.BatchNorm2d if normed else nn.Identity
        parts = ((nn.Conv2d(c, WIDTH, 3, padding=1), norm(WIDTH)) for c in (3, WIDTH, WIDTH))
        self.convolutions = nn.Sequential(*(nn.Sequential(*part) for part in parts))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.convolutions(images).mean((2, 3))), labels)


def explored(store: ProfileStore, cluster: str = "dgx-a100[2]", *, normed: bool = True) -> Exploration:
    # Large enough that the device, not its host, makes the step as long as it is.
    inputs = torch.empty(512, 3, 64, 64, device="meta"), torch.empty(512, device="meta", dtype=torch.long)
    built = CapturedOnce(lambda: (Normed(normed=normed).to("meta"), inputs))
    asked: dict[str, Any] = {"micro_batches": (1,), "placements": "never", "pipelines": "never"}
    return built.explore(cluster=cluster, store=store, measure="never", overlap="none", **asked)


@pytest.fixture(scope="module")
def found(store):
    return explored(store)


def rows(exploration: Exploration) -> dict[str, Baseline]:
    return {base.title: base for base in answer(exploration).baselines}


def fastest(exploration: Exploration) -> Point:
    points = exploration.all_points
    return min((p for p in points if p.planner == "data_parallel"), key=lambda p: p.time_s)


def test_it_saves_the_collectives_of_statistics(found):
    cost = CommunicationModel(load_cluster("dgx-a100[2]"), Mesh(shape=(2,), names=("data",)))
    forward, backward = (cost.time_s("all_reduce", (0,), n * 4 * WIDTH) for n in (1, 2))
    synced, local = fastest(found), rows(found)[LOCAL].point
    assert not synced.host_bound
    assert synced.time_s - local.time_s == pytest.approx(3 * (2 * forward + backward))
    assert rows(found)[LOCAL].needs_bytes == found.needs[rows(found)["DDP"].row]


def test_it_is_a_row_behind_ddp_but_no_plan(found):
    titles = [base.title for base in answer(found).baselines]
    assert titles[: titles.index(LOCAL)] == ["DDP"]
    told = {row["title"]: row for row in answer(found).to_data()["baselines"]}
    assert (told["DDP"]["note"], told[LOCAL]["point"]) == ("", None)
    assert "not the unsplit model's result; not run here" in told[LOCAL]["note"]
    assert rows(found)[LOCAL].point.time_s not in found.all_points.time


def test_it_is_not_recommended_where_it_is_the_fastest(found):
    # An answer that it would beat by far.
    tried = {"data_parallel": {**found.report["tried"]["data_parallel"], "local_statistics_s": 1e-9}}
    quick = replace(found, report={**found.report, "tried": tried})
    assert (answer(quick).row, answer(quick).gain) == (answer(found).row, answer(found).gain)
    assert rows(quick)[LOCAL].longer == pytest.approx(-1, abs=1e-3)


def test_it_is_saved(found, tmp_path):
    found.save(tmp_path)
    assert answer(load_exploration(tmp_path)).to_data() == answer(found).to_data()


def test_it_is_said_where_it_differs(found):
    for share in (0.9, 1.0):
        tried = {"data_parallel": {"local_statistics_s": share * fastest(found).time_s}}
        told = replace(found, report={**found.report, "tried": tried})
        said = f"{LOCAL} {rows(told)[LOCAL].verdict()} (batch-norm statistics"
        assert (said in answer(told).sentence()) == (share < 1)


@pytest.mark.parametrize(("cluster", "normed"), [("dgx-a100[1]", True), ("dgx-a100[2]", False)])
def test_nothing_else_has_it(store, cluster, normed):
    alone = explored(store, cluster, normed=normed)
    assert "local_statistics_s" not in alone.report["tried"]["data_parallel"]
    assert LOCAL not in rows(alone)
