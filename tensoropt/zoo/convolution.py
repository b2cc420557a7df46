"""Plain convolutional chains: LeNet, AlexNet, VGG.

Each takes ``x (batch, channels, size, size)`` and ``labels (batch,)`` and returns the mean cross
entropy. Written without adaptive pooling: the classifier's input is sized for the given image.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from tensoropt.zoo.inputs import images, tokens
from tensoropt.zoo.registry import Recipe, register

_LENET = "LeCun et al., Gradient-Based Learning Applied to Document Recognition, 1998"
_ALEXNET = "Krizhevsky, One Weird Trick for Parallelizing Convolutional Neural Networks, 2014"
_VGG = "Simonyan and Zisserman, Very Deep Convolutional Networks, ICLR 2015 (table 1)"


class Chain(nn.Module):
    """Features, flatten, classifier, cross entropy."""

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
def lenet(batch: int, classes: int = 10) -> Recipe:
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
def alexnet(batch: int, classes: int = 1000, dropout: float = 0.0) -> Recipe:
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
    "vgg11-tiny", paper=_VGG, size="laptop", batch=16,
    depth=11, image=32, width=16, hidden=128, classes=10,
)  # fmt: skip
@register("vgg16", paper=_VGG, size="paper", batch=256)
@register("vgg19", paper=_VGG, size="paper", batch=256, depth=19)
def vgg(
    batch: int,
    depth: int = 16,
    image: int = 224,
    width: int = 64,
    hidden: int = 4096,
    classes: int = 1000,
    dropout: float = 0.0,
) -> Recipe:
    """VGG: five stages of 3x3 convolutions, three dense layers.

    ``width`` is the first stage's channels (64 in the paper); it doubles up to 8 times ``width``.
    """
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
