"""What devices hold while a method places, by hand."""

from __future__ import annotations

import numpy as np

from tensoropt.planners.placed.common.memory import MemoryBook
from tensoropt.planners.placed.common.units import units_of
from tests.planners.placed.hand import problem_of


def test_of_what_passes_the_largest_counts():
    problem = problem_of([1.0] * 3, [(0, 1), (1, 2)], message_s={(0, 1): 2e-6, (1, 2): 6e-6}, stored=4.0)
    units = units_of(problem)
    assert units.transient_bytes.tolist() == [2, 8, 6]
    memory = MemoryBook.empty(np.array([16.0, 15.9]))
    memory.book(units, 0, 0)
    memory.book(units, 0, 1)
    assert memory.room(units, 1).tolist() == [True, False]
    memory.book(units, 1, 0)
    assert (memory.used.tolist(), memory.transient.tolist()) == ([8, 4], [8, 2])
    assert MemoryBook.empty(np.array([4.0]), counts_transients=False).room(units, 1).tolist() == [True]
