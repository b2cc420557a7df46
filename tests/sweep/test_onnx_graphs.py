"""Random ONNX graphs give what the package's own evaluator gives."""

from __future__ import annotations

import numpy as np
import pytest
from onnx.reference import ReferenceEvaluator

from tests.sweep.onnx_graphs import outcomes

QUICK = 10


def test_graphs_are_imported_right() -> None:
    found = list(outcomes(range(QUICK)))
    assert [one for one in found if one.startswith("wrong")] == []
    assert found.count("right") > QUICK / 2


@pytest.mark.slow
def test_more_graphs_are_imported_right() -> None:
    assert [one for one in outcomes(range(1000, 1200)) if one.startswith("wrong")] == []


def test_a_wrong_result_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    run = ReferenceEvaluator.run
    monkeypatch.setattr(
        ReferenceEvaluator, "run", lambda self, *given: [np.asarray(v) + 1 for v in run(self, *given)]
    )
    assert all(one != "right" for one in outcomes(range(3)))
