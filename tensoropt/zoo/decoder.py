"""A small decoder language model of our own: fused qkv, pre-norm, tied head, nothing to install."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensoropt.zoo.inputs import tokens
from tensoropt.zoo.registry import Recipe, register


class FeedForward(nn.Module):
    """``(b, s, d) -> (b, s, d)`` through four times the width."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class DecoderBlock(nn.Module):
    """Attention and ``feed``, each behind a layer norm and a residual sum: ``(b, s, d) -> (b, s, d)``."""

    def __init__(self, hidden: int, heads: int, dropout: float, feed: nn.Module) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.project = nn.Linear(hidden, hidden)
        self.feed_norm = nn.LayerNorm(hidden)
        self.feed = feed
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, hidden = x.shape
        q, k, v = self.qkv(self.attention_norm(x)).split(hidden, dim=-1)
        shape = (batch, sequence, self.heads, hidden // self.heads)
        q, k, v = (part.view(shape).transpose(1, 2) for part in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.project(mixed.transpose(1, 2).reshape(batch, sequence, hidden)))
        return x + self.dropout(self.feed(self.feed_norm(x)))


class Decoder(nn.Module):
    """``ids, labels (batch, sequence)`` to the mean cross entropy; labels are already shifted."""

    def __init__(
        self, vocabulary: int, sequence: int, layers: int, hidden: int, heads: int, dropout: float
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, hidden)
        self.position = nn.Embedding(sequence, hidden)
        self.blocks = nn.ModuleList(
            DecoderBlock(hidden, heads, dropout, FeedForward(hidden)) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        self.head.weight = self.token.weight
        for embedding in (self.token, self.position):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


@register("gpt-mini", paper="", size="laptop", batch=4)
@register("gpt-mini-dropout", paper="", size="laptop", batch=4, dropout=0.1)
def gpt_mini(
    batch: int,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    vocabulary: int = 512,
    sequence: int = 32,
    dropout: float = 0.0,
) -> Recipe:
    """Decoder language model in plain PyTorch with a fused qkv and a tied head."""
    model = Decoder(vocabulary, sequence, layers, hidden, heads, dropout)
    return model, (tokens(vocabulary, batch, sequence), tokens(vocabulary, batch, sequence)), {}
