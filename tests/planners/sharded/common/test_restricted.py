"""Schemes that are a part of the space: only what is impossible is left out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tensoropt.costs.cost_graph import NO_OPTION
from tensoropt.planners.sharded.common.restricted import frontiers
from tests.planners.problems import small

CASE = ("two layers", ((2,),), (1,))


def test_a_table_with_bad_costs_is_no_refusal():
    question = small(*CASE)
    (space,) = question.spaces
    first, *others = space.tables.variables
    broken = replace(first, memory=tuple(np.full_like(table, np.nan) for table in first.memory))
    tables = replace(space.tables, variables=(broken, *others))
    with pytest.raises(ValueError, match="is NaN"):
        list(frontiers(replace(question, spaces=(replace(space, tables=tables),)), lambda *_: None))


def test_where_nothing_of_a_variable_is_allowed_there_is_no_selection():
    first = small(*CASE).spaces[0].tables.variables[0]

    def allowed(space, variable, index):
        return NO_OPTION if variable.key == first.key else None

    assert list(frontiers(small(*CASE), allowed)) == []
    assert list(frontiers(small(*CASE), lambda *_: None))
