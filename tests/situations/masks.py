"""Attention and its masks, as people write them; each builder's line says what is to come of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

WIDTH, HEADS = 16, 4


class Decoder(nn.Module):
    """A layer of attention over ``[batch, tokens, width]``, computed by ``attend(module, q, k, v)``."""

    def __init__(self, attend: Callable[..., torch.Tensor], heads: int = HEADS, groups: int = 1):
        super().__init__()
        self.attend, self.heads, self.groups = attend, heads, groups
        self.q = nn.Linear(WIDTH, WIDTH)
        self.k, self.v = (nn.Linear(WIDTH, WIDTH // groups) for _ in range(2))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("bias", torch.tril(torch.ones(64, 64)).view(1, 1, 64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape
        q, k, v = (
            layer(x).view(batch, tokens, -1, WIDTH // self.heads).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        mixed = self.attend(self, q, k, v).transpose(1, 2).reshape(batch, tokens, WIDTH)
        return self.out(mixed).square().mean()


def _built(attend: Callable[..., torch.Tensor], tokens: int = 12, **settings: int) -> Any:
    torch.manual_seed(0)
    return Decoder(attend, **settings), (torch.randn(4, tokens, WIDTH),)


def build_causal_buffer_by_hand() -> Any:
    """The flag: attention by hand whose mask is a buffer."""

    def attend(module, q, k, v):
        tokens = q.shape[-2]
        scores = q @ k.transpose(-2, -1) * (1.0 / math.sqrt(k.shape[-1]))
        scores = scores.masked_fill(module.bias[:, :, :tokens, :tokens] == 0, float("-inf"))
        return functional.softmax(scores, dim=-1) @ v

    return _built(attend)


def build_causal_operand() -> Any:
    """The flag: a mask of ``nn.Transformer`` as the operand."""

    def attend(module, q, k, v):
        mask = nn.Transformer.generate_square_subsequent_mask(q.shape[-2], device=q.device)
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    return _built(attend)


def _within(tokens: int) -> Callable[..., torch.Tensor]:
    """Attention to the last so many tokens."""

    def attend(module, q, k, v):
        places = torch.arange(q.shape[-2], device=q.device)
        distance = places[:, None] - places[None, :]
        return functional.scaled_dot_product_attention(q, k, v, (distance >= 0) & (distance < tokens))

    return attend


def build_sliding_window() -> Any:
    """A constant that is counted in memory: a window of four tokens."""
    return _built(_within(4))


def build_grouped_queries() -> Any:
    """Keys and values stay one for two heads, with the flag."""

    def attend(module, q, k, v):
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return _built(attend, groups=2)


def build_long_window() -> Any:
    """A frontier: a window of a long sequence is made in every step, from positions."""
    with torch.device("meta"):
        return Decoder(_within(4096)), (torch.empty(1, 32_768, WIDTH),)


def build_large_table() -> Any:
    """A frontier: a table of four gigabytes that is no mask is made in every step, too."""

    def attend(module, q, k, v):
        places = torch.arange(q.shape[-2], device=q.device) * 0.01
        bias = torch.sin(places[:, None] * places[None, :])
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)

    with torch.device("meta"):
        return Decoder(attend), (torch.empty(1, 32_768, WIDTH),)
