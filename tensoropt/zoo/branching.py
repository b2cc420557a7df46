"""Networks with large branches: AmoebaNet-D, two-tower retrieval, CLIP.

AmoebaNet's paper and its released TensorFlow code disagree on the states that a normal cell concatenates. The
model here follows the code, because GPipe's parameter counts need its states (torchgpipe's benchmark).
Two-tower retrieval and CLIP score all pairs of a batch, so their loss is not a mean over samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import log

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensoropt.zoo.convolution import ConvNorm
from tensoropt.zoo.decoder import DecoderBlock, FeedForward
from tensoropt.zoo.registry import Recipe, images, register, require_at_least, require_multiple, tokens

_AMOEBA = (
    "Real et al., Regularized Evolution, AAAI 2019; sizes (layers, filters) of Huang et al. (GPipe), 2019"
)


@dataclass(frozen=True)
class _Cell:
    """A cell found by architecture search. States 0 and 1 are its inputs; state n + 2 is the sum of
    operations 2n and 2n + 1. An operation is (number of the state that it reads, kind). The states ``out``
    are concatenated."""

    operations: tuple[tuple[int, str], ...]
    out: tuple[int, ...]


_AMOEBA_NORMAL = _Cell(
    ((1, "conv1"), (1, "max3"), (1, "same"), (0, "conv7"), (0, "conv1"),
     (0, "conv7"), (2, "max3"), (2, "same"), (1, "average"), (5, "conv1")),
    (0, 3, 4, 6),
)  # fmt: skip
_AMOEBA_REDUCTION = _Cell(
    ((0, "max2"), (0, "max3"), (2, "same"), (1, "conv3"), (2, "conv7"),
     (2, "max3"), (3, "same"), (1, "max2"), (2, "average"), (3, "conv1")),
    (4, 5, 6),
)  # fmt: skip


class _Active(nn.Module):
    """A ReLU, a convolution without bias, and a batch norm."""

    def __init__(
        self, channels: int, out: int, kernel: tuple[int, int] = (1, 1), stride: tuple[int, int] = (1, 1)
    ) -> None:
        super().__init__()
        padding = (kernel[0] // 2, kernel[1] // 2)
        self.convolution = nn.Conv2d(channels, out, kernel, stride, padding, bias=False)
        self.norm = nn.BatchNorm2d(out)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.convolution(F.relu(x)))


class _Halve(nn.Module):
    """A halving of the resolution: one 1x1 convolution of the even pixels and one of the odd pixels."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.even = nn.Conv2d(channels, out // 2, 1, 2, bias=False)
        self.odd = nn.Conv2d(channels, out - out // 2, 1, 2, bias=False)
        self.norm = nn.BatchNorm2d(out)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(x)
        shifted = F.pad(x[:, :, 1:, 1:], (0, 1, 0, 1))
        return self.norm(torch.cat([self.even(x), self.odd(shifted)], dim=1))


def _operation(kind: str, c: int, stride: int) -> nn.Module:
    narrow = c // 4
    match kind:
        case "same":
            return nn.Identity() if stride == 1 else _Halve(c, c)
        case "average":
            return nn.AvgPool2d(3, stride, 1, count_include_pad=False)
        case "max3":
            return nn.MaxPool2d(3, stride, 1)
        case "max2":
            return nn.MaxPool2d(2, stride)
        case "conv1":
            return _Active(c, c, stride=(stride, stride))
        case "conv3":
            return nn.Sequential(
                _Active(c, narrow), _Active(narrow, narrow, (3, 3), (stride, stride)), _Active(narrow, c)
            )
        case _:  # conv7
            return nn.Sequential(
                _Active(c, narrow),
                _Active(narrow, narrow, (1, 7), (1, stride)),
                _Active(narrow, narrow, (7, 1), (stride, 1)),
                _Active(narrow, c),
            )


class _SearchedCell(nn.Module):
    """One cell, which reads the outputs of the last cell (``previous``) and of the one before (``before``).

    ``halves`` says whether this cell halves the resolution, ``halved`` whether the last cell did.
    """

    def __init__(
        self, cell: _Cell, before: int, previous: int, channels: int, halves: bool, halved: bool
    ) -> None:
        super().__init__()
        self.cell = cell
        self.first = _Active(previous, channels)
        if halved:
            self.second: nn.Module = _Halve(before, channels)
        else:
            self.second = nn.Identity() if before == channels else _Active(before, channels)
        self.operations = nn.ModuleList(
            _operation(kind, channels, 2 if halves and state < 2 else 1) for state, kind in cell.operations
        )

    def forward(self, previous: Tensor, before: Tensor) -> Tensor:
        states = [self.first(previous), self.second(before)]
        read = (state for state, _ in self.cell.operations)
        results = zip(self.operations, read, strict=True)
        for (first, a), (second, b) in zip(results, results, strict=True):
            states.append(first(states[a]) + second(states[b]))
        return torch.cat([states[index] for index in self.cell.out], dim=1)


class AmoebaNet(nn.Module):
    """AmoebaNet-D: a stem, two reduction cells, three runs of ``layers / 3`` normal cells with a reduction
    cell between runs, and a dense layer. The first run has ``filters`` channels, each next run twice as many.
    """

    def __init__(self, layers: int, filters: int, classes: int) -> None:
        super().__init__()
        require_multiple(3, "three runs of cells share them equally", layers=layers)
        channels = filters // 4
        self.stem = ConvNorm(3, channels, 3, 2)
        cells = [(2 * channels, True), (4 * channels, True)]
        for number in range(3):
            width = 4 * channels << number
            cells += [(width, True)] * (number > 0) + [(width, False)] * (layers // 3)
        before = previous = channels
        halved = False
        self.cells = nn.ModuleList()
        for inner, halves in cells:
            cell = _AMOEBA_REDUCTION if halves else _AMOEBA_NORMAL
            self.cells.append(_SearchedCell(cell, before, previous, inner, halves, halved))
            before, previous, halved = previous, inner * len(cell.out), halves
        self.classifier = nn.Linear(previous, classes)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = before = self.stem(F.relu(x))
        for cell in self.cells:
            x, before = cell(x, before), x
        return F.cross_entropy(self.classifier(x.mean((2, 3))), labels)


@register(
    "amoebanet-d-tiny", paper=_AMOEBA, size="laptop", batch=4, layers=3, filters=32, image=64, classes=10
)
@register("amoebanet-d", paper=_AMOEBA, size="paper", batch=128)
def _amoebanet_d(
    batch: int, layers: int = 18, filters: int = 256, image: int = 224, classes: int = 1000
) -> Recipe:
    """AmoebaNet-D, an image classifier found by evolution."""
    require_at_least(8, "the narrowest convolution has an eighth of them", filters=filters)
    require_multiple(32, "the stem and four reductions halve it", image=image)
    return AmoebaNet(layers, filters, classes), (images(batch, 3, image), tokens(classes, batch)), {}


_TOWERS = "Yi et al., Sampling-Bias-Corrected Neural Modeling, RecSys 2019 (figure 2)"
_CLIP = "Radford et al., Learning Transferable Visual Models, ICML 2021 (section 2; ViT-B/32)"


class _Tower(nn.Module):
    """Dense layers with outputs ``(b, hidden[-1])``, which read the mean embedding of ``ids (b, length)``
    beside ``features (b, features)``."""

    def __init__(self, vocabulary: int, embedding: int, features: int, hidden: tuple[int, ...]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        widths = (embedding + features, *hidden)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

    def forward(self, ids: Tensor, features: Tensor) -> Tensor:
        x = torch.cat([self.embedding(ids).mean(1), features], dim=-1)
        for number, layer in enumerate(self.layers):
            x = layer(F.relu(x) if number else x)
        return x


class _TwoTower(nn.Module):
    """A tower for queries and a smaller tower for items, with a softmax over the batch's items."""

    def __init__(self, vocabularies: tuple[int, int], embedding: int, features: tuple[int, int],
                 hidden: tuple[int, ...], temperature: float) -> None:  # fmt: skip
        super().__init__()
        self.queries = _Tower(vocabularies[0], embedding, features[0], hidden)
        self.items = _Tower(vocabularies[1], embedding, features[1], hidden[1:])
        self.temperature = temperature

    def forward(self, watched: Tensor, user: Tensor, tags: Tensor, item: Tensor, shares: Tensor) -> Tensor:
        queries = F.normalize(self.queries(watched, user), dim=-1)
        items = F.normalize(self.items(tags, item), dim=-1)
        scores = queries @ items.T / self.temperature - shares.log()
        return F.cross_entropy(scores, torch.arange(len(scores), device=scores.device))


@register(
    "two-tower-tiny", paper=_TOWERS, size="laptop", batch=32, queries=2000, items=500, embedding=32,
    history=16, features=32, hidden=256,
)  # fmt: skip
@register("two-tower", paper=_TOWERS, size="paper", batch=8192)
def _two_tower(
    batch: int, queries: int = 1_000_000, items: int = 200_000, embedding: int = 256, history: int = 100,
    features: int = 512, hidden: int = 4096, temperature: float = 0.05,
) -> Recipe:  # fmt: skip
    """Two-tower retrieval: a tower for queries, a smaller one for items, softmax over the batch."""
    require_at_least(8, "the last layer has an eighth of it", hidden=hidden)
    require_at_least(2, "an item has half as many", features=features)
    widths = (hidden, hidden // 2, hidden // 4, hidden // 8)
    model = _TwoTower((queries, items), embedding, (features, features // 2), widths, temperature)
    drawn = torch.rand(batch) * 0.9 + 0.1
    inputs = (
        tokens(queries, batch, history), torch.randn(batch, features),
        tokens(items, batch, max(1, history // 10)), torch.randn(batch, features // 2), drawn,
    )  # fmt: skip
    return model, inputs, {}


class _ImageTransformer(nn.Module):
    """A vision transformer ``(b, 3, s, s) -> (b, d)``, which returns the output of its class token."""

    def __init__(self, image: int, patch: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, hidden, patch, patch, bias=False)
        self.summary = nn.Parameter(torch.randn(hidden) * hidden**-0.5)
        self.position = nn.Parameter(torch.randn((image // patch) ** 2 + 1, hidden) * hidden**-0.5)
        self.norm_before, self.norm_after = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.blocks = _blocks(hidden, layers, causal=False)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patches(x).flatten(2).transpose(1, 2)
        summary = self.summary.expand(len(x), 1, -1)
        x = self.norm_before(torch.cat([summary, patches], dim=1) + self.position)
        for block in self.blocks:
            x = block(x)
        return self.norm_after(x[:, 0])


class _TextTransformer(nn.Module):
    """A causal transformer ``(b, s) -> (b, d)`` over a text; returns the output of the last position."""

    def __init__(self, vocabulary: int, sequence: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, hidden)
        nn.init.normal_(self.token.weight, std=0.02)
        self.position = nn.Parameter(torch.randn(sequence, hidden) * 0.01)
        self.blocks = _blocks(hidden, layers, causal=True)
        self.norm = nn.LayerNorm(hidden)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids) + self.position
        for block in self.blocks:
            x = block(x)
        return self.norm(x[:, -1])


def _heads(hidden: int) -> int:
    # All of CLIP's transformers have heads of 64.
    return max(2, hidden // 64)


def _blocks(hidden: int, layers: int, *, causal: bool) -> nn.ModuleList:
    return nn.ModuleList(
        DecoderBlock(hidden, _heads(hidden), 0.0, FeedForward(hidden), causal=causal) for _ in range(layers)
    )


class Clip(nn.Module):
    """A tower for images and a tower for texts, with a contrastive loss over all pairs of the batch."""

    def __init__(self, images: _ImageTransformer, texts: _TextTransformer, embedding: int) -> None:
        super().__init__()
        self.images, self.texts = images, texts
        self.image_projection = nn.Linear(images.norm_after.weight.shape[0], embedding, bias=False)
        self.text_projection = nn.Linear(texts.norm.weight.shape[0], embedding, bias=False)
        self.scale = nn.Parameter(torch.tensor(log(1 / 0.07)))

    def forward(self, images: Tensor, texts: Tensor) -> Tensor:
        pictured = F.normalize(self.image_projection(self.images(images)), dim=-1)
        written = F.normalize(self.text_projection(self.texts(texts)), dim=-1)
        scores = self.scale.exp() * pictured @ written.T
        own = torch.arange(len(scores), device=scores.device)
        return (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2


@register(
    "clip-tiny", paper=_CLIP, size="laptop", batch=8, image=32, patch=8, image_hidden=64, image_layers=2,
    vocabulary=512, sequence=16, text_hidden=32, text_layers=2, embedding=32,
)  # fmt: skip
@register("clip", paper=_CLIP, size="paper", batch=256)
def _clip(
    batch: int, image: int = 224, patch: int = 32, image_hidden: int = 768, image_layers: int = 12,
    vocabulary: int = 49408, sequence: int = 77, text_hidden: int = 512, text_layers: int = 12,
    embedding: int = 512,
) -> Recipe:  # fmt: skip
    """CLIP: transformers for images and for texts, contrastive loss."""
    require_at_least(patch, "it has at least one patch", image=image)
    for option, hidden in (("image_hidden", image_hidden), ("text_hidden", text_hidden)):
        require_multiple(_heads(hidden), "its attention heads share it", **{option: hidden})
    model = Clip(
        _ImageTransformer(image, patch, image_hidden, image_layers),
        _TextTransformer(vocabulary, sequence, text_hidden, text_layers),
        embedding,
    )
    return model, (images(batch, 3, image), tokens(vocabulary, batch, sequence)), {}
