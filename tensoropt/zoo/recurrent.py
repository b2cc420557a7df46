"""Sequence models and perceptrons: LSTM language models, GNMT, the first Transformer, MLPs.

LSTMs are built from unrolled single steps or from whole ``nn.LSTM`` layers, which give different graphs.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensoropt.zoo.registry import Recipe, register, require_at_least, require_multiple, tokens

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
    """Self-attention, attention over the encoder's output (in a decoder) and feed-forward layers, each with a
    residual sum and then a norm."""

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


def _sinusoids(length: int, hidden: int) -> Tensor:
    """Return the position encodings ``(length, hidden)`` of Vaswani et al., section 3.5."""
    rate = 10000 ** (-torch.arange(0, hidden, 2) / hidden)
    angle = torch.arange(length).unsqueeze(1) * rate
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)


class Transformer(nn.Module):
    """An encoder-decoder: ``source (b, s)``, ``target, labels (b, t)`` to the mean cross entropy. One matrix
    embeds both sides and computes the scores."""

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
        self.register_buffer("positions", _sinusoids(length, hidden))

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
def _transformer(
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
    require_multiple(heads, f"{heads} attention heads share it", hidden=hidden)
    require_multiple(2, "positions are pairs of sine and cosine", hidden=hidden)
    model = Transformer(vocabulary, max(source, target), layers, hidden, heads, inner, dropout)
    return model, tuple(tokens(vocabulary, batch, n) for n in (source, target, target)), {}


class MLP(nn.Module):
    """A perceptron: ``x (batch, features)`` through ``layers`` linear layers and ReLUs to cross entropy."""

    def __init__(self, features: int, hidden: int, classes: int, layers: int) -> None:
        super().__init__()
        widths = [features, *[hidden] * (layers - 1), classes]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        *inner, last = self.layers
        for layer in inner:
            x = F.relu(layer(x))
        return F.cross_entropy(last(x), labels)


@register("mlp", paper="", size="laptop", batch=64)
def _mlp(batch: int, features: int = 256, hidden: int = 1024, classes: int = 16, layers: int = 3) -> Recipe:
    """Multi-layer perceptron with a classification loss."""
    return MLP(features, hidden, classes, layers), (torch.randn(batch, features), tokens(classes, batch)), {}


_RNNLM = "Zaremba et al., Recurrent Neural Network Regularization, 2014; sizes of Jia et al. (FlexFlow), 2019"
_GNMT = "Wu et al., Google's Neural Machine Translation System, 2016"


class LSTMCell(nn.Module):
    """One LSTM step: ``x (b, in), h (b, hidden), c (b, hidden)`` to the new ``h, c``.

    Each gate has linear layers of its own, so that a split of its features also splits the hidden state.
    """

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.from_input = nn.ModuleList(nn.Linear(inputs, hidden) for _ in range(4))
        self.from_hidden = nn.ModuleList(nn.Linear(hidden, hidden, bias=False) for _ in range(4))

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        i, f, g, o = (a(x) + b(h) for a, b in zip(self.from_input, self.from_hidden, strict=True))
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c


class Unrolled(nn.Module):
    """Layers of :class:`LSTMCell`: ``x (b, steps, hidden)`` to the last layer's outputs of the same shape."""

    def __init__(self, hidden: int, layers: int) -> None:
        super().__init__()
        self.cells = nn.ModuleList(LSTMCell(hidden, hidden) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        zero = x.new_zeros(x.shape[0], x.shape[2])
        states = [(zero, zero) for _ in self.cells]
        outputs = []
        for step in x.unbind(1):
            for layer, cell in enumerate(self.cells):
                states[layer] = cell(step, *states[layer])
                step = states[layer][0]
            outputs.append(step)
        return torch.stack(outputs, dim=1)


class Whole(nn.Module):
    """LSTM layers as one ``nn.LSTM``, with inputs and outputs as in :class:`Unrolled`."""

    def __init__(self, hidden: int, layers: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(hidden, hidden, layers, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


class _RecurrentLanguageModel(nn.Module):
    """A language model: ``ids, labels (batch, steps)`` to the mean cross entropy."""

    def __init__(self, recurrent: nn.Module, vocabulary: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.recurrent = recurrent
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        scores = self.head(self.recurrent(self.embedding(ids)))
        return F.cross_entropy(scores.flatten(0, 1), labels.flatten())


@register(
    "rnn-lm-tiny", paper=_TENSOROPT, size="laptop", batch=8, layers=2, hidden=64, vocabulary=256, steps=6
)
@register(
    "lstm-lm-tiny", paper=_RNNLM, size="laptop", batch=8,
    layers=2, hidden=64, vocabulary=256, steps=16, unrolled=False,
)  # fmt: skip
@register("rnn-lm", paper=_TENSOROPT, size="paper", batch=256)
@register("rnnlm", paper=_RNNLM, size="paper", batch=64, layers=2, hidden=2048, vocabulary=10000, steps=40)
def _recurrent_language_model(
    batch: int,
    layers: int = 6,
    hidden: int = 24576,
    vocabulary: int = 1024,
    steps: int = 20,
    unrolled: bool = True,
) -> Recipe:
    """LSTM language model, from unrolled cells or whole layers."""
    recurrent = Unrolled(hidden, layers) if unrolled else Whole(hidden, layers)
    model = _RecurrentLanguageModel(recurrent, vocabulary, hidden)
    return model, (tokens(vocabulary, batch, steps), tokens(vocabulary, batch, steps)), {}


class GNMT(nn.Module):
    """A translation model: ``source (b, s)``, ``target, labels (b, t)`` to the mean cross entropy.

    The encoder's first layer is bidirectional, and residuals begin at the third layer. The outputs of the
    decoder's first layer query attention, as in v2 of the model, so that no step waits for the previous one.
    """

    def __init__(self, vocabulary: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.source = nn.Embedding(vocabulary, hidden)
        self.target = nn.Embedding(vocabulary, hidden)
        self.encode_both = nn.LSTM(hidden, hidden, batch_first=True, bidirectional=True)
        self.encode = nn.ModuleList(
            nn.LSTM(2 * hidden if i == 0 else hidden, hidden, batch_first=True) for i in range(layers - 1)
        )
        self.query_layer = nn.LSTM(hidden, hidden, batch_first=True)
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.key = nn.Linear(hidden, hidden, bias=False)
        self.score = nn.Linear(hidden, 1, bias=False)
        self.decode = nn.ModuleList(nn.LSTM(2 * hidden, hidden, batch_first=True) for _ in range(layers - 1))
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, source: Tensor, target: Tensor, labels: Tensor) -> Tensor:
        memory = self.encode_both(self.source(source))[0]
        for index, layer in enumerate(self.encode):
            out = layer(memory)[0]
            memory = out + memory if index else out
        x = self.query_layer(self.target(target))[0]
        # additive attention (Bahdanau): scores (b, t, s)
        energy = torch.tanh(self.query(x).unsqueeze(2) + self.key(memory).unsqueeze(1))
        context = torch.softmax(self.score(energy).squeeze(-1), dim=-1) @ memory
        for index, layer in enumerate(self.decode):
            out = layer(torch.cat([x, context], dim=-1))[0]
            x = out + x if index else out
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@register(
    "gnmt-tiny", paper=_GNMT, size="laptop", batch=4,
    layers=3, hidden=32, vocabulary=256, source=12, target=10,
)  # fmt: skip
@register("gnmt", paper=_GNMT, size="paper", batch=128)
def _gnmt(
    batch: int,
    layers: int = 8,
    hidden: int = 1024,
    vocabulary: int = 32000,
    source: int = 50,
    target: int = 50,
) -> Recipe:
    """GNMT: LSTM translation with attention."""
    require_at_least(2, "attention is between the first layer and the others", layers=layers)
    model = GNMT(vocabulary, hidden, layers)
    return model, tuple(tokens(vocabulary, batch, n) for n in (source, target, target)), {}
