"""Networks for images: ``x (batch, channels, size, size)``, ``labels (batch,)`` -> mean cross entropy.

For U-Net and DeepLab-V3, which classify every pixel, the labels are ``(batch, size, size)``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensoropt.zoo.registry import (
    Recipe,
    images,
    register,
    require_at_least,
    require_multiple,
    require_one_of,
    tokens,
)

_RESNET = "He et al., Deep Residual Learning, CVPR 2016 (table 1); Identity Mappings, ECCV 2016 (200 layers)"
_WIDE = "Zagoruyko and Komodakis, Wide Residual Networks, 2016; widths after Wang et al. (ToFu), EuroSys 2019"

_DEPTHS = {26: (2, 2, 2, 2), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3), 200: (3, 24, 36, 3)}


class ConvNorm(nn.Sequential):
    """A convolution without bias, then a batch norm."""

    def __init__(self, channels: int, out: int, kernel: int, stride: int = 1, dilation: int = 1) -> None:
        padding = dilation * (kernel // 2)
        convolution = nn.Conv2d(channels, out, kernel, stride, padding, dilation, bias=False)
        super().__init__(convolution, nn.BatchNorm2d(out))


class Bottleneck(nn.Module):
    """A residual block: 1x1 down to ``middle`` channels, 3x3 (with the stride), 1x1 up to ``4 * middle``."""

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


def _trunk(blocks: tuple[int, ...], stem: int, width: float, output_stride: int = 32) -> nn.Sequential:
    """Return stem and stages of a ResNet, ``(b, 3, s, s) -> (b, 32 * stem * width, s / output_stride, ...)``.

    Stages that would go below resolution ``s / output_stride`` dilate their convolutions instead (DeepLab).
    """
    require_at_least(1 / stem, f"the first stage has {stem} times as many channels", width=width)
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


class _Classifier(nn.Module):
    """A classifier: the layers ``features``, the mean over the image, one dense layer, and cross entropy."""

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
    model = _Classifier(_trunk(blocks, stem, width), channels, classes)
    return model, (images(batch, 3, image), tokens(classes, batch)), {}


@register("resnet-tiny", paper=_RESNET, size="laptop", batch=8, depth=26, image=64, stem=8, classes=10)
@register("resnet50", paper=_RESNET, size="paper", batch=256)
@register("resnet101", paper=_RESNET, size="paper", batch=256, depth=101)
@register("resnet152", paper=_RESNET, size="paper", batch=256, depth=152)
@register("resnet200", paper=_RESNET, size="paper", batch=256, depth=200)
def _resnet(batch: int, depth: int = 50, image: int = 224, stem: int = 64, classes: int = 1000) -> Recipe:
    """ResNet with bottleneck blocks."""
    require_one_of(_DEPTHS, depth=depth)
    return _residual(batch, _DEPTHS[depth], stem, 1, image, classes)


@register(
    "wide-resnet-tiny", paper=_WIDE, size="laptop", batch=8, depth=26, width=2.0, image=64, stem=8, classes=10
)
@register("wide-resnet-101", paper=_WIDE, size="paper", batch=256, depth=101, width=8.0)
@register("wide-resnet-152", paper=_WIDE, size="paper", batch=256)
def _wide_resnet(
    batch: int, depth: int = 152, width: float = 6.0, image: int = 224, stem: int = 64, classes: int = 1000
) -> Recipe:
    """Wide ResNet; width multiplies every number of channels after the stem."""
    require_one_of(_DEPTHS, depth=depth)
    return _residual(batch, _DEPTHS[depth], stem, width, image, classes)


_INCEPTION = "Szegedy et al., Rethinking the Inception Architecture, CVPR 2016 (table 1)"

_Kernel = int | tuple[int, int]


class Conv(nn.Sequential):
    """A convolution without bias, a batch norm and a ReLU. Padding keeps the size unless ``valid``."""

    def __init__(
        self, channels: int, out: int, kernel: _Kernel, stride: int = 1, valid: bool = False
    ) -> None:
        sides = (kernel, kernel) if isinstance(kernel, int) else kernel
        padding = (0, 0) if valid else (sides[0] // 2, sides[1] // 2)
        convolution = nn.Conv2d(channels, out, sides, stride, padding, bias=False)
        super().__init__(convolution, nn.BatchNorm2d(out, eps=1e-3), nn.ReLU())


class Branches(nn.Module):
    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], dim=1)


def _average(channels: int, out: int) -> nn.Sequential:
    return nn.Sequential(nn.AvgPool2d(3, 1, 1), Conv(channels, out, 1))


def _square(channels: int, c: list[int], pooled: int) -> Branches:
    return Branches(
        Conv(channels, c[0], 1),
        nn.Sequential(Conv(channels, c[1], 1), Conv(c[1], c[0], 5)),
        nn.Sequential(Conv(channels, c[0], 1), Conv(c[0], c[2], 3), Conv(c[2], c[2], 3)),
        _average(channels, pooled),
    )


def _factored(channels: int, middle: int, out: int) -> Branches:
    row, column = (1, 7), (7, 1)
    return Branches(
        Conv(channels, out, 1),
        nn.Sequential(Conv(channels, middle, 1), Conv(middle, middle, row), Conv(middle, out, column)),
        nn.Sequential(
            Conv(channels, middle, 1), Conv(middle, middle, column), Conv(middle, middle, row),
            Conv(middle, middle, column), Conv(middle, out, row),
        ),
        _average(channels, out),
    )  # fmt: skip


def _wide(channels: int, c: list[int]) -> Branches:
    def cross() -> Branches:
        return Branches(Conv(c[1], c[1], (1, 3)), Conv(c[1], c[1], (3, 1)))

    return Branches(
        Conv(channels, c[0], 1),
        nn.Sequential(Conv(channels, c[1], 1), cross()),
        nn.Sequential(Conv(channels, c[2], 1), Conv(c[2], c[1], 3), cross()),
        _average(channels, c[3]),
    )


class Inception(_Classifier):
    """Inception-v3, a sequence of modules with branches; ``share`` multiplies all numbers of channels."""

    def __init__(self, share: float, classes: int) -> None:
        def s(*widths: int) -> list[int]:
            return [max(1, round(width * share)) for width in widths]

        w32, w48, w64, w80, w96, w128, w160, w192 = s(32, 48, 64, 80, 96, 128, 160, 192)
        w320, w384, w448 = s(320, 384, 448)
        square_a, square_b = 2 * w64 + w96 + w32, 3 * w64 + w96
        factored = 4 * w192
        reduced = w384 + w96 + square_b
        final = w320 + w192 + factored
        wide = w320 + 4 * w384 + w192
        features = nn.Sequential(
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
        super().__init__(features, wide, classes)


@register("inception-v3-tiny", paper=_INCEPTION, size="laptop", batch=4, image=107, share=0.125, classes=10)
@register("inception-v3", paper=_INCEPTION, size="paper", batch=64)
def _inception_v3(batch: int, image: int = 299, share: float = 1.0, classes: int = 1000) -> Recipe:
    """Inception-v3 (no auxiliary head)."""
    require_at_least(75, "the last reduction would leave no pixel", image=image)
    return Inception(share, classes), (images(batch, 3, image), tokens(classes, batch)), {}


_UNET = "Ronneberger et al., U-Net, MICCAI 2015"
_DEEPLAB = "Chen et al., Rethinking Atrous Convolution for Semantic Image Segmentation, 2017"


def _double(channels: int, out: int) -> nn.Sequential:
    return nn.Sequential(ConvNorm(channels, out, 3), nn.ReLU(), ConvNorm(out, out, 3), nn.ReLU())


class UNet(nn.Module):
    """A U-Net, which halves the resolution ``depth`` times and doubles it as often; the features of each
    resolution on the way down are concatenated on the way up.

    Convolutions are padded (the paper's are not), so that sizes match without cropping.
    """

    def __init__(self, width: int, depth: int, classes: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        self.encode = nn.ModuleList(_double(a, b) for a, b in zip([3, *widths[:-1]], widths, strict=True))
        self.grow = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, 2) for w in reversed(widths[:-1]))
        self.decode = nn.ModuleList(_double(2 * w, w) for w in reversed(widths[:-1]))
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        kept = []
        for level, block in enumerate(self.encode):
            x = block(F.max_pool2d(x, 2) if level else x)
            kept.append(x)
        kept.pop()
        for grow, block in zip(self.grow, self.decode, strict=True):
            x = block(torch.cat([kept.pop(), grow(x)], dim=1))
        return F.cross_entropy(self.head(x), labels)


@register("unet-tiny", paper=_UNET, size="laptop", batch=4, image=32, width=8, depth=2)
@register("unet", paper=_UNET, size="paper", batch=16)
def _unet(batch: int, image: int = 512, width: int = 64, depth: int = 4, classes: int = 2) -> Recipe:
    """U-Net with padded convolutions and batch norm."""
    require_multiple(2**depth, f"{depth} levels halve it and double it again", image=image)
    return UNet(width, depth, classes), (images(batch, 3, image), tokens(classes, batch, image, image)), {}


class DeepLab(nn.Module):
    """A dilated ResNet, an atrous spatial pyramid, a classifier, and bilinear upsampling to the image."""

    def __init__(self, blocks: tuple[int, ...], stem: int, width: float, pyramid: int, classes: int) -> None:
        super().__init__()
        self.trunk = _trunk(blocks, stem, width, output_stride=16)
        channels = 4 * int(stem * width) * 2 ** (len(blocks) - 1)
        dilated = (ConvNorm(channels, pyramid, 3, dilation=d) for d in (6, 12, 18))
        self.pyramid = nn.ModuleList([ConvNorm(channels, pyramid, 1), *dilated])
        self.pooled = ConvNorm(channels, pyramid, 1)
        self.mix = ConvNorm(5 * pyramid, pyramid, 1)
        self.refine = ConvNorm(pyramid, pyramid, 3)
        self.head = nn.Conv2d(pyramid, classes, 1)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        image = x.shape[-2:]
        x = self.trunk(x)
        whole = F.relu(self.pooled(x.mean((2, 3), keepdim=True))).expand(-1, -1, *x.shape[-2:])
        branches = [F.relu(branch(x)) for branch in self.pyramid]
        x = F.relu(self.refine(F.relu(self.mix(torch.cat([*branches, whole], dim=1)))))
        scores = F.interpolate(self.head(x), size=image, mode="bilinear", align_corners=False)
        return F.cross_entropy(scores, labels)


@register(
    "deeplab-v3-tiny", paper=_DEEPLAB, size="laptop", batch=4,
    depth=26, image=64, stem=8, pyramid=16, classes=5,
)  # fmt: skip
@register("deeplab-v3", paper=_DEEPLAB, size="paper", batch=16)
def _deeplab_v3(
    batch: int,
    depth: int = 101,
    image: int = 512,
    stem: int = 64,
    width: float = 1.0,
    pyramid: int = 256,
    classes: int = 21,
) -> Recipe:
    """DeepLab-V3 on a dilated ResNet (output stride 16) of ``depth`` layers.

    ``width`` multiplies every number of channels of the ResNet after its stem, as in a wide ResNet.
    ``pyramid`` is the number of channels of each branch of the pyramid.
    """
    require_one_of(_DEPTHS, depth=depth)
    model = DeepLab(_DEPTHS[depth], stem, width, pyramid, classes)
    return model, (images(batch, 3, image), tokens(classes, batch, image, image)), {}


_LENET = "LeCun et al., Gradient-Based Learning Applied to Document Recognition, 1998"
_ALEXNET = "Krizhevsky, One Weird Trick for Parallelizing Convolutional Neural Networks, 2014"
_VGG = "Simonyan and Zisserman, Very Deep Convolutional Networks, ICLR 2015 (table 1)"


class Chain(nn.Module):
    """A classifier: the layers ``features``, flattening, the layers ``classifier``, and cross entropy."""

    def __init__(self, features: nn.Module, classifier: nn.Module) -> None:
        super().__init__()
        self.features = features
        self.classifier = classifier

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.classifier(self.features(x).flatten(1)), labels)


def _dense_head(features: int, hidden: int, classes: int, dropout: float) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(features, hidden), nn.ReLU(), nn.Dropout(dropout),
        nn.Linear(hidden, hidden), nn.ReLU(), nn.Dropout(dropout),
        nn.Linear(hidden, classes),
    )  # fmt: skip


@register("lenet", paper=_LENET, size="laptop", batch=32)
def _lenet(batch: int, classes: int = 10) -> Recipe:
    """LeNet-5 on 32x32 grey images."""
    features = nn.Sequential(
        nn.Conv2d(1, 6, 5), nn.Tanh(), nn.AvgPool2d(2),
        nn.Conv2d(6, 16, 5), nn.Tanh(), nn.AvgPool2d(2),
    )  # fmt: skip
    classifier = nn.Sequential(
        nn.Linear(16 * 5 * 5, 120), nn.Tanh(), nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, classes)
    )
    return Chain(features, classifier), (images(batch, 1, 32), tokens(classes, batch)), {}


@register("alexnet", paper=_ALEXNET, size="paper", batch=256)
def _alexnet(batch: int, classes: int = 1000, dropout: float = 0.0) -> Recipe:
    """AlexNet (one tower) on 224x224 images."""
    features = nn.Sequential(
        nn.Conv2d(3, 64, 11, stride=4, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2),
        nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2),
        nn.Conv2d(192, 384, 3, padding=1), nn.ReLU(),
        nn.Conv2d(384, 256, 3, padding=1), nn.ReLU(),
        nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2),
    )  # fmt: skip
    classifier = _dense_head(256 * 6 * 6, 4096, classes, dropout)
    return Chain(features, classifier), (images(batch, 3, 224), tokens(classes, batch)), {}


_VGG_STAGES = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}


@register(
    "vgg11-tiny", paper=_VGG, size="laptop", batch=16, depth=11, image=32, width=16, hidden=128, classes=10
)
@register("vgg16", paper=_VGG, size="paper", batch=256)
@register("vgg19", paper=_VGG, size="paper", batch=256, depth=19)
def _vgg(
    batch: int,
    depth: int = 16,
    image: int = 224,
    width: int = 64,
    hidden: int = 4096,
    classes: int = 1000,
    dropout: float = 0.0,
) -> Recipe:
    """VGG: five stages of 3x3 convolutions, three dense layers.

    The first stage has ``width`` channels (64 in the paper); each stage doubles them, up to ``8 * width``.
    """
    require_one_of(_VGG_STAGES, depth=depth)
    require_at_least(32, "five stages halve it", image=image)
    layers: list[nn.Module] = []
    channels = 3
    for stage, repeats in enumerate(_VGG_STAGES[depth]):
        out = width * min(2**stage, 8)
        for _ in range(repeats):
            layers += [nn.Conv2d(channels, out, 3, padding=1), nn.ReLU()]
            channels = out
        layers.append(nn.MaxPool2d(2))
    classifier = _dense_head(channels * (image // 32) ** 2, hidden, classes, dropout)
    return Chain(nn.Sequential(*layers), classifier), (images(batch, 3, image), tokens(classes, batch)), {}
