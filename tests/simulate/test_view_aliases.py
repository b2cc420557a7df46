"""Who reads the views of a storage: worked out by hand for a tensor with two views."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from tensoropt.simulate.effects import Reading
from tensoropt.simulate.view_aliases import Lodgers, Lodging

ROWS, WHOLE = (0,), (-1,)


def lodging(
    name: str, first: int, *readers: str, inner: tuple[Lodging, ...] = (), through: int = 0
) -> Lodging:
    groups = tuple(SimpleNamespace(name=reader) for reader in readers)
    maker = SimpleNamespace(name=f"cuts {name}")
    return Lodging(name, maker, through, "x", first, groups, False, inner)


def users(lodgings, written, *, turns=tuple(range(20)), through=None):
    """``written``: per view what its maker says of it; readers read as it is written, ``far`` in rows."""

    def readings(group, name, writes):
        reading = written[name] if writes else Reading(ROWS if group == "far" else WHOLE, True)
        return np.zeros(1, int), [reading]

    makes = SimpleNamespace(steps=lambda name, a, b: ([], []) if a == b else (["all-gather"], []))
    found = Lodgers(None, None, makes, readings, lambda name: None, lambda maker, reader: False)
    return list(found.users(lodgings, 0, turns, through))


def view(lies_in: str = "x") -> Reading:
    return Reading(WHOLE, False, lies_in=lies_in)


def test_one_that_is_no_view_here_leaves_the_others_their_readers():
    both = [lodging("a", 2, "reads a"), lodging("b", 4, "reads b", "also b")]
    assert [u.number for u in users(both, {"a": view(), "b": view()})] == [3, 5, 6]
    assert [u.number for u in users(both, {"a": view(""), "b": view()})] == [5, 6]
    assert [u.number for u in users(both, {"a": view(), "b": view("")})] == [3]


def test_a_reader_of_a_view_comes_when_it_comes():
    (user,) = users([lodging("a", 2, "reads a", through=7)], {"a": view()})
    assert (user.number, user.turn, user.kept, user.moved, user.lodges) == (3, 3, True, False, 7)


def test_a_view_of_a_view_counts_unless_its_reader_has_a_copy():
    inner = lodging("b", 6, "reads b", through=0)
    for reader, numbers in (("reads a", [3, 7]), ("far", [3])):
        outer = lodging("a", 2, reader, inner=(inner,), through=9)
        found = users([outer], {"a": view(), "b": view()})
        assert [u.number for u in found] == numbers
        assert {u.lodges for u in found} == {9}
        assert [u.moved for u in found] == [reader == "far"] + [False] * (len(numbers) - 1)
