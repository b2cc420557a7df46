"""Cuts that even out what stages have."""

from __future__ import annotations

import numpy as np

from tensoropt.pipeline.balance import balanced


def test_the_heaviest_stage_is_lightest() -> None:
    assert balanced(np.ones(8), range(1, 8), 2) == (4,)
    assert balanced(np.array([5.0, 1, 1, 1, 1, 1]), range(1, 6), 2) == (1,)
    assert balanced(np.ones(2), [1], 3) == ()


def test_stronger_stages_get_more() -> None:
    # Three times as strong: six of eight, whichever stage it is.
    assert balanced(np.ones(8), range(1, 8), 2, (3.0, 1.0)) == (6,)
    assert balanced(np.ones(8), range(1, 8), 2, (1.0, 3.0)) == (2,)
    assert balanced(np.ones(8), range(1, 8), 3, (2.0, 1.0, 1.0)) == (4, 6)
