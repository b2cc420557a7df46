"""Schemes that are a part of the space: only what is impossible is left out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tensoropt.costs.cost_graph import NO_OPTION
from tensoropt.planners.registry import planner
from tensoropt.planners.sharded.common.restricted import frontiers
from tests.planners.problems import small

CASE = ("two layers", ((2,),), (1,))


def with_bytes(value: float):
    """The small problem whose first variable has other memory."""
    question = small(*CASE)
    (space,) = question.spaces
    first, *others = space.tables.variables
    broken = replace(first, memory=tuple(np.full_like(table, value) for table in first.memory))
    tables = replace(space.tables, variables=(broken, *others))
    return replace(question, spaces=(replace(space, tables=tables),))


@pytest.mark.parametrize(("value", "says"), [(np.nan, "is NaN"), (-1.0, "-1 is negative")])
@pytest.mark.parametrize("name", ["data_parallel", "zero"])
def test_a_table_with_bad_costs_is_no_refusal(name, value, says):
    with pytest.raises(ValueError, match=says):
        planner(name)(with_bytes(value), None, 0)


def test_a_mask_that_does_not_fit_its_table_is_no_refusal():
    with pytest.raises(ValueError, match="broadcast"):
        list(frontiers(small(*CASE), lambda *_: np.ones(97, dtype=bool)))


def test_where_nothing_of_a_variable_is_allowed_there_is_no_selection():
    first = small(*CASE).spaces[0].tables.variables[0]

    def allowed(space, variable, index):
        return NO_OPTION if variable.key == first.key else None

    assert list(frontiers(small(*CASE), allowed)) == []
    assert list(frontiers(small(*CASE), lambda *_: None))
