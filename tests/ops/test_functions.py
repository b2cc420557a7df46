"""Functions as operators: names that two processes agree on, and what a process without the model says."""

import enum

import pytest
import torch
from torch.utils import _pytree as pytree

from tensoropt.ops.functions import FunctionCall, NotConstant, Slot, _constant_text, operator_of
from tensoropt.ops.overloads import OwnFunctionError, resolve_overload


class Kind(enum.Enum):
    """A choice."""

    ONE = 1


class Scale(torch.autograd.Function):
    """Multiplies; its backward doubles that."""

    @staticmethod
    def forward(ctx, x, by):
        ctx.by = by
        return x * by

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.by * grad, None


def scaled(by):
    leaves, spec = pytree.tree_flatten((Slot(0), by))
    return operator_of(FunctionCall(Scale, leaves, spec, [Slot(0)]))


def test_the_operator_runs_the_function():
    x = torch.ones(3, requires_grad=True)
    made = scaled(4.0)(x)
    made.sum().backward()
    assert torch.equal(made, torch.full((3,), 4.0))
    assert torch.equal(x.grad, torch.full((3,), 8.0))
    with torch.inference_mode():
        assert torch.equal(scaled(4.0)(torch.ones(3)), torch.full((3,), 4.0))


def test_other_constants_are_another_operator():
    assert scaled(2.0) is scaled(2.0)
    assert scaled(2.0) is not scaled(3.0)
    assert len({_constant_text(value) for value in (1, 1.0, True, "1")}) == 4


def test_a_process_without_the_model_says_whose_it_is():
    with pytest.raises(OwnFunctionError, match=r"Snap is the model.s own torch\.autograd\.Function"):
        resolve_overload("tensoropt_functions.Snap_01234567.default")
    with pytest.raises(OwnFunctionError, match=r"mine\.own is an operator that no library .*; load the"):
        resolve_overload("mine.own.default")
    # Some callers ask whether there is one.
    with pytest.raises(AttributeError):
        resolve_overload("aten.linear.nothing")


@pytest.mark.parametrize(
    "value",
    [1, 1.5, "a", None, True, (1, [2]), {"a": 1}, torch.float32, torch.Size([2]), Kind.ONE, torch.relu],
)
def test_constants_have_a_text_without_an_address(value):
    assert "0x" not in _constant_text(value)


@pytest.mark.parametrize("value", [object(), torch.nn.Linear(1, 1), torch.ones(1), [torch.ones(1)]])
def test_other_objects_have_none(value):
    with pytest.raises(NotConstant):
        _constant_text(value)
