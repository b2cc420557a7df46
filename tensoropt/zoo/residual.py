"""Residual networks: ResNet with bottlenecks, and its wide form.

``x (batch, 3, size, size)``, ``labels (batch,)`` to the mean cross entropy. A wide ResNet is the same
network with *every* width after the stem multiplied. That is how ToFu's sizes come out (WResNet-152-10:
65.1 GB of weights, gradients and momentum, three times the 21.7 GiB found here; quoted from memory),
unlike torchvision's, which widens the middle convolution alone.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from tensoropt.zoo.inputs import images, tokens
from tensoropt.zoo.registry import Recipe, register

_RESNET = "He et al., Deep Residual Learning, CVPR 2016 (table 1); Identity Mappings, ECCV 2016 (200 layers)"
_WIDE = "Zagoruyko and Komodakis, Wide Residual Networks, 2016; widths after Wang et al. (ToFu), EuroSys 2019"

DEPTHS = {26: (2, 2, 2, 2), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3), 200: (3, 24, 36, 3)}


class ConvNorm(nn.Sequential):
    """Convolution without bias, then batch norm."""

    def __init__(self, channels: int, out: int, kernel: int, stride: int = 1, dilation: int = 1) -> None:
        padding = dilation * (kernel // 2)
        convolution = nn.Conv2d(channels, out, kernel, stride, padding, dilation, bias=False)
        super().__init__(convolution, nn.BatchNorm2d(out))


class Bottleneck(nn.Module):
    """1x1 down, 3x3 (with the stride), 1x1 up to four times the middle width, and the shortcut."""

    def __init__(self, channels: int, middle: int, stride: int, dilation: int = 1) -> None:
        super().__init__()
        out = 4 * middle
        self.down = ConvNorm(channels, middle, 1)
        self.mix = ConvNorm(middle, middle, 3, stride, dilation)
        self.up = ConvNorm(middle, out, 1)
        same = stride == 1 and channels == out
        self.shortcut = nn.Identity() if same else ConvNorm(channels, out, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.up(F.relu(self.mix(F.relu(self.down(x)))))
        return F.relu(inner + self.shortcut(x))


def trunk(blocks: tuple[int, ...], stem: int, width: float, output_stride: int = 32) -> nn.Sequential:
    """Stem and stages, ``(b, 3, s, s) -> (b, 32 * stem * width, s / output_stride, ...)``.

    Stages that would go beyond ``output_stride`` keep their resolution and dilate instead (DeepLab).
    """
    layers: list[nn.Module] = [
        nn.Conv2d(3, stem, 7, 2, 3, bias=False), nn.BatchNorm2d(stem), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
    ]  # fmt: skip
    channels, reached, dilation = stem, 4, 1
    for stage, repeats in enumerate(blocks):
        middle = int(stem * width) * 2**stage
        stride = 1 if stage == 0 else 2
        if reached * stride > output_stride:
            stride, dilation = 1, 2 * dilation
        reached *= stride
        for index in range(repeats):
            layers.append(Bottleneck(channels, middle, stride if index == 0 else 1, dilation))
            channels = 4 * middle
    return nn.Sequential(*layers)


class ResidualNetwork(nn.Module):
    """Trunk, mean over the image, one dense layer, cross entropy."""

    def __init__(self, features: nn.Module, channels: int, classes: int) -> None:
        super().__init__()
        self.features = features
        self.classifier = nn.Linear(channels, classes)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.classifier(self.features(x).mean((2, 3))), labels)


def _residual(
    batch: int, blocks: tuple[int, ...], stem: int, width: float, image: int, classes: int
) -> Recipe:
    channels = 4 * int(stem * width) * 2 ** (len(blocks) - 1)
    model = ResidualNetwork(trunk(blocks, stem, width), channels, classes)
    return model, (images(batch, 3, image), tokens(classes, batch)), {}


@register("resnet-tiny", paper=_RESNET, size="laptop", batch=8, depth=26, image=64, stem=8, classes=10)
@register("resnet50", paper=_RESNET, size="paper", batch=256)
@register("resnet101", paper=_RESNET, size="paper", batch=256, depth=101)
@register("resnet152", paper=_RESNET, size="paper", batch=256, depth=152)
@register("resnet200", paper=_RESNET, size="paper", batch=256, depth=200)
def resnet(batch: int, depth: int = 50, image: int = 224, stem: int = 64, classes: int = 1000) -> Recipe:
    """ResNet with bottleneck blocks."""
    return _residual(batch, DEPTHS[depth], stem, 1, image, classes)


@register(
    "wide-resnet-tiny", paper=_WIDE, size="laptop", batch=8,
    depth=26, width=2, image=64, stem=8, classes=10,
)  # fmt: skip
@register("wide-resnet-101", paper=_WIDE, size="paper", batch=256, depth=101, width=8)
@register("wide-resnet-152", paper=_WIDE, size="paper", batch=256)
def wide_resnet(
    batch: int, depth: int = 152, width: float = 6, image: int = 224, stem: int = 64, classes: int = 1000
) -> Recipe:
    """Wide ResNet, every width after the stem multiplied."""
    return _residual(batch, DEPTHS[depth], stem, width, image, classes)
