"""Networks that label every pixel: U-Net and DeepLab-V3.

``x (batch, 3, size, size)``, ``labels (batch, size, size)`` to the mean cross entropy over pixels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensoropt.zoo.inputs import images, tokens
from tensoropt.zoo.registry import Recipe, register
from tensoropt.zoo.residual import DEPTHS, ConvNorm, trunk

_UNET = "Ronneberger et al., U-Net, MICCAI 2015"
_DEEPLAB = "Chen et al., Rethinking Atrous Convolution for Semantic Image Segmentation, 2017"


def _double(channels: int, out: int) -> nn.Sequential:
    return nn.Sequential(ConvNorm(channels, out, 3), nn.ReLU(), ConvNorm(out, out, 3), nn.ReLU())


class UNet(nn.Module):
    """``depth`` halvings and back; each level's features are concatenated on the way up.

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
def unet(batch: int, image: int = 512, width: int = 64, depth: int = 4, classes: int = 2) -> Recipe:
    """U-Net with padded convolutions and batch norm."""
    return UNet(width, depth, classes), (images(batch, 3, image), tokens(classes, batch, image, image)), {}


class DeepLab(nn.Module):
    """Dilated residual trunk, atrous spatial pyramid, classifier, bilinear upsampling to the image."""

    def __init__(self, blocks: tuple[int, ...], stem: int, width: int, classes: int) -> None:
        super().__init__()
        self.trunk = trunk(blocks, stem, 1, output_stride=16)
        channels = 4 * stem * 2 ** (len(blocks) - 1)
        self.pyramid = nn.ModuleList(
            [ConvNorm(channels, width, 1), *(ConvNorm(channels, width, 3, dilation=d) for d in (6, 12, 18))]
        )
        self.pooled = ConvNorm(channels, width, 1)
        self.mix = ConvNorm(5 * width, width, 1)
        self.refine = ConvNorm(width, width, 3)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        image = x.shape[-2:]
        x = self.trunk(x)
        whole = F.relu(self.pooled(x.mean((2, 3), keepdim=True))).expand(-1, -1, *x.shape[-2:])
        branches = [F.relu(branch(x)) for branch in self.pyramid]
        x = F.relu(self.refine(F.relu(self.mix(torch.cat([*branches, whole], dim=1)))))
        scores = F.interpolate(self.head(x), size=image, mode="bilinear", align_corners=False)
        return F.cross_entropy(scores, labels)


@register(
    "deeplab-v3-tiny", paper=_DEEPLAB, size="laptop", batch=4, depth=26, image=64, stem=8, width=16, classes=5
)
@register("deeplab-v3", paper=_DEEPLAB, size="paper", batch=16)
def deeplab_v3(
    batch: int, depth: int = 101, image: int = 512, stem: int = 64, width: int = 256, classes: int = 21
) -> Recipe:
    """DeepLab-V3 on a dilated ResNet (output stride 16)."""
    model = DeepLab(DEPTHS[depth], stem, width, classes)
    return model, (images(batch, 3, image), tokens(classes, batch, image, image)), {}
