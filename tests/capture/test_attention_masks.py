"""Causal masks that a model writes out become the flag, with the same outputs and gradients; others stay."""

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import dropout, scaled_dot_product_attention

from tensoropt.capture import capture, folding
from tensoropt.capture.fidelity import rebuild

TOKENS, WIDTH, HEADS = 10, 16, 4
SIZE = WIDTH // HEADS
INF = float("inf")


class Attending(nn.Module):
    """Layers of attention, each computed by one of ``attends``: ``attend(module, q, k, v, tokens)``."""

    def __init__(self, *attends):
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in attends)
        self.out, self.attends = nn.Linear(WIDTH, WIDTH), attends
        self.register_buffer("bias", torch.tril(torch.ones(32, 32)).view(1, 1, 32, 32))

    def forward(self, x):
        batch, tokens, _ = x.shape
        loss = 0.0
        for qkv, attend in zip(self.qkv, self.attends, strict=True):
            heads = (t.view(batch, tokens, HEADS, SIZE).transpose(1, 2) for t in qkv(x).chunk(3, -1))
            y = attend(self, *heads, tokens)
            loss = loss + self.out(y.transpose(1, 2).reshape(batch, -1, WIDTH)).square().mean()
        return loss


def lower(tokens):
    return torch.tril(torch.ones(tokens, tokens)).bool()


def minus_inf(tokens):
    return torch.triu(torch.full((tokens, tokens), -INF), 1)


def window(tokens, size):
    places = torch.arange(tokens)
    return (places[:, None] - places[None, :] < size) & (places[:, None] >= places[None, :])


def operand(mask):
    return lambda m, q, k, v, t: scaled_dot_product_attention(q, k, v, mask(m, t))


def by_hand(scores, after=lambda weights: weights):
    return lambda m, q, k, v, t: after(torch.softmax(scores(m, q, k, t), -1)) @ v


CAUSAL = {
    "boolean": operand(lambda m, t: lower(t)),
    "inverted": operand(lambda m, t: ~torch.triu(torch.ones(t, t, dtype=torch.bool), 1)),
    "expanded": operand(lambda m, t: lower(t)[None, None].expand(2, HEADS, t, t)),
    "compared": operand(lambda m, t: torch.arange(t)[None, :] <= torch.arange(t)[:, None]),
    "added": operand(lambda m, t: minus_inf(t)),
    "of nn.Transformer": operand(lambda m, t: nn.Transformer.generate_square_subsequent_mask(t)),
    "least number": operand(lambda m, t: torch.zeros(t, t).masked_fill(~lower(t), torch.finfo().min)),
    "times a number": operand(lambda m, t: (1 - torch.tril(torch.ones(t, t))) * -1e9),
    "where": operand(lambda m, t: torch.where(torch.ones(t, t).tril() > 0, 0.0, -INF)),
    "buffer": operand(lambda m, t: m.bias[:, :, :t, :t].bool()),
    "covering window": operand(lambda m, t: window(t, 99)),
    "by hand, buffer": by_hand(
        lambda m, q, k, t: (q @ k.transpose(-2, -1) * (1 / math.sqrt(SIZE))).masked_fill(
            m.bias[:, :, :t, :t] == 0, -INF
        )
    ),
    "by hand, added": by_hand(lambda m, q, k, t: q @ k.transpose(-2, -1) / math.sqrt(SIZE) + minus_inf(t)),
    "by hand, where": by_hand(
        lambda m, q, k, t: torch.where(lower(t), q @ k.mT / torch.sqrt(torch.tensor(4.0)), -1e9)
    ),
    "by hand, scaled before": by_hand(lambda m, q, k, t: (0.3 * q) @ k.transpose(2, 3) + minus_inf(t)),
    "by hand, no dropout": by_hand(lambda m, q, k, t: q @ k.mT + minus_inf(t), lambda w: dropout(w, 0.0)),
    "by hand, scaled behind": by_hand(lambda m, q, k, t: (q @ k.mT).masked_fill(~lower(t), -1e4) / 8),
    "by hand, keys transposed": by_hand(lambda m, q, k, t: q @ k.permute(0, 1, 3, 2) * 0.5 + minus_inf(t)),
}
OTHERS = {
    "window": operand(lambda m, t: window(t, 3)),
    "one more": operand(lambda m, t: torch.ones(t, t).tril(1).bool()),
    "soft": operand(lambda m, t: torch.triu(torch.full((t, t), -5.0), 1)),
    "last rows": lambda m, q, k, v, t: scaled_dot_product_attention(
        q[:, :, 4:], k, v, torch.ones(t - 4, t, dtype=torch.bool).tril(4)
    ),
    "by hand, no mask": by_hand(lambda m, q, k, t: q @ k.mT),
    "by hand, dropout": by_hand(lambda m, q, k, t: q @ k.mT + minus_inf(t), lambda w: dropout(w, 0.1)),
    "by hand, negative scale": by_hand(lambda m, q, k, t: (q @ k.mT).masked_fill(~lower(t), -1e9) * -0.5),
    "by hand, hidden a little": by_hand(lambda m, q, k, t: (q @ k.mT).masked_fill(~lower(t), -1e4) * 5e-4),
    "by hand, weights read": by_hand(lambda m, q, k, t: q @ k.mT + minus_inf(t), lambda w: w + w.mean()),
}


def flags(graph):
    ops = [op for op in graph.operators if op.target == "aten.scaled_dot_product_attention.default"]
    return [(op.args[3:4] in ((), (None,)), op.args[5:] == (True,)) for op in ops]


def check_same(model, graph, x):
    """The graph computes what the model does, forward and backward, with the same random numbers."""
    found = []
    for module in (model, rebuild(graph, model)):
        torch.manual_seed(0)
        loss = module(x)
        found.append((loss, torch.autograd.grad(loss, list(model.parameters()))))
    torch.testing.assert_close(*found)


def test_causal_masks_become_the_flag():
    model, x = Attending(*CAUSAL.values()), torch.randn(2, TOKENS, WIDTH)
    graph = capture(model, (x,)).graph
    assert dict(zip(CAUSAL, flags(graph), strict=True)) == dict.fromkeys(CAUSAL, (True, True))
    assert not graph.constants
    assert any("is_causal" in note for note in graph.notes)
    check_same(model, graph, x)


def test_other_masks_stay():
    model, x = Attending(*OTHERS.values()), torch.randn(2, TOKENS, WIDTH)
    graph = capture(model, (x,)).graph
    assert (True, True) not in flags(graph)
    check_same(model, graph, x)


def test_a_rectangle_counts_from_its_first_query():
    def attend(m, q, k, v, t):
        return scaled_dot_product_attention(q[:, :, :6], k, v, torch.ones(6, t, dtype=torch.bool).tril())

    model, x = Attending(attend), torch.randn(2, TOKENS, WIDTH)
    graph = capture(model, (x,)).graph
    assert flags(graph) == [(True, True)]
    check_same(model, graph, x)


@pytest.mark.parametrize("mask", [lambda t: torch.ones(t, t).bool(), lambda t: torch.zeros(1, t)])
def test_a_mask_that_hides_nothing_goes(mask):
    model, x = Attending(operand(lambda m, t: mask(t))), torch.randn(2, TOKENS, WIDTH)
    graph = capture(model, (x,)).graph
    assert flags(graph) == [(True, False)]
    assert not graph.constants


def test_a_mask_that_a_model_stores_is_not_read_for_a_plan_made_without_values():
    x = torch.randn(2, TOKENS, WIDTH)
    with torch.device("meta"):
        shadow = capture(Attending(CAUSAL["by hand, buffer"]), (x,)).graph
    model = Attending(CAUSAL["by hand, buffer"])
    assert flags(capture(model, (x,)).graph) == [(True, True)]
    assert capture(model, (x,), read_stored=False).graph.operators == shadow.operators


LONG = 40_000


class Long(nn.Module):
    """Attention of a long sequence with a mask of 1.5 GiB, or a table of that size."""

    def __init__(self, mask):
        super().__init__()
        self.qkv, self.mask = nn.Linear(4, 12), mask

    def forward(self, x):
        q, k, v = (t[:, None] for t in self.qkv(x).chunk(3, -1))
        return scaled_dot_product_attention(q, k, v, self.mask(x.shape[1])).square().mean()


@pytest.mark.parametrize("mask", [lower, lambda t: window(t, 4096), minus_inf])
def test_a_long_mask_is_made_in_every_step(mask):
    with torch.device("meta"):
        graph = capture(Long(mask), (torch.empty(1, LONG, 4),)).graph
    assert flags(graph) == [(False, False)]
    assert any("computed in every step: " in note and "is_causal=True" in note for note in graph.notes)
    assert sum(value.numel() for value in graph.constants.values()) <= 2 * LONG


def test_what_is_made_in_every_step_is_what_the_model_makes(monkeypatch):
    monkeypatch.setattr(folding, "_CONSTANT_LIMIT", 32)
    model, x = Attending(*CAUSAL.values()), torch.randn(2, TOKENS, WIDTH)
    check_same(model, capture(model, (x,)).graph, x)
