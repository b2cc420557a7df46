"""The registry of figures, and that everything that lists figures is made from it."""

import pytest

from tensoropt.exploration.figure_rows import points_data
from tensoropt.plan.figures import _RATES, BREAKDOWNS, FIGURES, kept_figures, worded
from tests.plan.explorations import MIB, point, small_exploration


def test_a_point_has_what_it_was_made_with():
    one = point(8.0, 1.0, 0, terms={"context": 3.0}, gap=None, host_s=2.0)
    assert (one.context_bytes, one.data_sheet_share) == (3.0, 0.25)
    assert (one.terms, one.memory) == ({"context": 3.0}, (4.0, 2.0, 1.0, 1.0, 0.0))
    assert (one.gap, one.host_s, one.inputs_bytes) == (None, 2.0, 0.0)
    with pytest.raises(AttributeError, match="no figure 'houst_s'"):
        one.houst_s  # noqa: B018
    with pytest.raises(TypeError, match="no figure 'houst_s'"):
        kept_figures({"houst_s": 1.0})


def test_a_change_replaces_a_breakdown_as_a_whole():
    one = point(8.0, 1.0, 0, terms={"context": 3.0, "inputs": 1.0})
    other = one.changed(terms={"inputs": 2.0}, time_s=3.0, planner="zero")
    assert (other.terms, other.time_s, other.planner, other.compute_s) == ({"inputs": 2.0}, 3.0, "zero", 0.75)
    assert other.changed(terms={"context": 3.0, "inputs": 1.0}, time_s=1.0, planner="frontier") == one


def test_json_has_every_figure_but_rates():
    (row,) = points_data(small_exploration(), [1])
    own = {figure.name for figure in FIGURES if figure.part is None} - {figure.name for figure in _RATES}
    assert own | set(BREAKDOWNS) == set(row)
    assert (row["terms"], row["sources"]) == ({}, {"measured": 0.75, "data sheet": 0.25})


def test_figures_stand_in_a_sentence_in_their_own_units():
    one = point(2 * MIB, 0.25, 0)
    words = "{memory_bytes} in {time_s}, {measured_share} measured"
    assert worded(one, words) == "2 MiB in 250 ms, 75 % measured"
