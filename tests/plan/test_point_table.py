"""Points as columns."""

import pickle
import shutil
from dataclasses import replace

import numpy as np
import pytest

from tensoropt.errors import TensorOptError
from tensoropt.exploration.exploration import load_exploration
from tensoropt.plan.plan import StagesInfo
from tensoropt.plan.point_records import StagesRecord
from tests.plan.explorations import point, small_exploration


def test_what_was_saved_is_read_as_it_was(tmp_path):
    odd = point(1.5, 0.5, 0, planner="zero", gap=None, exact=False, host_s=0.1, collectives=(),
                terms={"context": 3.0, "inputs": 0.0}, sources={})  # fmt: skip
    placed = point(2.5, 0.4, 0, choice=(), options=(), record=StagesRecord(StagesInfo()))
    found = replace(small_exploration(), others=(odd, placed))
    found.save(tmp_path)
    loaded = load_exploration(tmp_path)
    assert (loaded.points, loaded.others) == (found.points, found.others)
    assert loaded.others[0].terms == {"context": 3.0, "inputs": 0.0}
    assert loaded.all_points == found.all_points
    assert pickle.loads(pickle.dumps(loaded.points)) == found.points


def test_files_of_two_runs_are_refused(tmp_path):
    small_exploration().save(tmp_path / "a")
    found = small_exploration()
    replace(found, points=found.points[:2]).save(tmp_path / "b")
    shutil.copy(tmp_path / "a" / "points.npz", tmp_path / "b")
    with pytest.raises(TensorOptError, match="of different runs; explore again"):
        load_exploration(tmp_path / "b")


@pytest.mark.parametrize("damage", [
    {"time_s": np.zeros(3)},
    {"time_s": np.array(["a"] * 4)},
    {"space": np.array([0, 1, 0, 7])},
    {"space": np.array([1, 0, 1, 0])},
    {"rows_0": np.array([0])},
    {"choice_1": np.zeros((2, 9), dtype=np.uint8)},
])  # fmt: skip
def test_arrays_that_do_not_fit_together_are_refused(tmp_path, damage):
    small_exploration().save(tmp_path)
    with np.load(tmp_path / "points.npz") as arrays:
        kept = dict(arrays)
    np.savez_compressed(tmp_path / "points.npz", **{**kept, **damage})
    with pytest.raises(TensorOptError, match=r"is damaged \((Value|Index)Error"):
        load_exploration(tmp_path)
