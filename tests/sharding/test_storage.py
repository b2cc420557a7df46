"""Stored parameters on their way to a use, by hand."""

from __future__ import annotations

import pytest

from tensoropt.graph import Tensor
from tensoropt.ops.layouts import HELD, PARTIAL, PARTIAL_GRAD, REPLICATE, WAITING, layout_names
from tensoropt.sharding.storage import is_held, stored_words, way

R, RP, PR = REPLICATE, PARTIAL_GRAD, PARTIAL
WEIGHT = Tensor("w", (8, 6), "float32", "parameter", True)
SIZES, MESH = (8, 6), (4, 2)


def kinds(steps):
    return [step.kind for step in steps]


def ways(stored, use=(RP, RP), *, shared=False, mesh=MESH):
    found = way(WEIGHT, stored, use, mesh, shared=shared)
    each, once = (m(SIZES, mesh, learns=True) for m in (found.steps, found.once))
    return found, [kinds(s) for s in each], [kinds(s) for s in once]


def test_the_three_stages_of_a_sharded_parameter():
    """(gathered, reduce-scattered) in every micro-batch; once per step."""
    assert ways((RP, 0))[1:] == ([["all_gather"], ["reduce_scatter"]], [[], []])
    assert ways((HELD, 0))[1:] == ([[], ["reduce_scatter"]], [["all_gather"], []])
    assert ways((WAITING, 0))[1:] == ([[], []], [["all_gather"], ["reduce_scatter"]])


def test_where_a_held_copy_lies():
    found, _, _ = ways((HELD, 0))
    assert (found.home, found.source, found.back) == ((RP, 0), (RP, RP), (RP, 0))
    assert (found.held, found.waits) == (True, False)
    found, _, _ = ways((WAITING, 0))
    assert found.back == found.source == (RP, RP)
    assert (found.held, found.waits) == (True, True)


def test_a_copy_that_several_groups_share_is_whole():
    mesh = (1, 2, 2)
    found, each, once = ways((HELD, 0, 1), (R, 0, RP), shared=True, mesh=mesh)
    assert found.source == (R, RP, RP)
    assert each[0] == ["slice"]
    assert once[0] == ["all_gather", "all_gather"]
    alone, _, once = ways((HELD, 0, 1), (R, 0, RP), mesh=mesh)
    assert alone.source == (R, 0, RP)
    assert once[0] == ["all_gather"]


def test_what_lies_as_it_is_used_needs_no_copy():
    found, each, once = ways((HELD, 0), (RP, 0))
    assert not found.held
    assert each == once == [[], []]
    added, each, once = ways((HELD, R), (RP, PR))  # a bias that enters a sum is masked at every use
    assert not added.held
    assert (each[0], once) == (["mask"], [[], []])


@pytest.mark.parametrize(("code", "word"), [(HELD, "held"), (WAITING, "held/P"), (RP, None)])
def test_in_words(code, word):
    assert is_held((code, 0)) == (word is not None)
    assert stored_words(layout_names((code, 0, RP))) == (("S(0)", "R/P", word) if word else ("S(0)", "R/P"))
