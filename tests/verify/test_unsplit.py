"""The unsplit model on one rank, beside which plans are shown."""

from __future__ import annotations

import pytest

from tensoropt.engine.models import ModelSpec
from tensoropt.types import silent
from tensoropt.verify.unsplit import verify_unsplit


@pytest.mark.slow
@pytest.mark.distributed
def test_the_unsplit_model_runs_as_predicted() -> None:
    (found,) = verify_unsplit(ModelSpec("zoo:mlp"), "adam", progress=silent)["plans"]
    assert found["ok"]
    assert found["memory_tracked_bytes"] == pytest.approx(found["memory_predicted_bytes"], rel=1e-3)
