"""Small calls of some operators, by name.

Every call reads ``x`` (and what it needs beside) after a product with a parameter, so that gradients reach
its operands; dims divide by 4 and differ, so that a mix-up of dims shows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch.nn import functional as F

from tensoropt.capture import capture
from tensoropt.graph import OperatorGraph
from tests.models import Call

Function = Callable[..., torch.Tensor]
CALLS: dict[str, tuple[Function, tuple[torch.Tensor, ...], dict[str, tuple[int, ...]]]] = {}


@cache
def graph_of_call(name: str) -> OperatorGraph:
    torch.manual_seed(0)
    function, args, parameters = CALLS[name]
    return capture(Call(function, **parameters), args, loss=lambda y: y.square().sum()).graph


def call(name: str, function: Function, *args: torch.Tensor, **parameters: tuple[int, ...]) -> None:
    CALLS[name] = (function, args, parameters)


X = torch.randn(4, 8)
CUBE, IMAGE = torch.randn(4, 6, 8), torch.randn(4, 8, 12, 16)
INDEX = torch.randint(0, 4, (4, 8))
CLASSES = torch.randint(0, 8, (4,))

call("layer-norm", lambda m, x: F.layer_norm(x * m.s, (8,), m.w, m.b), CUBE, w=(8,), b=(8,), s=(8,))
call("softmax", lambda m, x: torch.softmax(x * m.w, -1), CUBE, w=(8,))
call("sum", lambda m, x: (x * m.w).sum((0, 2)), CUBE, w=(8,))
call("permute", lambda m, x: (x * m.w).permute(2, 0, 1), CUBE, w=(8,))
call("split", lambda m, x: torch.stack((x * m.w).split(4, -1)).prod(0), CUBE, w=(8,))
call("cat", lambda m, x: torch.cat([x * m.w, x], 1), CUBE, w=(8,))
call("gated", lambda m, x: F.glu(x * m.w, -1), CUBE, w=(8,))
call("embedding-bag", lambda m, i: F.embedding_bag(i, m.w), INDEX, w=(12, 16))
call("embedding-bag-sum", lambda m, i: F.embedding_bag(i, m.w, mode="sum"), INDEX, w=(12, 16))
call("embedding-bag-max", lambda m, i: F.embedding_bag(i, m.w, mode="max"), INDEX, w=(12, 16))
call(
    "embedding-bag-factors",
    lambda m, i: F.embedding_bag(i, m.w, mode="sum", per_sample_weights=m.f),
    INDEX,
    w=(12, 16),
    f=(4, 8),
)
call("embedding-bag-padding", lambda m, i: F.embedding_bag(i, m.w, padding_idx=2), INDEX, w=(12, 16))
call(
    "embedding-bag-unequal",
    lambda m, i, o: F.embedding_bag(i.view(-1), m.w, o.cumsum(0) - o),
    INDEX,
    torch.tensor([3, 5, 1, 6]),
    w=(12, 16),
)
call("gumbel", lambda m, x: x * m.w - torch.empty_like(x).exponential_(2.0).log(), X, w=(8,))
TARGET = torch.rand(4, 8)


def loss(name: str, function: Function, *targets: torch.Tensor) -> None:
    call(name, lambda m, x, *t: function(x * m.w, *t).view(1), X, *targets, w=(8,))


loss("cross-entropy", F.cross_entropy, CLASSES)
loss("cross-entropy-smooth", lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1), CLASSES)
loss("cross-entropy-weighted", lambda x, t, w: F.cross_entropy(x, t, w), CLASSES, torch.rand(8))
loss("cross-entropy-soft-weighted", lambda x, t, w: F.cross_entropy(x, t, w), TARGET, torch.rand(8))
for reduction in ("sum", "none"):
    loss(
        f"cross-entropy-weighted-{reduction}",
        lambda x, t, w, r=reduction: F.cross_entropy(x, t, w, reduction=r).square().sum(),
        CLASSES,
        torch.rand(8),
    )
loss(
    "cross-entropy-weighted-smooth",
    lambda x, t, w: F.cross_entropy(x, t, w, label_smoothing=0.1, ignore_index=1),
    CLASSES,
    torch.rand(8),
)
call(
    "cross-entropy-image",
    lambda m, x, t, w: F.cross_entropy(x * m.w, t, w, label_smoothing=0.1).view(1),
    IMAGE[:, :, :4, :6],
    torch.randint(0, 8, (4, 4, 6)),
    torch.rand(8),
    w=(6,),
)
loss("nll-weighted", lambda x, t, w: F.nll_loss(x.log_softmax(-1), t, w), CLASSES, torch.rand(8))
