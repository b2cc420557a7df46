"""What is known of the toy; not collected with the others."""

from tests.mutants.toy.sums import clipped, total


def test_total():
    assert total([3, 4]) == 7


def test_clipped():
    assert clipped(9, 5) == 5
    assert clipped(2, 5) == 2
