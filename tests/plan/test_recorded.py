"""Prices kept with an exploration, as earlier versions saved them too."""

from __future__ import annotations

import pytest

from tensoropt.plan.recorded import _transition
from tensoropt.profiling.transitions import Transition

NOW = Transition(
    works_s=(0.0, 1e-3, 4e-3),
    sizes=(4096, 65536),
    arriving_s=((0.0, 0.0), (1e-4, 2e-4), (1e-4, 3e-4)),
    leaving_s=((0.0, 0.0), (1e-5, 2e-5), (1e-5, 4e-5)),
)


def test_what_is_saved_comes_back():
    assert _transition(NOW.to_dict()) == NOW


def test_what_was_saved_by_size_alone_holds_for_any_work():
    old = _transition(NOW.to_dict() | {"leaving_s": [1e-5, 4e-5]})
    assert float(old.leaving(0.0, 65536)) == 0.0
    assert old.leaving([1e-3, 1.0], 65536) == pytest.approx([4e-5, 4e-5])
