"""Small decoder language models in plain PyTorch.

The mixture of experts sends tokens to experts of a fixed capacity by a product with a 0/1 matrix (GShard,
algorithm 1). So no shape depends on data, and the experts are a dim of a batched product.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensoropt.zoo.registry import Recipe, register, require_at_least, require_multiple, tokens


class FeedForward(nn.Module):
    """A feed-forward layer ``(b, s, d) -> (b, s, d)`` with an inner width of ``4 * d``."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class DecoderBlock(nn.Module):
    """Attention, then ``feed``, each with a layer norm before and a residual: ``(b, s, d) -> (b, s, d)``."""

    def __init__(self, hidden: int, heads: int, dropout: float, feed: nn.Module, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
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
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.dropout(self.project(mixed.transpose(1, 2).reshape(batch, sequence, hidden)))
        return x + self.dropout(self.feed(self.feed_norm(x)))


class Decoder(nn.Module):
    """A language model: ``ids, labels (batch, sequence)`` to the mean cross entropy; labels are already
    shifted."""

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
def _gpt_mini(
    batch: int,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    vocabulary: int = 512,
    sequence: int = 32,
    dropout: float = 0.0,
) -> Recipe:
    """Decoder language model in plain PyTorch with a fused qkv and a tied head."""
    require_multiple(heads, f"{heads} attention heads share it", hidden=hidden)
    model = Decoder(vocabulary, sequence, layers, hidden, heads, dropout)
    return model, (tokens(vocabulary, batch, sequence), tokens(vocabulary, batch, sequence)), {}


_GSHARD = "Lepikhin et al., GShard, ICLR 2021; Jiang et al., Mixtral of Experts, 2024"


class Experts(nn.Module):
    """Gated feed-forward experts ``(b, s, d) -> (b, s, d)``; a router sends each token to ``chosen`` of them.

    An expert takes at most ``slack`` times its equal share of tokens; for further tokens it returns zeros.
    """

    def __init__(self, hidden: int, inner: int, experts: int, chosen: int, slack: float) -> None:
        super().__init__()
        self.experts, self.chosen, self.slack = experts, chosen, slack
        self.router = nn.Linear(hidden, experts, bias=False)
        self.gate = nn.Parameter(torch.randn(experts, hidden, inner) * hidden**-0.5)
        self.up = nn.Parameter(torch.randn(experts, hidden, inner) * hidden**-0.5)
        self.down = nn.Parameter(torch.randn(experts, inner, hidden) * inner**-0.5)

    def forward(self, hidden: Tensor) -> Tensor:
        x = hidden.flatten(0, 1)
        capacity = int(self.slack * self.chosen * x.shape[0] / self.experts)
        weights, picks = torch.softmax(self.router(x), dim=-1).topk(self.chosen, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        wanted = F.one_hot(picks, self.experts).to(x.dtype)  # (tokens, chosen, experts)
        # first choices queue before second ones: the position of a token in its expert's queue
        queue = wanted.transpose(0, 1).flatten(0, 1)
        place = (queue.cumsum(0) - queue).unflatten(0, (self.chosen, -1)).transpose(0, 1)
        place = (place * wanted).sum(-1).long()  # (tokens, chosen)
        slots = F.one_hot(place.clamp(max=capacity), capacity + 1)[..., :capacity].to(x.dtype)
        combine = torch.einsum("tk,tke,tkc->tec", weights, wanted, slots)
        dispatch = torch.einsum("tke,tkc->ect", wanted, slots)
        inputs = dispatch @ x  # (experts, capacity, d)
        outputs = (F.silu(inputs @ self.gate) * (inputs @ self.up)) @ self.down
        return torch.einsum("tec,ecd->td", combine, outputs).view_as(hidden)


class _MixtureDecoder(nn.Module):
    """A language model with the given blocks: ``ids, labels (batch, sequence)`` to the mean cross entropy."""

    def __init__(self, vocabulary: int, sequence: int, hidden: int, blocks: nn.ModuleList) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, hidden)
        self.position = nn.Parameter(torch.randn(sequence, hidden) * 0.02)
        self.blocks = blocks
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.token(ids) + self.position
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


@register("moe-mini", paper=_GSHARD, size="laptop", batch=4)
def _moe_mini(
    batch: int,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    inner: int = 96,
    experts: int = 8,
    chosen: int = 2,
    slack: float = 1.25,
    vocabulary: int = 512,
    sequence: int = 32,
) -> Recipe:
    """Mixture-of-experts decoder in plain PyTorch with fixed expert capacity."""
    require_multiple(heads, f"{heads} attention heads share it", hidden=hidden)
    require_at_least(chosen, f"a token goes to {chosen} of them", experts=experts)
    blocks = nn.ModuleList(
        DecoderBlock(hidden, heads, 0.0, Experts(hidden, inner, experts, chosen, slack))
        for _ in range(layers)
    )
    model = _MixtureDecoder(vocabulary, sequence, hidden, blocks)
    return model, (tokens(vocabulary, batch, sequence), tokens(vocabulary, batch, sequence)), {}
