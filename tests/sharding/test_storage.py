"""Stored parameters on their way to a use, by hand."""

from __future__ import annotations

import pytest

from tensoropt.graph import Tensor
from tensoropt.ops.layouts import (
    GATHERED_AHEAD,
    GATHERED_ONCE,
    PARTIAL,
    PARTIAL_GRAD,
    REDUCED_LAST,
    REPLICATE,
    layout_names,
)
from tensoropt.sharding.storage import Gather, Reduce, Storage, stored_words, way

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
    assert ways((GATHERED_ONCE, 0))[1:] == ([[], ["reduce_scatter"]], [["all_gather"], []])
    assert ways((REDUCED_LAST, 0))[1:] == ([[], []], [["all_gather"], ["reduce_scatter"]])


@pytest.mark.parametrize(
    ("stored", "use", "goes"),
    [
        ((GATHERED_AHEAD, 0), (RP, RP), True),
        ((GATHERED_AHEAD, 1), (RP, RP), True),
        ((RP, 0), (RP, RP), False),
        ((GATHERED_AHEAD, 0), (RP, 0), False),  # it lies there already
        ((GATHERED_AHEAD, 0), (RP, 1), False),  # exchanged, not gathered
        ((GATHERED_AHEAD, 0), (RP, PR), False),
    ],
)
def test_what_goes_ahead(stored, use, goes):
    """What takes one gather and one scatter; all else is brought at its use."""
    found, each, _ = ways(stored, use)
    assert found.goes_ahead(SIZES, MESH, learns=True) is goes
    assert ways((RP, *stored[1:]), use)[1] == each
    tied = way(WEIGHT, stored, use, MESH, shared=True)
    assert tied.goes_ahead(SIZES, MESH, learns=True) is goes


@pytest.mark.parametrize(
    ("stored", "mesh", "goes"),
    [
        ((GATHERED_AHEAD, 0), (4, 3), True),  # 3, 3 and 2 rows
        ((GATHERED_AHEAD, 1), (4, 4), True),
        ((GATHERED_AHEAD, 0, 0), (1, 2, 3), False),  # pieces of pieces are not all alike
        ((GATHERED_AHEAD, 0, RP), (1, 3, 2), True),
    ],
)
def test_uneven_shards_go_ahead_where_one_axis_cuts_them(stored, mesh, goes):
    found = way(WEIGHT, stored, (RP,) * len(mesh), mesh, shared=False)
    assert found.goes_ahead(SIZES, mesh, learns=True) is goes


def test_where_an_unsharded_copy_lies():
    found, _, _ = ways((GATHERED_ONCE, 0))
    assert (found.shard, found.source, found.back) == ((RP, 0), (RP, RP), (RP, 0))
    assert (found.unsharded, found.reduced_last) == (True, False)
    found, _, _ = ways((REDUCED_LAST, 0))
    assert found.back == found.source == (RP, RP)
    assert (found.unsharded, found.reduced_last) == (True, True)


def test_a_copy_that_several_groups_share_is_whole():
    mesh = (1, 2, 2)
    found, each, once = ways((GATHERED_ONCE, 0, 1), (R, 0, RP), shared=True, mesh=mesh)
    assert found.source == (R, RP, RP)
    assert each[0] == ["slice"]
    assert once[0] == ["all_gather", "all_gather"]
    alone, _, once = ways((GATHERED_ONCE, 0, 1), (R, 0, RP), mesh=mesh)
    assert alone.source == (R, 0, RP)
    assert once[0] == ["all_gather"]


def test_what_lies_as_it_is_used_needs_no_copy():
    found, each, once = ways((GATHERED_ONCE, 0), (RP, 0))
    assert not found.unsharded
    assert each == once == [[], []]
    added, each, once = ways((GATHERED_ONCE, R), (RP, PR))  # a bias that enters a sum is masked at every use
    assert not added.unsharded
    assert (each[0], once) == (["mask"], [[], []])


@pytest.mark.parametrize(("code", "word"), [(GATHERED_ONCE, "held"), (REDUCED_LAST, "held/P"), (RP, None)])
def test_in_words(code, word):
    assert Storage.of((code, 0)).gathered_once == (word is not None)
    assert stored_words(layout_names((code, 0, RP))) == (("S(0)", "R/P", word) if word else ("S(0)", "R/P"))


@pytest.mark.parametrize("stored", [(RP, 0), (R, 0, RP), (GATHERED_ONCE, 0, 1), (REDUCED_LAST, RP, 0)])
def test_a_storage_and_its_layout(stored):
    assert Storage.of(stored).stored == stored


def test_how_often_it_is_gathered_and_reduced():
    found = [Storage.of((code, 0)) for code in (RP, GATHERED_ONCE, REDUCED_LAST)]
    each, last = Reduce.EACH_MICRO_BATCH, Reduce.LAST_MICRO_BATCH
    assert [s.gather for s in found] == [Gather.EACH_USE, Gather.ONCE, Gather.ONCE]
    assert [s.reduce for s in found] == [each, each, last]
    assert Storage((RP, 0), Gather.ONCE, last).stored == (REDUCED_LAST, 0)
    with pytest.raises(ValueError, match="gathered once"):
        Storage((RP, 0), Gather.EACH_USE, last)
