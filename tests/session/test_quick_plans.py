"""Published planners beside every search: what comes in, what may not, and that none beats a point."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from tensoropt import ConstraintError, Settings, load_cluster, load_model, parallelize, zoo
from tensoropt.api import _evaluated, _model_info, _prepared, compare, explore, recost
from tensoropt.exploration.exploration import Exploration, load_exploration
from tensoropt.plan import kinds
from tensoropt.plan.point import SAME, Point
from tensoropt.planners.compare import requested_planners
from tensoropt.planners.quick import (
    _CUTTING,
    _FEW_GROUPS,
    _FEW_PLACED,
    _MOST_PIECES,
    _PARALLEL,
    _PIPELINED,
    _PLACED,
    _SECONDS,
    HEURISTICS,
    MOST_OPERATORS,
    MOST_PAIRS,
    SHARDED,
    placed_refusal,
    quick_planners,
)
from tensoropt.planners.registry import ENTRIES
from tensoropt.profiling.store import ProfileStore
from tensoropt.session import evaluation, quick_plans
from tensoropt.session.comparing import with_planners
from tensoropt.session.searched import search
from tensoropt.session.session import Session
from tests.models import Call
from tests.session.captured_once import CapturedOnce
from tests.situations import branching

QUICK = [entry.name for entry in quick_planners(1, 2)]
ALL_PLACED = (*_PLACED, *_FEW_PLACED, *_CUTTING)
SLOW = ("flexflow", "pesto", "pesto_extended", "netsplit", "netsplit_shared")
"""Planners that take more than a few seconds for a model of the zoo at laptop size."""
EFFORT = [f"{name}.seconds={seconds}" for name, seconds in _SECONDS.items()]
ALL_BUT_SLOW = [name for name in ENTRIES if name not in SLOW]
BRANCHING = [name for name in vars(branching) if name.startswith("build")]


class Branches(nn.Module):
    """Four convolutions beside each other, twice: work that is large beside what goes between."""

    def __init__(self, width: int = 24):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        cells = ([nn.Conv2d(width, width, 3, padding=1) for _ in range(4)] for _ in range(2))
        self.cells = nn.ModuleList(nn.ModuleList(cell) for cell in cells)
        self.head = nn.Linear(width, 10)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.stem(images)
        for cell in self.cells:
            x = torch.stack([branch(x).relu() for branch in cell]).sum(0)
        return nn.functional.cross_entropy(self.head(x.mean((2, 3))), labels)


def branches(device: str = "cpu", batch: int = 4) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    model = Branches().to(device)
    return model, (torch.randn(batch, 3, 32, 32, device=device), torch.randint(10, (batch,), device=device))


@cache
def built_once(device: str, batch: int) -> CapturedOnce:
    return CapturedOnce(lambda: branches(device, batch))


def explored(store: ProfileStore, cluster: str = "dgx-a100[2]", batch: int = 4, **chosen: Any) -> Exploration:
    built = built_once("cpu" if cluster.startswith("local") else "meta", batch)
    return built.explore(cluster=cluster, store=store, measure="never", **{"micro_batches": (1, 2)} | chosen)


@pytest.fixture(scope="module")
def found(store):
    return explored(store)


@pytest.fixture(scope="module")
def unplaced(store):
    return explored(store, placements="never")


def placed(exploration: Exploration) -> list[tuple[int, Point]]:
    return [(i, point) for i, point in enumerate(exploration.points) if point.kind is kinds.PLACED]


def beating(points: Sequence[Point], others: Sequence[Point]) -> list[tuple[str, Point, Point]]:
    """Others better than a point in one of both costs and no worse in the other, but for rounding."""
    return [
        (other.planner, other, point)
        for other in others
        for point in points
        if other.memory_bytes <= point.memory_bytes * (1 + SAME)
        and other.time_s <= point.time_s * (1 + SAME)
        and (other.memory_bytes < point.memory_bytes * (1 - SAME) or other.time_s < point.time_s * (1 - SAME))
    ]


# -- what comes in --------------------------------------------------------------------------------


def test_placed_plans_of_a_branching_model_are_points(found, unplaced):
    assert placed(found)
    assert not placed(unplaced)
    assert found.points[-1].time_s < unplaced.points[-1].time_s


def test_notes_say_what_was_tried_and_what_came_in(found, unplaced):
    (note,) = [n for n in found.report["notes"] if n.startswith("planners beside the search")]
    assert all(name in note for name in QUICK)
    counted = {name: sum(p.planner == name for p in found.points) for name in found.report["tried"]}
    assert {name: row["merged"] for name, row in found.report["tried"].items()} == counted
    assert all(f"{n} of {name}" in note for name, n in counted.items() if n)
    refused = {name: row["refusal"] for name, row in found.report["tried"].items() if not row["points"]}
    reasons = [n for n in found.report["notes"] if n.startswith("no plan of ")]
    assert "megatron" in refused
    for name, why in refused.items():
        assert [n for n in reasons if name in n and why and n.endswith(why)]
    assert "placed plans were not tried: --placements never" in unplaced.report["notes"]
    assert not set(ALL_PLACED) & set(unplaced.report["tried"])


@pytest.mark.distributed
def test_a_chosen_placed_plan_trains_as_the_model_does(store):
    # No batch to split: branches are all that two devices can share.
    exploration = explored(store, "local:2", batch=1, micro_batches=(1,))
    # Whether one is on the frontier depends on how fast this machine's messages are.
    index = next(row for row, point in enumerate(exploration.all_points) if point.kind is kinds.PLACED)
    model, args = branches(batch=1)
    loss = model(*args)
    loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    parallel = parallelize(model, exploration.plan(index), args)
    own = parallel(*args)
    own.backward()
    torch.testing.assert_close(own, loss)
    for name, parameter in parallel.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_recosting_and_comparing_keep_them(found, store):
    again, _ = recost(found, store=store, old_points=False)
    assert [(p.planner, p.time_s) for p in again.points] == [(p.planner, p.time_s) for p in found.points]
    beside, _ = recost(found, store=store, planners="m_etf,dpos,zero", old_points=False)
    # What a planner finds twice is one plan, in one space.
    assert [(p.planner, p.time_s) for p in beside.points] == [(p.planner, p.time_s) for p in found.points]
    assert len(beside.spaces) == len({str(vars(s)) for s in beside.spaces})
    ours = {p.identity for p in beside.points if p.planner in ("m_etf", "dpos", "zero")}
    assert ours <= {p.identity for p in beside.others}
    assert not beating(beside.points, beside.others)
    (row, *_) = beside.comparison
    last = beside.points[-1]
    assert (row["points"], row["time_s"], row["gap"]) == (len(beside.points), last.time_s, 0.0)
    seconds = beside.report["seconds"]
    assert row["search_s"] == pytest.approx(seconds["search"] + seconds["judge"] + seconds["planners"])


# -- what may not ---------------------------------------------------------------------------------


def pinned(**soft: bool) -> dict[str, Any]:
    return {"pin": [{"operators": "stem", "axes": {"*": "none"}, **soft}]}


@pytest.mark.parametrize("soft", [{}, {"soft": True}], ids=["hard", "soft"])
def test_plans_that_do_not_keep_to_constraints_stay_out(store, soft):
    exploration = explored(store, constraints=pinned(**soft))
    assert not placed(exploration)
    assert not [p for p in exploration.points if p.stages.schedule]
    (note,) = [n for n in exploration.report["notes"] if n.startswith("placed plans were not tried")]
    assert "a placed plan has no mesh axes" in note


ON_ONE = {"operators": "stem", "devices": [1]}


def devices_of(exploration: Exploration, point: int, group: str) -> set[int | None]:
    """The devices of a group, or of its pieces."""
    operators = exploration.plan(point).operators
    return {op.device for name, op in operators.items() if name.partition("[")[0] == group}


@pytest.mark.slow
def test_where_no_sharded_plan_is_allowed_there_are_placed_ones(store, tmp_path):
    constraints = {"devices": [ON_ONE, {"operators": "head", "devices": [9], "soft": True}]}
    exploration = explored(store, constraints=constraints)
    assert exploration.points
    assert len(placed(exploration)) == len(exploration.points)
    assert not any(space.groups for space in exploration.spaces)
    for point in range(len(exploration.points)):
        assert devices_of(exploration, point, "conv2d") == {1}
    notes = exploration.report["notes"]
    (refusal,) = [note for note in notes if note.startswith("no sharded plan: devices 1 (stem: device 1)")]
    assert "the constraint excludes device 0" in refusal
    assert any("given up, as it is soft: devices 2 (head: device 9)" in note for note in notes)
    # Saved, loaded and searched again like others.
    exploration.save(tmp_path / "saved")
    again, old = recost(load_exploration(tmp_path / "saved"), store=store)
    assert [p.time_s for p in again.points] == pytest.approx([p.time_s for p in exploration.points])
    assert [one.time_s for one in old] == pytest.approx([p.time_s for p in exploration.points])


@pytest.mark.slow
def test_planners_of_sharded_plans_and_pipelines_refuse_what_they_cannot_keep(store):
    model, inputs = branches("meta")
    compared = compare(
        model, inputs, cluster="dgx-a100[2]", store=store, measure="never", micro_batches=(1,),
        constraints={"devices": [ON_ONE]}, planners=("zero", "gpipe", "placer"),
    )  # fmt: skip
    rows = {row["planner"]: row for row in compared.comparison}
    assert rows["placer"]["time_s"] is not None
    assert rows["frontier"]["time_s"] is not None
    for name in ("zero", "frontier"):
        assert rows[name]["notes"][0].startswith("no sharded plan: devices 1 (stem: device 1)")
    assert rows["zero"]["time_s"] is None
    assert rows["gpipe"]["notes"][0].startswith("published pipeline planners cannot keep to constraints")


def test_where_nothing_is_allowed_both_sides_are_named(store):
    with pytest.raises(ConstraintError, match=r"no sharded plan: devices 1 .*not tried: --placements never"):
        explored(store, constraints={"devices": [ON_ONE]}, placements="never")
    with pytest.raises(ConstraintError, match=r"no sharded plan: devices 1 .*; no placed plan: pin 1 .*axes"):
        explored(store, constraints={**pinned(), "devices": [ON_ONE]})
    with pytest.raises(ConstraintError, match="matches no operator"):
        explored(store, constraints={"devices": [{"operators": "nothing", "devices": 0}]})


@torch.library.custom_op("tensoropt_tests::row_means", mutates_args=(), device_types="cpu")
def row_means(x: torch.Tensor) -> torch.Tensor:
    return x.mean(1, keepdim=True)


@row_means.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], 1)


def centred(module: Any, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Means of inputs are made by an operator without a kernel for GPUs."""
    return nn.functional.cross_entropy(module.head(x - row_means(x)), labels)


@pytest.mark.slow
def test_cpu_ranks_beside_gpus_take_what_gpus_cannot_run(store):
    model = Call(centred, head=nn.Linear(64, 10))
    inputs = torch.randn(32, 64), torch.randint(10, (32,))
    devices = [{"kind": "H100-80GB", "count": 2}, {"kind": "CPU-core", "count": 1}]
    beside = load_cluster({"name": "beside", "devices": devices, "links": {"intra_node": "PCIe4"}})
    asked = {"store": store, "measure": "never"}
    found = compare(model, inputs, cluster=beside, planners=("placer", "zero", "gpipe"), **asked)
    assert found.points
    for row in range(len(found.all_points)):
        assert devices_of(found, row, "row_means") == {2}
    notes = found.report["notes"]
    lacks = "tensoropt_tests.row_means.default has no kernel for cuda devices"
    words = f"{lacks}: row_means can run on device 2 only"
    assert words in notes
    refusal = "collectives join devices of one type, and beside has 2 x H100-80GB, 1 x CPU-core"
    assert f"no sharded plan: {refusal}" in notes
    assert f"no pipelines: {refusal}" in notes
    rows = {row["planner"]: row for row in found.comparison}
    assert words in rows["placer"]["notes"]
    # What is free lies on GPUs, the first of which cannot run this one.
    assert "1 operators cannot run on device 0 and lie on the next device that can" in rows["placer"]["notes"]
    assert rows["zero"]["notes"] == [f"no sharded plan: {refusal}"]
    assert rows["gpipe"]["notes"][0].startswith("published pipeline planners need devices of one type")
    alone = explore(model, inputs, cluster="dgx-h100[2]", **asked)
    (note,) = [note for note in alone.report["notes"] if note.startswith("no GPU kernels exist for")]
    assert "tensoropt_tests.row_means.default" in note


def test_where_pipelines_are_pinned_no_other_plan_comes_in(store):
    exploration = explored(store, constraints={"pipeline": {"stages": 2}}, micro_batches="auto")
    assert exploration.points
    assert all(p.stages.schedule and p.planner == "frontier" for p in exploration.points)


def test_micro_batch_counts_are_those_asked_for(store):
    model, args = branches("meta")
    asked = {"store": store, "measure": "never", "planners": ["zero", "m_etf", *_PIPELINED]}
    exploration = compare(model, args, cluster="dgx-a100[2]", micro_batches=(2,), **asked)
    counts: dict[bool, set[int]] = {True: set(), False: set()}
    for point in exploration.all_points:
        counts[bool(point.stages.schedule)].add(exploration.spaces[point.space].micro_batches)
    # A pipeline has as many for each of its two places.
    assert counts == {False: {2}, True: {4}}


@pytest.mark.slow
def test_a_budget_is_kept_by_what_comes_in(found, store):
    budget = float(found.needs[len(found.points) - 1])
    within = explored(store, memory_bytes=budget)
    assert [p.time_s for p in within.points] == [p.time_s for p in found.points]
    assert within.needs[within.index(memory_bytes=budget)] <= budget


def test_of_many_operators_fewer_planners_are_quick():
    def names(operators: int) -> list[str]:
        return [entry.name for entry in quick_planners(operators, 2)]

    assert set(names(_FEW_GROUPS)) == {*SHARDED, *ALL_PLACED, *_PIPELINED}
    assert names(_FEW_GROUPS + 1) == [*SHARDED, *_PLACED, *_CUTTING]
    assert names(_MOST_PIECES) == [*SHARDED, *_PLACED]
    assert not set(_CUTTING) & {entry.name for entry in quick_planners(_FEW_GROUPS, _MOST_PIECES)}


@pytest.mark.slow
def test_heuristics_run_within_the_memory_of_a_few_points(store, monkeypatch):
    asked: dict[str, list[float]] = {}
    ask = quick_plans._Asking.ask

    def noting(self: Any, entry: Any, limit: float | None = None) -> None:
        if limit is not None:
            asked.setdefault(entry.name, []).append(limit)
        ask(self, entry, limit)

    monkeypatch.setattr(quick_plans._Asking, "ask", noting)
    monkeypatch.setattr(quick_plans, "MOST_LIMITS", 2)
    exploration = explored(store, process_memory=False)  # several points even of a tiny model
    assert set(asked) == set(HEURISTICS)
    for limits in asked.values():
        assert len(limits) == 3
        assert limits[0] < exploration.points[0].memory_bytes
    points = len(exploration.points)
    notes = exploration.report["notes"]
    assert any(note.startswith("heuristics ran with the memory of 2 of") for note in notes), points


@pytest.mark.slow
def test_placing_planners_stop_when_their_seconds_are_over(store, monkeypatch):
    monkeypatch.setattr(quick_plans, "LEAST_S", 0.0)
    monkeypatch.setattr(quick_plans, "SHARE", 1e-9)
    exploration = explored(store)
    tried, first = exploration.report["tried"], _PLACED[0]
    assert tried[first]["points"] or tried[first]["refusal"]
    for name in (*_PLACED[1:], *_CUTTING):
        assert tried[name]["refusal"] == "other planners had used up the time for placing operators"
    (note,) = [n for n in exploration.report["notes"] if n.startswith("planners of placed plans may take")]
    assert all(name in note for name in _PLACED)
    always = explored(store, placements="always")
    assert not any("had used up the time" in row["refusal"] for row in always.report["tried"].values())


def test_on_equal_gpus_models_without_branches_are_not_placed(store):
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)).to("meta")
    inputs = (torch.empty(8, 32, device="meta"),)
    asked = {"store": store, "measure": "never", "micro_batches": (1,), "mode": "inference"}
    chain = explore(model, inputs, cluster="dgx-a100[2]", **asked)
    (note,) = [n for n in chain.report["notes"] if n.startswith("placed plans were not tried")]
    assert "are 1.0 times those of its longest chain" in note
    assert not set(ALL_PLACED) & set(chain.report["tried"])
    devices = [{"kind": kind, "count": 1} for kind in ("A100-80GB", "H100-80GB")]
    mixed = load_cluster({"name": "mixed", "devices": devices, "links": {"intra_node": "NVLink3"}})
    for cluster, placements in (("cpu:2", "auto"), (mixed, "auto"), ("dgx-a100[2]", "always")):
        tried = explore(model, inputs, cluster=cluster, placements=placements, **asked).report["tried"]
        assert set(_PLACED) <= set(tried)


@pytest.mark.parametrize(("asked", "said"), [
    (("auto", 100, 1), "there is one device"), (("never", 100, 2), "--placements never"),
    (("auto", MOST_OPERATORS, 2), "^$"), (("auto", MOST_OPERATORS + 1, 2), "more than is placed quickly"),
    (("auto", 100, MOST_PAIRS), "more than is placed quickly"),
    (("always", MOST_OPERATORS + 1, MOST_PAIRS, 1.0), "^$"), (("auto", 100, 2, _PARALLEL), "^$"),
    (("auto", 100, 2, 0.99 * _PARALLEL), "gain from branches"),
])  # fmt: skip
def test_on_one_device_and_on_very_many_nothing_is_placed(asked, said):
    assert re.search(said, placed_refusal(*asked))


def test_inference(store):
    exploration = explored(store, mode="inference", micro_batches="auto")
    assert set(exploration.report["tried"]) == {*SHARDED, *ALL_PLACED}
    assert all(p.memory[1] == p.memory[2] == 0 for p in exploration.points)


# -- the promise ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_where_not_all_points_are_shown_a_plan_that_comes_in_stays(store, monkeypatch):
    """Points stand for those that are left out with a gap allowed; a planner's plan may lie between two of
    them, and what the search found itself at its place is taken instead."""
    monkeypatch.setattr(evaluation, "SHOWN", 3)
    monkeypatch.setattr(evaluation, "LOSS", 0.5)
    model, args = branches("meta")
    asked = {"store": store, "measure": "never", "planners": list(QUICK), "epsilon": 0.05}
    exploration = compare(model, args, cluster="dgx-a100[2]", **asked)
    assert not beating(exploration.points, exploration.others)


LAPTOP = [e.name for e in zoo.list_models() if e.size == "laptop"]
BRANCHING_ZOO = (
    "inception-v3-tiny", "amoebanet-d-tiny", "deeplab-v3-tiny", "unet-tiny", "two-tower-tiny",
    "clip-tiny",
)  # fmt: skip
"""Models with branches, also on clusters other than those of all models."""
EXPLORED = [
    *product(LAPTOP, ("dgx-a100", "dgx-a100[2]", "local:2")),
    *product(BRANCHING_ZOO, ("dgx-a100[4]", "netsplit-paper")),
    *product(BRANCHING, ("dgx-a100[2]", "dgx-a100[4]", "local:2")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "cluster"), EXPLORED)
def test_no_planner_beats_a_point(name, cluster, store):
    """Explore a model once, and ask planners on the very tables that it was explored on, ours with the effort
    that they have beside every search; placing ones if the exploration did."""
    source = f"{branching.__file__}:{name}" if name in BRANCHING else f"zoo:{name}"
    loaded = load_model(source, device="cpu" if cluster.startswith("local") else "meta", seed=0)
    session = Session(load_cluster(cluster), Settings(measure="never"), store)
    captured, problem = _prepared(session, loaded, None)
    searched = search(session, problem)
    found = _evaluated(session, searched, _model_info(session, captured, loaded))
    asked = requested_planners(ALL_BUT_SLOW, EFFORT)
    if not set(_PLACED) & set(found.report["tried"]):
        asked = tuple(entry for entry in asked if entry.kind != "placed")
    beside = with_planners(session, searched, found, asked, (None,))
    assert beside.others
    # The search adds up what devices do; steps that wait for launches are only simulated afterwards.
    assert not beating([p for p in found.points if not p.host_bound], beside.others)
