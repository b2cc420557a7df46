"""What falls to each use of a tied parameter, by hand."""

from __future__ import annotations

from tensoropt.ops.layouts import PARTIAL_GRAD, REPLICATE, Layout
from tensoropt.sharding.together import Turn, UsePlace, alone, turns

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
