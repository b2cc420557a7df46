"""What an exploration was made from, kept beside it, and what tells explorations apart."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tensoropt.errors import TensorOptError
from tensoropt.plan.changed import (
    FILE,
    Changed,
    fingerprint,
    load_changed,
    only_planners_differ,
    save_changed,
)
from tensoropt.plan.exploration import load_exploration
from tests.plan.explorations import small_exploration


def test_a_fingerprint_survives_saving_and_follows_what_matters(tmp_path: Path) -> None:
    found = small_exploration()
    found.save(tmp_path)
    assert fingerprint(load_exploration(tmp_path)) == fingerprint(found)
    assert len(fingerprint(found)) == 16
    points = (*found.points[:-1], found.points[-1].changed(time_s=found.points[-1].time_s * (1 + 1e-12)))
    others = [
        replace(found, settings={**found.settings, "dtype": "bfloat16"}),
        replace(found, cluster={"name": "other"}),
        replace(found, model=found.model.model_copy(update={"fingerprint": "0" * 64})),
        replace(found, points=points),
    ]
    assert len({fingerprint(one) for one in (found, *others)}) == 5
    # What only tells how it went is no part of it.
    assert fingerprint(replace(found, report={}, versions={})) == fingerprint(found)


def test_planners_alone_differ_where_the_search_found_the_same() -> None:
    found = small_exploration()
    assert only_planners_differ(found, found)
    last = found.points[-1]
    # A planner's plan that beats a point takes its place.
    better = last.changed(planner="zero", time_s=last.time_s * 0.9)
    beside = replace(found, points=(*found.points[:-1], better), others=(better,))
    assert only_planners_differ(found, beside)
    assert only_planners_differ(beside, found)
    # The costs of another day.
    slower = replace(found, points=(*found.points[:-1], last.changed(time_s=last.time_s * 1.01)))
    assert not only_planners_differ(found, slower)
    assert not only_planners_differ(slower, found)
    assert not only_planners_differ(found, replace(found, points=found.points[:-1]))


def test_what_it_was_made_from_is_read_back(tmp_path: Path) -> None:
    assert load_changed(tmp_path) is None
    changed = Changed("0123456789abcdef", "bandwidth:gpu", "twice the bandwidth")
    save_changed(tmp_path, changed)
    assert load_changed(tmp_path) == changed


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"schema": "tensoropt.changed/9"}', "[" * 20_000, "x" * 100_000]
)
def test_a_damaged_file_says_what_to_do(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(TensorOptError, match=r"changed\.json is damaged .*delete it, or explore again"):
        load_changed(tmp_path)


def test_a_field_that_is_missing_is_damage(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(json.dumps({"schema": "tensoropt.changed/1", "of": "0"}))
    with pytest.raises(TensorOptError, match="KeyError: 'key'"):
        load_changed(tmp_path)
