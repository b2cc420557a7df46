"""What running a plan showed is kept beside its exploration, and found again by the plan's prediction."""

from __future__ import annotations

from typing import Any

import pytest

from tensoropt.errors import TensorOptError
from tensoropt.exploration.verified import FILE, load_verified, save_verified
from tests.plan.explorations import small_exploration

EXPLORATION = small_exploration()


def answer(**changes: Any) -> dict[str, Any]:
    """As ``verify_plan`` answers for one plan."""
    one = {
        "memory_tracked_bytes": 11_000_000, "time_measured_s": 0.3, "loss_difference": 1e-7,
        "gradient_difference": 2e-6, "error": None,
    }  # fmt: skip
    return {"ok": True, "checked_on": "run on 2 CPU ranks", "plans": [{**one, **changes}]}


def test_what_was_found_is_of_its_point_and_of_no_other(tmp_path):
    EXPLORATION.save(tmp_path)
    assert load_verified(tmp_path) == ()
    save_verified(tmp_path, EXPLORATION.plan(1), answer())
    (found,) = load_verified(tmp_path)
    assert [found.is_of(EXPLORATION, i) for i in range(4)] == [False, True, False, False]
    assert (found.time_measured_s, found.ok, found.error) == (0.3, True, "")


def test_a_second_run_replaces_the_first(tmp_path):
    EXPLORATION.save(tmp_path)
    save_verified(tmp_path, EXPLORATION.plan(1), answer())
    save_verified(tmp_path, EXPLORATION.plan(2), answer(time_measured_s=None))
    save_verified(tmp_path, EXPLORATION.plan(1), answer(time_measured_s=0.4))
    assert [one.time_measured_s for one in load_verified(tmp_path)] == [None, 0.4]


def test_a_plan_of_another_exploration_is_refused(tmp_path):
    EXPLORATION.save(tmp_path)
    odd = EXPLORATION.plan(0).model_copy(update={"recomputed": ("h.0",)})
    with pytest.raises(TensorOptError, match="not a point of the exploration"):
        save_verified(tmp_path, odd, answer())
    assert not (tmp_path / FILE).exists()


@pytest.mark.parametrize(("text", "why"), [
    *((text, "is damaged") for text in ("", "{", "[]", '{"schema": "odd"}')),
    ('{"schema": "tensoropt.verified/2", "plans": [3]}', "is damaged"),
    ('{"schema": "tensoropt.verified/1", "plans": []}', "damaged .its schema is 'tensoropt.verified/1', not"),
])  # fmt: skip
def test_what_is_damaged_or_of_an_earlier_version_is_said(tmp_path, text, why):
    (tmp_path / FILE).write_text(text)
    with pytest.raises(TensorOptError, match=rf"verified.json.* {why} .* verify again"):
        load_verified(tmp_path)
