"""Inception-v3 without the auxiliary head.

``x (batch, 3, size, size)``, ``labels (batch,)`` to the mean cross entropy. ``share`` scales all
channel counts for the laptop's size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensoropt.zoo.inputs import images, tokens
from tensoropt.zoo.registry import Recipe, register

_INCEPTION = "Szegedy et al., Rethinking the Inception Architecture, CVPR 2016 (table 1)"

Kernel = int | tuple[int, int]


class Conv(nn.Sequential):
    """Convolution without bias, batch norm, ReLU. ``padding`` keeps the size unless it is given."""

    def __init__(self, channels: int, out: int, kernel: Kernel, stride: int = 1, valid: bool = False) -> None:
        sides = (kernel, kernel) if isinstance(kernel, int) else kernel
        padding = (0, 0) if valid else (sides[0] // 2, sides[1] // 2)
        convolution = nn.Conv2d(channels, out, sides, stride, padding, bias=False)
        super().__init__(convolution, nn.BatchNorm2d(out, eps=1e-3), nn.ReLU())


class Branches(nn.Module):
    """The branches of one input, concatenated over channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], dim=1)


def _average(channels: int, out: int) -> nn.Sequential:
    return nn.Sequential(nn.AvgPool2d(3, 1, 1), Conv(channels, out, 1))


def _square(channels: int, c: list[int], pooled: int) -> Branches:
    """Figure 5: 5x5 as it is and as two 3x3."""
    return Branches(
        Conv(channels, c[0], 1),
        nn.Sequential(Conv(channels, c[1], 1), Conv(c[1], c[0], 5)),
        nn.Sequential(Conv(channels, c[0], 1), Conv(c[0], c[2], 3), Conv(c[2], c[2], 3)),
        _average(channels, pooled),
    )


def _factored(channels: int, middle: int, out: int) -> Branches:
    """Figure 6: 7x7 as 1x7 and 7x1, once and twice."""
    row, column = (1, 7), (7, 1)
    return Branches(
        Conv(channels, out, 1),
        nn.Sequential(
            Conv(channels, middle, 1), Conv(middle, middle, row), Conv(middle, out, column)
        ),
        nn.Sequential(
            Conv(channels, middle, 1), Conv(middle, middle, column), Conv(middle, middle, row),
            Conv(middle, middle, column), Conv(middle, out, row),
        ),
        _average(channels, out),
    )  # fmt: skip


def _wide(channels: int, c: list[int]) -> Branches:
    """Figure 7: 3x3 forked into 1x3 and 3x1."""

    def cross() -> Branches:
        return Branches(Conv(c[1], c[1], (1, 3)), Conv(c[1], c[1], (3, 1)))

    return Branches(
        Conv(channels, c[0], 1),
        nn.Sequential(Conv(channels, c[1], 1), cross()),
        nn.Sequential(Conv(channels, c[2], 1), Conv(c[2], c[1], 3), cross()),
        _average(channels, c[3]),
    )


class Inception(nn.Module):
    """The forks in sequence, mean over the image, one dense layer, cross entropy."""

    def __init__(self, share: float, classes: int) -> None:
        super().__init__()

        def s(*widths: int) -> list[int]:
            return [max(1, round(width * share)) for width in widths]

        w32, w48, w64, w80, w96, w128, w160, w192 = s(32, 48, 64, 80, 96, 128, 160, 192)
        w320, w384, w448 = s(320, 384, 448)
        square_a, square_b = 2 * w64 + w96 + w32, 3 * w64 + w96
        factored = 4 * w192
        reduced = w384 + w96 + square_b
        final = w320 + w192 + factored
        wide = w320 + 4 * w384 + w192
        self.features = nn.Sequential(
            Conv(3, w32, 3, 2, valid=True), Conv(w32, w32, 3, valid=True), Conv(w32, w64, 3),
            nn.MaxPool2d(3, 2),
            Conv(w64, w80, 1), Conv(w80, w192, 3, valid=True), nn.MaxPool2d(3, 2),
            _square(w192, [w64, w48, w96], w32),
            _square(square_a, [w64, w48, w96], w64),
            _square(square_b, [w64, w48, w96], w64),
            Branches(
                Conv(square_b, w384, 3, 2, valid=True),
                nn.Sequential(Conv(square_b, w64, 1), Conv(w64, w96, 3), Conv(w96, w96, 3, 2, valid=True)),
                nn.MaxPool2d(3, 2),
            ),
            _factored(reduced, w128, w192),
            _factored(factored, w160, w192),
            _factored(factored, w160, w192),
            _factored(factored, w192, w192),
            Branches(
                nn.Sequential(Conv(factored, w192, 1), Conv(w192, w320, 3, 2, valid=True)),
                nn.Sequential(
                    Conv(factored, w192, 1), Conv(w192, w192, (1, 7)), Conv(w192, w192, (7, 1)),
                    Conv(w192, w192, 3, 2, valid=True),
                ),
                nn.MaxPool2d(3, 2),
            ),
            _wide(final, [w320, w384, w448, w192]),
            _wide(wide, [w320, w384, w448, w192]),
        )  # fmt: skip
        self.classifier = nn.Linear(wide, classes)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.classifier(self.features(x).mean((2, 3))), labels)


@register("inception-v3-tiny", paper=_INCEPTION, size="laptop", batch=4, image=107, share=0.125, classes=10)
@register("inception-v3", paper=_INCEPTION, size="paper", batch=64)
def inception_v3(batch: int, image: int = 299, share: float = 1.0, classes: int = 1000) -> Recipe:
    """Inception-v3 (no auxiliary head)."""
    return Inception(share, classes), (images(batch, 3, image), tokens(classes, batch)), {}
