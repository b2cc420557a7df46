"""Calls of a captured model: what is the same call, and what another one is told."""

from typing import Any

import pytest
import torch
from torch import nn

from tensoropt.capture import capture
from tensoropt.engine.calls import CallingConvention
from tensoropt.errors import PlanError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, labels=None, mask=None, steps=2, *, extra=None, **kwargs):
        for _ in range(steps):
            x = self.layer(x)
        if labels is not None:
            x = x - labels
        if mask is not None:
            x = x * mask
        return (x + (extra["pos"][0] if extra else 0.0)).square().mean()


X, Y, POS = torch.ones(2, 4), torch.zeros(2, 4), torch.ones(4)


def convention(*args: Any, **kwargs: Any) -> CallingConvention:
    net = Net()
    return CallingConvention(net.forward, capture(net, args, kwargs))


def taken(convention: CallingConvention, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
    return convention.inputs(args, kwargs)


@pytest.mark.parametrize("call", [
    lambda c: taken(c, X, Y),
    lambda c: taken(c, labels=Y, x=X),
    lambda c: taken(c, X, Y, None, 2),
    lambda c: taken(c, X, Y, steps=2, extra=None),
    lambda c: taken(c, X, Y, num_items_in_batch=None),
])  # fmt: skip
@pytest.mark.parametrize("explicit", [False, True])
def test_the_same_call_in_other_words(call, explicit):
    """By position, by name, with defaults or None written out, at capture or later."""
    made = convention(X, Y, None, 2, extra=None) if explicit else convention(X, Y)
    x, y = call(made)
    assert x is X
    assert y is Y


@pytest.mark.parametrize(("call", "says"), [
    (lambda c: taken(c, X, mask=Y), "call with x, labels, but this one has x, mask;"),
    (lambda c: taken(c, X), "call with x, labels, but this one has x;"),
    (lambda c: taken(c, X, None), "call with x, labels, but this one has x;"),
    (lambda c: taken(c, X, Y, Y), "call with x, labels, but this one has x, labels, mask;"),
    (lambda c: taken(c, X, Y, steps=3), "but this one has x, labels, steps = 3;"),
    (lambda c: taken(c, X, Y, extra={"pos": [POS]}), r"has x, labels, extra\['pos'\]\[0\];"),
    (lambda c: taken(c, X, Y, more=Y), "but this one has x, labels, more;"),
    (lambda c: taken(c, labels=Y), "missing a required argument: 'x'; the plan is for a call with x, l"),
    (lambda c: taken(c, X[:1], Y), r"this call has \(1, 4\) torch.float32 in x; every rank passes"),
    (lambda c: taken(c, X, Y[:, :2]), r"has \(2, 2\) torch.float32 in labels; pad or cut it to \(2, 4\)"),
    (lambda c: taken(c, X, Y[:, :2].long()), r'padding="max_length", truncation=True, max_length=4\)'),
    (lambda c: taken(c, X, Y.double()), r"float64 in labels; convert it \(.to\(torch.float32\)\)"),
    (lambda c: taken(c, X.clone().requires_grad_(), Y), r"parameters only, but x .* pass x.detach\(\)"),
])  # fmt: skip
def test_another_call_is_refused_by_names(call, says):
    with pytest.raises(PlanError, match=says):
        call(convention(X, Y))


def test_containers_are_compared_by_what_is_in_them():
    made = convention(X, extra={"pos": [POS], "unused": None, "size": 3})
    for extra in ({"size": 3, "pos": [POS], "unused": None}, {"pos": (POS,), "size": 3}):
        assert taken(made, X, extra=extra)[1] is POS
    with pytest.raises(PlanError, match=r"constant extra\['size'\] = 3, but this one has 4"):
        taken(made, X, extra={"pos": [POS], "size": 4})
    with pytest.raises(
        PlanError, match=r"but this one has x, extra\['pos'\]\[0\], extra\['size'\], extra\['more'\]"
    ):
        taken(made, X, extra={"pos": [POS], "size": 3, "more": POS})


def test_constants_are_not_mixed_up():
    made = convention(X, steps=1)
    with pytest.raises(PlanError, match="constant steps = 1, but this one has True"):
        taken(made, X, steps=True)
    with pytest.raises(PlanError, match="constant steps = 1, but this one has a tensor"):
        taken(made, X, steps=torch.tensor(1))
