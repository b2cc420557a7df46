"""Tiny models of every kind, as a rank builds them: functions returning (model, args, kwargs)."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tensoropt.ops.quantised import QuantisedLinear, quantised
from tests.models import Call

Recipe = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def _labels(vocabulary: int, *shape: int, ignored: bool) -> torch.Tensor:
    labels = torch.randint(0, vocabulary, shape)
    if ignored:  # uneven counts: the first samples lose most of theirs
        for row in range(shape[0]):
            labels[row, : (shape[1] - 1 - 3 * row) % shape[1]] = -100
    return labels


def gpt2(dropout: float = 0.0, ignored: bool = False, layers: int = 2) -> Recipe:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=layers, n_embd=32, n_head=4, vocab_size=101, n_positions=32, resid_pdrop=dropout,
        embd_pdrop=dropout, attn_pdrop=dropout,
    )  # fmt: skip
    x = torch.randint(0, 101, (4, 16))
    return GPT2LMHeadModel(config), (), {"input_ids": x, "labels": _labels(101, 4, 16, ignored=ignored)}


def bert(dropout: float = 0.0, ignored: bool = False, layers: int = 2) -> Recipe:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        num_hidden_layers=layers, hidden_size=32, num_attention_heads=4, vocab_size=102,
        intermediate_size=64, max_position_embeddings=32, hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    x = torch.randint(0, 102, (4, 16))
    return BertForMaskedLM(config), (), {"input_ids": x, "labels": _labels(102, 4, 16, ignored=ignored)}


def mixtral(layers: int = 1) -> Recipe:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        num_hidden_layers=layers, hidden_size=16, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=32, intermediate_size=24, num_local_experts=4, num_experts_per_tok=2,
        max_position_embeddings=32,
    )  # fmt: skip
    x = torch.randint(0, 32, (4, 8))
    network = MixtralForCausalLM(config)
    return network, (), {"input_ids": x, "labels": _labels(32, 4, 8, ignored=False), "use_cache": False}


def llama(layers: int = 2) -> Recipe:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=layers, hidden_size=32, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=101, intermediate_size=48,
    )  # fmt: skip
    x = torch.randint(0, 101, (4, 16))
    return LlamaForCausalLM(config), (), {"input_ids": x, "labels": x.clone()}


class Perceptron(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first = nn.Linear(24, width)
        self.second = nn.Linear(width, width)
        self.third = nn.Linear(width, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.third(F.gelu(self.second(torch.tanh(self.first(x))))), y)


class Convolutions(nn.Module):
    """A small VGG: batch norm and dropout between convolutions and dense layers."""

    def __init__(self, *, norm: bool, dropout: float) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in ((3, 8), (8, 16)):
            layers.append(nn.Conv2d(before, after, 3, padding=1))
            if norm:
                layers.append(nn.BatchNorm2d(after))
            layers += [nn.ReLU(), nn.MaxPool2d(2)]
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Linear(16 * 4, 32), nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, 10)
        )

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.classifier(self.features(x).flatten(1)), labels)


def vgg(norm: bool = False, dropout: float = 0.0) -> Recipe:
    model = Convolutions(norm=norm, dropout=dropout)
    return model, (torch.randn(8, 3, 8, 8), torch.randint(0, 10, (8,))), {}


def shared_norm() -> Recipe:
    """A batch norm that normalises two tensors, one after the other, as in a Siamese network."""

    def forward(m: Any, x: torch.Tensor, y: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        first, second = (m.norm(m.body(each)).relu().mean((2, 3)) for each in (x, y))
        return F.cross_entropy(m.head(first * second), labels)

    model = Call(forward, body=nn.Conv2d(3, 8, 3), norm=nn.BatchNorm2d(8), head=nn.Linear(8, 10))
    return model, (torch.randn(8, 3, 6, 6), torch.randn(8, 3, 6, 6), torch.randint(0, 10, (8,))), {}


class Block(nn.Module):
    """Pre-norm attention with a fused projection, then a gated feed-forward layer."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width, bias=False), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        x = x + F.dropout(self.out(y.transpose(1, 2).reshape(batch, length, width)), self.dropout)
        return x + F.dropout(self.down(F.silu(self.up(self.norm2(x)))), self.dropout)


class Transformer(nn.Module):
    def __init__(
        self, dropout: float, layers: int = 2, vocabulary: int = 64, width: int = 16, heads: int = 4
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(12, width) * 0.1)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.tokens(x) + self.positions
        for block in self.blocks:
            h = block(h)
        logits = self.head(h)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def transformer(dropout: float = 0.0) -> Recipe:
    x = torch.randint(0, 64, (8, 12))
    return Transformer(dropout), (x,), {"labels": _labels(64, 8, 12, ignored=True)}


def transformer_frozen() -> Recipe:
    """Its first block and both embeddings, the tied head with them, are not trained."""
    model, args, kwargs = transformer()
    model.positions.requires_grad_(False)
    for module in (model.tokens, model.blocks[0]):
        module.requires_grad_(False)
    return model, args, kwargs


def transformer_unequal() -> Recipe:
    """Five heads and ten sequences, of which two micro-batches have five each."""
    x = torch.randint(0, 64, (10, 12))
    return Transformer(0.1, layers=1, width=20, heads=5), (x,), {"labels": _labels(64, 10, 12, ignored=True)}


class _InBytes(nn.Module):
    """A frozen layer whose weight is bytes, and an adapter of rank 2 beside it, which is trained."""

    def __init__(self, inputs: int, outputs: int, scheme: str) -> None:
        super().__init__()
        stored = quantised(torch.randn(outputs, inputs) / inputs**0.5, scheme)
        bias = nn.Parameter(torch.randn(outputs), requires_grad=scheme == "int8")
        self.base = QuantisedLinear(stored, scheme, bias)
        self.down, self.up = nn.Linear(inputs, 2, bias=False), nn.Linear(2, outputs, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


class Quantised(nn.Module):
    """Blocks of two layers of weights in bytes: of 4 bits with nested scales, and of 8 bits."""

    def __init__(self, width: int = 128, inner: int = 384) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, width)
        self.embed.requires_grad_(False)
        self.blocks = nn.ModuleList(
            nn.Sequential(_InBytes(width, inner, scheme), nn.GELU(), _InBytes(inner, width, scheme))
            for scheme in ("nf4-double", "int8")
        )
        self.head = nn.Linear(width, 32)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


class Odd(nn.Module):
    """What real models have beside layers: frozen, unused and shared modules, buffers of every kind, an
    output that is more than the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.out = nn.Linear(24, 32), nn.Linear(32, 32), nn.Linear(32, 8)
        self.frozen, self.unused = nn.Linear(32, 32), nn.Linear(4, 4)
        self.frozen.requires_grad_(False)
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("shift", torch.ones(32), persistent=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor, y: torch.Tensor, *, wide: bool = False) -> tuple[torch.Tensor, Any]:
        h = self.shared(F.relu(self.shared(F.relu(self.first(x)))))
        out = self.out(self.frozen(h + self.shift) * self.scale)
        return F.mse_loss(out, y), {"out": out, "hidden": h if wide else None}


def odd() -> Recipe:
    return Odd(), (torch.randn(16, 24), torch.randn(16, 8)), {"wide": True}


def _outputs() -> nn.Module:
    """Two results, no loss."""

    def forward(m: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = F.gelu(m.first(x))
        return m.second(h), torch.softmax(m.third(h), -1)

    return Call(forward, first=nn.Linear(24, 32), second=nn.Linear(32, 8), third=nn.Linear(32, 6))


class MovingAverage(nn.Module):
    """A buffer that two layers read and the second one moves."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(24, 32), nn.Linear(32, 8)
        self.register_buffer("average", torch.zeros(32))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x - 0.0) + self.average)
        out = self.second(torch.relu(h * 2))
        self.average.mul_(0.9).add_(0.1 * h.detach().mean(0))
        return F.mse_loss(out, y)


def _undefined(trained: bool) -> nn.Module:
    """Square roots of negative numbers, in outputs or in the loss and its gradients."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        out = torch.sqrt(m.second(F.gelu(m.first(x))))
        return out.mean() if trained else out

    return Call(forward, first=nn.Linear(24, 32), second=nn.Linear(32, 8))


def _tokens() -> nn.Module:
    """A next-token loss with ignored targets."""

    def forward(m: Any, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = m.head(torch.tanh(m.embed(ids)))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    return Call(forward, embed=nn.Embedding(32, 16), head=nn.Linear(16, 32))


class Scored(nn.Module):
    """A tagger that returns its loss, with scores for each token, two numbers and what is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(32, 16), nn.Linear(16, 16), nn.Linear(16, 32)
        self.unused = nn.Linear(16, 3)  # by the loss

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        hidden = torch.tanh(self.embed(ids))
        hidden = torch.tanh(self.mix(hidden) + hidden.mean(1, keepdim=True))  # depends on the length
        scores = self.head(hidden)
        found: dict[str, Any] = {"scores": scores, "kinds": [self.unused(hidden.mean(1)), ids], "note": None}
        if labels is None:
            return found
        loss = F.cross_entropy(scores.flatten(0, 1), labels.flatten())
        right = (scores.detach().argmax(-1) == labels).float().mean()
        return found | {"loss": loss, "right": right, "name": "tagger"}


class Tagged(Scored):
    """The same without numbers beside the loss."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        found = super().forward(ids, labels)
        return {name: value for name, value in found.items() if name != "right"}


class Normed(nn.Module):
    """A tagger with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.norms = nn.ModuleList([nn.BatchNorm1d(16), nn.BatchNorm1d(16)])
        self.mix = nn.Linear(16, 16)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        first, second = self.norms
        hidden = first(self.embed(ids).transpose(1, 2)).transpose(1, 2)
        hidden = second(torch.tanh(self.mix(hidden)).transpose(1, 2)).transpose(1, 2)
        scores = self.head(hidden)
        if labels is None:
            return {"scores": scores}
        return {"loss": F.cross_entropy(scores.flatten(0, 1), labels.flatten()), "scores": scores}


class LookingBack(Scored):
    """A tagger whose last result is made with the first parameter, and not for its loss; and one that is an
    input, and one that is true or false."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        found = super().forward(ids, labels)
        back = found["scores"].flatten(1)[:, :16] @ self.embed.weight.t()
        return {"loss": found["loss"], "back": back, "sure": back.argmax(-1) > 3, "labels": labels}


class WithTable(Scored):
    """A tagger that returns a buffer, or a parameter."""

    def __init__(self, *, parameter: bool) -> None:
        super().__init__()
        self.register_buffer("kinds", torch.arange(3.0))
        self.parameter = parameter

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        table = self.embed.weight if self.parameter else self.kinds
        return {"loss": super().forward(ids, labels)["loss"], "table": table}


def _of_rows(build: Callable[[], nn.Module], *targets: int) -> Callable[[], Recipe]:
    """A model of 16 rows of 24 numbers, with targets of so many."""
    return lambda: (build(), tuple(torch.randn(16, width) for width in (24, *targets)), {})


def _of_ids(build: Callable[[], nn.Module]) -> Callable[[], Recipe]:
    """A model of 8 texts of 6 tokens, each of which is its own target."""

    def recipe() -> Recipe:
        ids = torch.randint(0, 32, (8, 6))
        return build(), (ids, ids.clone()), {}

    return recipe


mlp, moving_average = (_of_rows(build, 8) for build in (Perceptron, MovingAverage))
perceptron_outputs = _of_rows(_outputs)
undefined_outputs, undefined_loss = (_of_rows(partial(_undefined, trained)) for trained in (False, True))
tokens, scored, tagged, normed, looking_back, quantised_base = map(
    _of_ids, (_tokens, Scored, Tagged, Normed, LookingBack, Quantised)
)
with_parameter, with_buffer = (_of_ids(partial(WithTable, parameter=one)) for one in (True, False))
gpt2_ignored, gpt2_small = partial(gpt2, ignored=True), partial(gpt2, layers=1)
bert_small, llama_small = partial(bert, layers=1), partial(llama, layers=1)
gpt2_dropout, bert_dropout = (partial(build, dropout=0.2, ignored=True) for build in (gpt2, bert))
vgg_norm, vgg_norm_plain = partial(vgg, norm=True, dropout=0.3), partial(vgg, norm=True)
vgg_dropout, transformer_dropout = partial(vgg, dropout=0.3), partial(transformer, 0.1)
