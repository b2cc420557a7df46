"""The decoder language model that a row of published_models.yaml gives the numbers of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensoropt.zoo.registry import tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Numbers of a decoder, named as in published_models.yaml.

    Attributes:
        gated: three products of which two are multiplied (SwiGLU) with RMS norms, as in Llama; else two, with
            layer norms, as in GPT.
        pos: ``rope``, or anything else for learned positions.
        params: what the file says; :func:`build` is held to it.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    gated: bool
    vocab: int
    tied: bool
    pos: str
    bias: bool
    params: int

    @classmethod
    def of(cls, data: dict[str, Any]) -> Architecture:
        """The numbers among a model's entry, whose remarks are passed over."""
        return cls(**{name: data[name] for name in cls.__slots__})


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions in the halves' convention: ``(b, h, s, d) -> (b, h, s, d)``."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """What a run computes that the numbers of its model leave open.

    Attributes:
        stored_scores: attention as products and a softmax instead of one kernel.
        dropout: of the embedding, of attention's weights, and of what is added to the residual; with stored
            scores only, as fused kernels keep no mask.
    """

    stored_scores: bool = False
    dropout: float = 0.0


PLAIN = Variant()


def attention_of_scores(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
    """Causal attention that stores its scores, as before fused kernels: ``(b, h, s, d) -> (b, h, s, d)``.

    Megatron-LM's softmax reads and writes 16 bits, while autocast's is in float32: it is called below
    that."""
    ahead = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.transpose(-2, -1)) * q.shape[-1] ** -0.5
    weights = torch._softmax(scores.masked_fill(ahead, -1e4), -1, False)
    return (F.dropout(weights, dropout) if dropout else weights) @ v


class Feed(nn.Module):
    """What the last product of a feed-forward reads: ``(b, s, d) -> (b, s, f)``."""

    def __init__(self, of: Architecture) -> None:
        super().__init__()
        self.of = of
        self.up = nn.Linear(of.hidden, of.ffn, bias=of.bias)
        if of.gated:
            self.gate = nn.Linear(of.hidden, of.ffn, bias=of.bias)
        self.down = nn.Linear(of.ffn, of.hidden, bias=of.bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.of.gated:
            return F.silu(self.gate(x)) * self.up(x)
        inner = self.up(x)
        # GPT and MPT have a GELU; a decoder with rotary positions and two products is Nemotron, with squared
        # ReLU (arXiv 2402.16819).
        return F.relu(inner).square() if self.of.pos == "rope" else F.gelu(inner)


class Block(nn.Module):
    """Attention and a feed-forward, each behind a norm and a residual sum: ``(b, s, d) -> (b, s, d)``."""

    def __init__(self, of: Architecture, variant: Variant = PLAIN) -> None:
        super().__init__()
        self.of, self.variant = of, variant
        self.queries, self.keys = of.heads * of.head_dim, of.kv_heads * of.head_dim
        self.fused = of.heads == of.kv_heads
        if self.fused:
            self.qkv = nn.Linear(of.hidden, 3 * self.queries, bias=of.bias)
        else:
            self.q = nn.Linear(of.hidden, self.queries, bias=of.bias)
            self.k = nn.Linear(of.hidden, self.keys, bias=of.bias)
            self.v = nn.Linear(of.hidden, self.keys, bias=of.bias)
        self.project = nn.Linear(self.queries, of.hidden, bias=of.bias)
        self.attention_norm, self.feed_norm = norm(of), norm(of)
        self.feed = Feed(of)

    def forward(self, x: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
        of, (batch, sequence, _) = self.of, x.shape
        h = self.attention_norm(x)
        parts = self.qkv(h).split(self.queries, dim=-1) if self.fused else (self.q(h), self.k(h), self.v(h))
        q, k, v = (p.view(batch, sequence, -1, of.head_dim).transpose(1, 2) for p in parts)
        if cos is not None and sin is not None:
            q, k = rotary(q, cos, sin), rotary(k, cos, sin)
        if self.variant.stored_scores:
            mixed = attention_of_scores(q, k, v, self.variant.dropout)
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=not self.fused)
        mixed = mixed.transpose(1, 2).reshape(batch, sequence, self.queries)
        x = x + added(self.project, mixed, self.variant)
        return x + added(self.feed.down, self.feed(self.feed_norm(x)), self.variant)


def added(product: nn.Linear, x: Tensor, variant: Variant) -> Tensor:
    """What a product adds to the residual. With dropout its bias is added by itself, as in Megatron-LM, so
    that both are computed on a scattered sum."""
    if not variant.dropout:
        return product(x)
    y = F.linear(x, product.weight)
    return F.dropout(y if product.bias is None else y + product.bias, variant.dropout)


def norm(of: Architecture) -> nn.Module:
    """RMS norm beside gates, else layer norm."""
    return nn.RMSNorm(of.hidden) if of.gated else nn.LayerNorm(of.hidden, bias=of.bias)


class PublishedDecoder(nn.Module):
    """``ids, labels (batch, sequence)`` to the mean cross entropy; labels are already shifted."""

    def __init__(self, of: Architecture, sequence: int, variant: Variant = PLAIN) -> None:
        super().__init__()
        self.of, self.variant = of, variant
        self.token = nn.Embedding(of.vocab, of.hidden)
        self.position = nn.Embedding(sequence, of.hidden) if of.pos != "rope" else None
        self.blocks = nn.ModuleList(Block(of, variant) for _ in range(of.layers))
        self.norm = norm(of)
        self.head = nn.Linear(of.hidden, of.vocab, bias=False)
        if of.tied:
            self.head.weight = self.token.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x, cos, sin = self.token(ids), None, None
        places = torch.arange(ids.shape[1], device=ids.device)
        if self.position is not None:
            x = x + self.position(places)
        else:
            half = torch.arange(0, self.of.head_dim, 2, device=ids.device).float() / self.of.head_dim
            angles = places.float()[:, None] * (1e4**-half)[None, :]
            angles = torch.cat((angles, angles), dim=-1)
            cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        if self.variant.dropout:
            x = F.dropout(x, self.variant.dropout)
        for block in self.blocks:
            x = block(x, cos, sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def build(
    of: Architecture, batch: int, sequence: int, variant: Variant = PLAIN
) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """The model and its inputs on the meta device: nothing is allocated."""
    with torch.device("meta"):
        model = PublishedDecoder(of, sequence, variant).train()
        return model, (tokens(of.vocab, batch, sequence), tokens(of.vocab, batch, sequence))


def parameters_of(of: Architecture, sequence: int) -> int:
    """Parameters that :func:`build` makes, learned positions left out as they depend on the sequence."""
    with torch.device("meta"):
        model = PublishedDecoder(of, sequence)
    positions = model.position.weight.numel() if model.position is not None else 0
    return sum(p.numel() for p in model.parameters()) - positions
