"""Units of operators that share a device, by hand."""

from __future__ import annotations

import pytest

from tensoropt.errors import TensorOptError
from tensoropt.planners.placed.common.units import units_of
from tests.planners.placed.hand import problem_of


def test_units_join_what_belongs_together():
    problem = problem_of(
        [1.0] * 5,
        [(0, 1)],
        stored=[1, 2, 4, 8, 16],
        together=((0, 2), (2, 4)),
        pinned=((4, (1,)), (1, (0,))),
    )
    units = units_of(problem)
    assert units.members == ((0, 2, 4), (1,), (3,))
    assert units.of == (0, 1, 0, 2, 0)
    assert units.bytes.tolist() == [21, 2, 8]
    assert [c.tolist() for c in units.choices] == [[1], [0], [0, 1]]


def test_contradicting_pins_name_both_sides():
    problem = problem_of([1.0, 1.0], [], together=((0, 1),), pinned=((0, (0,)), (1, (1,))))
    with pytest.raises(TensorOptError, match="op0 on device 0; op1 on device 1"):
        units_of(problem)
