"""What moments of a step are called, and where a group is cut: where its inputs are read first and last."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tensoropt.costs.group_effects import parts_of
from tensoropt.simulate.step_schedule import Moment


def group(*reads: str) -> SimpleNamespace:
    """A group whose operators read so: ``"xy"`` two tensors of others, ``"."`` none."""
    operators = tuple(SimpleNamespace(inputs=lambda names=names: tuple(names)) for names in reads)
    return SimpleNamespace(operators=operators, reads=("x", "y"))


@pytest.mark.parametrize(
    ("reads", "starts", "first", "last"),
    [
        (("x",), (0,), {"x": 0}, {"x": 0}),
        (("x", "."), (0, 1), {"x": 0}, {"x": 0}),
        ((".", "x"), (0, 1), {"x": 1}, {"x": 1}),
        (("x", ".", "x"), (0,), {"x": 0}, {"x": 0}),
        (("x", ".", "x", "."), (0, 3), {"x": 0}, {"x": 0}),
        (("x", ".", "y", "."), (0, 1, 2, 3), {"x": 0, "y": 2}, {"x": 0, "y": 2}),
        (("x", "y", "x"), (0, 1, 2), {"x": 0, "y": 1}, {"x": 2, "y": 1}),
        ((".", "z"), (0,), {}, {}),
    ],
)
def test_parts_begin_where_a_tensor_is_needed_first_and_end_where_it_is_needed_last(
    reads, starts, first, last
):
    found = parts_of(group(*reads))
    assert (found.starts, dict(found.first), dict(found.last)) == (starts, first, last)
    assert [found.of(position) for position in range(len(reads))] == sorted(
        found.of(position) for position in range(len(reads))
    )


@pytest.mark.parametrize(
    ("phase", "kind", "words"),
    [
        ("forward", "read", "resharding x for g"),
        ("again", "read", "again: resharding x for g"),
        ("backward", "read", "resharding the gradient of x from g"),
        ("forward", "gather", "parameters for forward g"),
        ("again", "gather", "again: parameters for forward g"),
        ("backward", "gather", "parameters for backward g"),
        ("again", "compute", "again: forward g"),
        ("backward", "inner", "inside backward g"),
        ("forward", "hub", "materialising x"),
        ("backward", "hub", "gradient of materialised x"),
        ("forward", "output", "result x"),
        ("backward", "output", "gradient of result x"),
        ("backward", "parameters", "gradients of the parameters of g"),
        ("reduction", "reduce", "reducing the gradients of g once"),
        ("optimizer", "unshard", "unsharding the parameters of g"),
        ("optimizer", "step", "optimizer"),
    ],
)
def test_a_moment_is_named_by_what_happens_in_it(phase, kind, words):
    assert Moment(phase, kind, "g", "x").words == words
