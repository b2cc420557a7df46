"""Stored parameters on their way to a use, by hand.

What falls to each use of a tied parameter, by hand.
"""

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
    Layout,
    layout_names,
)
from tensoropt.sharding.storage import (
    Gather,
    Reduce,
    Storage,
    Turn,
    UsePlace,
    alone,
    stored_words,
    turns,
    way,
)

WHOLE, CUT = (REPLICATE, PARTIAL_GRAD), (REPLICATE, 0)


def use(block: int, layout: Layout = WHOLE, **more: bool) -> UsePlace:
    told = {"again": False, "wanted": True, "ahead": True, "behind": True} | more
    return UsePlace(block, layout, **told)


def test_the_only_use_does_everything() -> None:
    assert turns([use(3)]) == [alone(wanted=True)]
    assert turns([use(3, wanted=False)]) == [alone(wanted=False)]
    assert alone(wanted=False) == Turn(gathers_back=False, frees_back=False)
    assert alone(wanted=True) == Turn(frees_again=False)


def test_two_blocks_gather_each_and_scatter_once() -> None:
    """An embedding, which backward does not ask for, and the head."""
    embedding, head = turns([use(0, wanted=False), use(4)])
    assert embedding == alone(wanted=False)._replace(before=1, scatters=True)
    assert head == alone(wanted=True)._replace(before=0, scatters=False)


def test_uses_of_one_block_share() -> None:
    """Three of one block, of which the first two are wanted, and one of another."""
    first, second, third, other = turns([use(1), use(1), use(1, wanted=False), use(2)])
    assert [t.gathers for t in (first, second, third, other)] == [True, False, False, True]
    assert [t.frees for t in (first, second, third, other)] == [False, False, True, True]
    assert [t.gathers_back for t in (first, second, third, other)] == [False, True, False, True]
    assert [t.frees_back for t in (first, second, third, other)] == [True, False, False, True]
    assert [t.before for t in (first, second, third, other)] == [3, 2, 1, 0]
    assert [t.scatters for t in (first, second, third, other)] == [True, False, False, False]
    assert not any(t.frees_again for t in (first, second, third, other))


def test_uses_that_read_it_otherwise_share_nothing() -> None:
    assert turns([use(1), use(1, CUT)]) == [alone(wanted=True)] * 2
    # A recomputed region gathers for its second forward what others of the block do not.
    one, other = turns([use(1, again=True), use(1)])
    assert (one.gathers, other.gathers, one.frees, other.frees) == (True,) * 4
    assert (one.scatters, other.scatters) == (True, False)


def test_what_goes_its_own_way_has_no_part() -> None:
    found = turns([use(0, ahead=False, behind=False), use(0, ahead=False), use(1, ahead=False)])
    assert found[0] == alone(wanted=True)
    assert [t.before for t in found[1:]] == [1, 0]
    assert [t.scatters for t in found[1:]] == [True, False]
    assert all(t.gathers for t in found)


R, RP, PR = REPLICATE, PARTIAL_GRAD, PARTIAL
WEIGHT = Tensor("w", (8, 6), "float32", "parameter", True)
SIZES, MESH = (8, 6), (4, 2)


def kinds(steps):
    return [step.kind for step in steps]


def ways(stored, use=(RP, RP), *, shared=False, mesh=MESH):
    found = way(WEIGHT, stored, use, SIZES, mesh, shared=shared)
    each, once = (m(learns=True) for m in (found.steps, found.once))
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
    assert found.goes_ahead(learns=True) is goes
    assert ways((RP, *stored[1:]), use)[1] == each
    assert ways(stored, use, shared=True)[0].goes_ahead(learns=True) is goes


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
    assert ways(stored, (RP,) * len(mesh), mesh=mesh)[0].goes_ahead(learns=True) is goes


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


@pytest.mark.parametrize(
    ("code", "gather", "reduce", "words"),
    [
        (RP, Gather.EACH_USE, Reduce.EACH_MICRO_BATCH, ()),
        (GATHERED_AHEAD, Gather.AHEAD, Reduce.EACH_MICRO_BATCH, ("ahead",)),
        (GATHERED_ONCE, Gather.ONCE, Reduce.EACH_MICRO_BATCH, ("held",)),
        (REDUCED_LAST, Gather.ONCE, Reduce.LAST_MICRO_BATCH, ("held/P",)),
    ],
)
def test_how_often_it_is_gathered_and_reduced(code, gather, reduce, words):
    stored = (code, 0, RP)
    found = Storage.of(stored)
    assert (found.gather, found.reduce, found.stored) == (gather, reduce, stored)
    assert stored_words(layout_names(stored)) == ("S(0)", "R/P", *words)
