"""A parallelized model as the plain module that it was."""

from __future__ import annotations

from typing import Any

import pytest

from tests.execute import plain_jobs as jobs

pytestmark = pytest.mark.distributed
ROUNDING = 2e-4


def check(found: dict[str, Any]) -> None:
    assert found["keys"]
    assert found["plain"]
    assert found["apart"]
    for name in ("first", "values", "second"):
        assert found[name] < ROUNDING, found
    assert found.get("called", 0.0) < ROUNDING, found


@pytest.mark.sweep(quick=2)
@pytest.mark.parametrize(
    ("name", "mesh", "seed"),
    [
        ("gpt2_ignored", (2, 2), 3),  # tied, with a fused projection
        ("moving_average", (1, 2), 3),  # with buffers that steps change
        ("mlp", ("1f1b", 2, 2), 3),
        ("mlp", ("placed", 1), 3),
    ],
    ids=str,
)
def test_a_plain_module(ranks, name, mesh, seed):
    for found in ranks.run(jobs.whole_model, name, mesh, seed):
        check(found)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(1, 2, 2), (2, 4), ("1f1b", 2, 2, 2)], ids=str)
def test_a_plain_module_of_four_ranks(four_ranks, mesh):
    for seed in range(3):
        for found in four_ranks.run(jobs.whole_model, "gpt2_ignored", mesh, seed):
            check(found)


def test_generated_and_saved(ranks, tmp_path):
    for found in ranks.run(jobs.generated, (1, 2), str(tmp_path)):
        assert found["same"]
        assert found["read"] < ROUNDING
        assert "Perceptron has no save_pretrained" in found["other"]
