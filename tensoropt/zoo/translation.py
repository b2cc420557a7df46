"""The Transformer as it first appeared: encoder, decoder, translation loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensoropt.zoo.inputs import tokens
from tensoropt.zoo.registry import Recipe, register

_TRANSFORMER = "Vaswani et al., Attention Is All You Need, NeurIPS 2017 (table 3)"
_TENSOROPT = "Cai et al., TensorOpt, 2020 (table 1); sizes inferred, see the README of the zoo"


class Attention(nn.Module):
    """Multi-head attention of ``x (b, s, d)`` over ``memory (b, m, d)``, with separate projections."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, hidden)
        self.value = nn.Linear(hidden, hidden)
        self.project = nn.Linear(hidden, hidden)

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (self.heads, -1)).transpose(1, 2)

    def forward(self, x: Tensor, memory: Tensor, causal: bool) -> Tensor:
        q, k, v = self._split(self.query(x)), self._split(self.key(memory)), self._split(self.value(memory))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return self.project(mixed.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Self-attention, attention over the encoder (in a decoder), feed-forward; norms after the sums."""

    def __init__(self, hidden: int, heads: int, inner: int, dropout: float, decoder: bool) -> None:
        super().__init__()
        self.attention = Attention(hidden, heads)
        self.attention_norm = nn.LayerNorm(hidden)
        self.cross = Attention(hidden, heads) if decoder else None
        self.cross_norm = nn.LayerNorm(hidden) if decoder else None
        self.up = nn.Linear(hidden, inner)
        self.down = nn.Linear(inner, hidden)
        self.feed_norm = nn.LayerNorm(hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        x = self.attention_norm(x + self.dropout(self.attention(x, x, memory is not None)))
        if self.cross is not None and self.cross_norm is not None and memory is not None:
            x = self.cross_norm(x + self.dropout(self.cross(x, memory, False)))
        return self.feed_norm(x + self.dropout(self.down(F.relu(self.up(x)))))


def sinusoids(length: int, hidden: int) -> Tensor:
    """Positions ``(length, hidden)`` of section 3.5."""
    rate = 10000 ** (-torch.arange(0, hidden, 2) / hidden)
    angle = torch.arange(length).unsqueeze(1) * rate
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)


class Transformer(nn.Module):
    """``source (b, s)``, ``target, labels (b, t)``; one matrix embeds both sides and scores the words."""

    positions: Tensor

    def __init__(
        self, vocabulary: int, length: int, layers: int, hidden: int, heads: int, inner: int, dropout: float
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        nn.init.normal_(self.embedding.weight, std=hidden**-0.5)
        self.encoder = nn.ModuleList(Layer(hidden, heads, inner, dropout, False) for _ in range(layers))
        self.decoder = nn.ModuleList(Layer(hidden, heads, inner, dropout, True) for _ in range(layers))
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("positions", sinusoids(length, hidden))

    def _embed(self, ids: Tensor) -> Tensor:
        scaled = self.embedding(ids) * self.embedding.embedding_dim**0.5
        return self.dropout(scaled + self.positions[: ids.shape[1]])

    def forward(self, source: Tensor, target: Tensor, labels: Tensor) -> Tensor:
        memory = self._embed(source)
        for layer in self.encoder:
            memory = layer(memory)
        x = self._embed(target)
        for layer in self.decoder:
            x = layer(x, memory)
        scores = F.linear(x, self.embedding.weight)
        return F.cross_entropy(scores.flatten(0, 1), labels.flatten())


@register(
    "transformer-tiny", paper=_TRANSFORMER, size="laptop", batch=4,
    layers=2, hidden=64, heads=4, inner=128, vocabulary=512, source=24, target=16,
)  # fmt: skip
@register("transformer-base", paper=_TRANSFORMER, size="paper", batch=256)
@register("transformer-big", paper=_TRANSFORMER, size="paper", batch=256, hidden=1024, heads=16, inner=4096)
@register(
    "transformer-2.6b", paper=_TENSOROPT, size="paper", batch=256,
    hidden=3840, heads=32, inner=15360, vocabulary=32768,
)  # fmt: skip
def transformer(
    batch: int,
    layers: int = 6,
    hidden: int = 512,
    heads: int = 8,
    inner: int = 2048,
    vocabulary: int = 37000,
    source: int = 64,
    target: int = 64,
    dropout: float = 0.0,
) -> Recipe:
    """Transformer encoder-decoder with a shared vocabulary."""
    model = Transformer(vocabulary, max(source, target), layers, hidden, heads, inner, dropout)
    return model, tuple(tokens(vocabulary, batch, n) for n in (source, target, target)), {}
