"""A point, the plan made from it and the plan's file have one key, and no other plan has it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tensoropt.exploration.exploration import Exploration
from tensoropt.plan.keys import plan_key
from tensoropt.plan.plan import OperatorPlan, StagesInfo, load_plan
from tensoropt.plan.point_records import StagesRecord
from tests.plan.explorations import MIB, point, small_exploration, space


def blocks() -> Exploration:
    """Every choice of the spaces of the small exploration, whose groups can be recomputed: as two blocks, and
    as one, where a tensor may be gathered again as well."""
    spaces = tuple(
        replace(space(mesh, 2), regions={"linear": "h.0", "loss": last}, moves=moves)
        for mesh, last, moves in (((2,), "h.1", ()), ((1, 2), "h.0", ("linear",)))
    )
    points = [
        point(MIB, 0.1, where, choice=choice, options=(option, 0, 0, 0, *again))
        for where in (0, 1)
        for again in np.ndindex(*(2 for _ in spaces[where].moves))
        for choice in np.ndindex(4, 4, 2, 2)
        for option in range(1 + choice[0] % 2)
    ]
    return replace(small_exploration(), spaces=spaces, points=tuple(points))


def keys(found: Exploration) -> list[str]:
    return [plan_key(found.plan(row)) for row in range(len(found.points))]


def test_every_plan_has_a_key_of_its_own_that_files_keep(tmp_path):
    found = blocks()
    assert len(set(keys(found))) == len(found.points)
    assert {len(key) for key in keys(found)} == {16}
    found.plan(1).save(tmp_path / "plan.json")
    assert plan_key(load_plan(tmp_path / "plan.json")) == keys(found)[1]


def test_figures_are_no_part_of_a_key():
    found = small_exploration()
    slower = [p.changed(time_s=2 * p.time_s, planner="zero") for p in found.points]
    assert keys(replace(found, points=tuple(slower))) == keys(found)


@pytest.mark.parametrize("other", [
    {"settings": {"optimizer": "sgd"}},
    {"model": small_exploration().model.model_copy(update={"fingerprint": "e" * 64})},
    {"spaces": (space((2,), 2), space((1, 2), 2))},
])  # fmt: skip
def test_another_step_has_other_keys(other):
    found = small_exploration()
    assert not {*keys(replace(found, **other))} & {*keys(found)}


def test_a_placed_point_has_the_key_of_its_plan():
    devices = space((2,), 1).mesh.model_copy(update={"placed": True, "names": ("device",)})
    where = replace(space((2,), 1), mesh=devices, groups={}, hubs={}, shared={})
    operator = OperatorPlan(axes={}, micro="", device=1, order=0, backward_order=0)
    record = StagesRecord(StagesInfo(peak_bytes=(1.0, 2.0)), {"linear": operator})
    elsewhere = replace(record, operators={"linear": operator.model_copy(update={"device": 0})})
    heavier = replace(record, stages=StagesInfo(peak_bytes=(1.0, 3.0)))
    points = [point(MIB, 0.1, 0, choice=(), options=(), record=one) for one in (record, elsewhere, heavier)]
    first, second, third = keys(replace(small_exploration(), spaces=(where,), points=tuple(points)))
    assert first == third != second
