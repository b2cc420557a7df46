"""Models that nothing here was made for, small: each has something in its backward that is easily missed."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, BATCH, LENGTH = 512, 64, 16
Recipe = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def _classes(count: int = 20, rows: int = BATCH) -> torch.Tensor:
    return torch.randint(0, count, (rows,))


class DenseNet(nn.Module):
    """Every layer reads all before it, put side by side: one gradient is handed on in slices."""

    def __init__(self, width: int = 16, layers: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(width * i), nn.ReLU(), nn.Conv2d(width * i, width, 3, padding=1))
            for i in range(1, layers + 1)
        )
        self.out = nn.Linear(width * (layers + 1), 20)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        parts = [self.stem(x)]
        for layer in self.layers:
            parts.append(layer(torch.cat(parts, 1)))
        return F.cross_entropy(self.out(torch.cat(parts, 1).mean((2, 3))), y)


def dense_net() -> Recipe:
    return DenseNet(), (torch.randn(BATCH, 3, 16, 16), _classes()), {}


class Cells(nn.Module):
    """Steps of a sequence are slices of it, and all share two weights whose gradients add up."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embedding, self.cell = nn.Embedding(VOCABULARY, width), nn.LSTMCell(width, width)
        self.out = nn.Linear(width, VOCABULARY)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        embedded, found = self.embedding(x), []
        h = c = embedded.new_zeros(x.shape[0], self.cell.hidden_size)
        for step in range(x.shape[1]):
            h, c = self.cell(embedded[:, step], (h, c))
            found.append(h)
        return F.cross_entropy(self.out(torch.stack(found, 1)).flatten(0, 1), y.flatten())


def cells() -> Recipe:
    tokens = torch.randint(0, VOCABULARY, (2, BATCH, 6))
    return Cells(), (tokens[0], tokens[1]), {}


class Pyramid(nn.Module):
    """Shortcuts over scales: concatenations of sums."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(3, width, 3, 1, 1), nn.Conv2d(width, 2 * width, 3, 2, 1)])
        self.side = nn.Conv2d(width, width, 1)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.merge, self.norm = nn.Conv2d(2 * width, width, 3, 1, 1), nn.GroupNorm(4, width)
        self.out = nn.Linear(width, 20)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        high = F.silu(self.down[0](x))
        up = self.up(F.silu(self.down[1](high)))
        merged = self.merge(torch.cat([high + self.side(high), up], 1))
        return F.cross_entropy(self.out((self.norm(merged) + up).mean((2, 3))), y)


def pyramid() -> Recipe:
    return Pyramid(), (torch.randn(BATCH, 3, 16, 16), _classes()), {}


def _language(model: nn.Module) -> Recipe:
    tokens = torch.randint(3, VOCABULARY, (BATCH, LENGTH))
    return model.train(), (), {"input_ids": tokens, "labels": tokens.clone()}


_SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8, "vocab_size": VOCABULARY}


def albert() -> Recipe:
    """All layers share their weights."""
    from transformers import AlbertConfig, AlbertForMaskedLM

    config = AlbertConfig(embedding_size=32, intermediate_size=128, max_position_embeddings=32, **_SMALL)
    return _language(AlbertForMaskedLM(config))


def gpt_neox() -> Recipe:
    """Attention and feed-forward side by side."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = GPTNeoXConfig(intermediate_size=128, max_position_embeddings=32, use_cache=False, **_SMALL)
    return _language(GPTNeoXForCausalLM(config))


def t5() -> Recipe:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(d_model=64, d_kv=8, d_ff=128, num_layers=2, num_heads=8, vocab_size=VOCABULARY,
                      use_cache=False, decoder_start_token_id=0)  # fmt: skip
    return _language(T5ForConditionalGeneration(config))


def convnext() -> Recipe:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(image_size=32, depths=[1, 1], hidden_sizes=[16, 32], num_stages=2, num_labels=20)
    images = {"pixel_values": torch.randn(BATCH, 3, 32, 32), "labels": _classes()}
    return ConvNextForImageClassification(config).train(), (), images
