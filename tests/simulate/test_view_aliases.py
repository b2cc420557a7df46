"""Who reads the views of a storage: worked out by hand for a tensor with two views."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from tensoropt.costs.effects import Reading
from tensoropt.simulate.aliases import ViewAlias, ViewAliases
from tensoropt.simulate.readings import Column

ROWS, WHOLE = (0,), (-1,)


class Seen:
    """``written``: per view what its maker says of it; readers read as it is written, ``far`` in rows."""

    def __init__(self, written, again=()):
        self._written, self._again = written, again

    def written(self, group, name):
        return Column(np.zeros(1, int), [self._written[name]])

    def read(self, group, name):
        return Column(np.zeros(1, int), [Reading(ROWS if group == "far" else WHOLE, True)])

    def hub(self, name):
        return None

    def inside(self, maker, reader):
        return False

    def gathered_again(self, name):
        return np.ones(1, int) if name in self._again else None


def alias(
    name: str, first: int, *readers: str, inner: tuple[ViewAlias, ...] = (), through: int = 0
) -> ViewAlias:
    groups = tuple(SimpleNamespace(name=reader) for reader in readers)
    maker = SimpleNamespace(name=f"cuts {name}")
    return ViewAlias(name, maker, through, "x", first, groups, False, inner)


def users(views, written, *, orders=tuple(range(20)), through=None, again=()):
    moves = SimpleNamespace(steps=lambda name, a, b: ([], []) if a == b else (["all-gather"], []))
    found = ViewAliases(None, None, moves, Seen(written, again))
    return list(found.users(views, 0, orders, through))


def view(lies_in: str = "x") -> Reading:
    return Reading(WHOLE, False, lies_in=lies_in)


def test_one_that_is_no_view_here_leaves_the_others_their_readers():
    both = [alias("a", 2, "reads a"), alias("b", 4, "reads b", "also b")]
    assert [u.number for u in users(both, {"a": view(), "b": view()})] == [3, 5, 6]
    assert [u.number for u in users(both, {"a": view(""), "b": view()})] == [5, 6]
    assert [u.number for u in users(both, {"a": view(), "b": view("")})] == [3]


def test_a_reader_of_a_view_comes_when_it_comes():
    (user,) = users([alias("a", 2, "reads a", through=7)], {"a": view()})
    assert (user.number, user.order, user.kept, user.moved, user.through) == (3, 3, True, False, 7)


def test_a_view_of_a_view_counts_unless_its_reader_has_a_copy():
    inner = alias("b", 6, "reads b", through=0)
    for reader, numbers in (("reads a", [3, 7]), ("far", [3])):
        outer = alias("a", 2, reader, inner=(inner,), through=9)
        found = users([outer], {"a": view(), "b": view()})
        assert [u.number for u in found] == numbers
        assert {u.through for u in found} == {9}
        assert [u.moved for u in found] == [reader == "far"] + [False] * (len(numbers) - 1)


def test_a_reader_that_gathers_a_view_again_needs_the_storage_that_it_lies_in():
    for again, moved in ((), True), (("a",), False):
        (user,) = users([alias("a", 2, "far")], {"a": view()}, again=again)
        assert (user.kept, user.moved) == (True, moved)
