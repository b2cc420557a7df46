"""Models whose branches can run beside each other, which is what plans that place operators gain from."""

import torch
from torch import nn


def conv(inputs: int, outputs: int, size: int = 3, stride: int = 1) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inputs, outputs, size, stride, padding=size // 2), nn.ReLU())


class TwoTowers(nn.Module):
    """Pictures and texts in one space: two towers of unlike layers that meet in a contrastive loss."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.pictures = nn.Sequential(conv(3, width), conv(width, width, 3, 2), conv(width, width, 3, 2))
        self.words = nn.Embedding(500, width)
        layer = nn.TransformerEncoderLayer(width, 2, 4 * width, dropout=0.0, batch_first=True)
        self.texts = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, pictures, texts):
        a = nn.functional.normalize(self.pictures(pictures).mean((2, 3)), dim=-1)
        b = nn.functional.normalize(self.texts(self.words(texts)).mean(1), dim=-1)
        scores = self.scale.exp() * a @ b.T
        of = torch.arange(len(pictures), device=pictures.device)
        cross = nn.functional.cross_entropy
        return (cross(scores, of) + cross(scores.T, of)) / 2


def build_two_towers():
    """A frontier; on two devices a tower each may be what is fastest."""
    return TwoTowers(), (torch.randn(8, 3, 16, 16), torch.randint(0, 500, (8, 12)))


class Cell(nn.Module):
    """Four branches of unlike length and size, joined along the channels."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.one = conv(inputs, width, 1)
        self.three = nn.Sequential(conv(inputs, width, 1), conv(width, width))
        self.five = nn.Sequential(conv(inputs, width, 1), conv(width, width, 5))
        self.pooled = nn.Sequential(nn.AvgPool2d(3, 1, 1), conv(inputs, width, 1))

    def forward(self, x):
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pooled(x)], 1)


class Cells(nn.Module):
    def __init__(self, width: int = 16, count: int = 3) -> None:
        super().__init__()
        self.cells = nn.Sequential(*(Cell(3 if i == 0 else 4 * width, width) for i in range(count)))
        self.norm = nn.BatchNorm2d(4 * width)
        self.head = nn.Linear(4 * width, 10)

    def forward(self, images, labels):
        return nn.functional.cross_entropy(self.head(self.norm(self.cells(images)).mean((2, 3))), labels)


def build_cells():
    """A frontier; its batch norm runs in one micro-batch alone."""
    return Cells(), (torch.randn(4, 3, 32, 32), torch.randint(0, 10, (4,)))


class Mixture(nn.Module):
    """Every image through all experts, convolutions of several sizes, weighted by a small gate."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.stem = conv(3, width)
        self.gate = nn.Linear(width, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(conv(width, 2 * width, size), conv(2 * width, width, size)) for size in (1, 3, 5, 7)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, images, labels):
        x = self.stem(images)
        weights = self.gate(x.mean((2, 3))).softmax(-1)
        mixed = sum(weights[:, i, None, None, None] * expert(x) for i, expert in enumerate(self.experts))
        return nn.functional.cross_entropy(self.head(mixed.mean((2, 3))), labels)


def build_mixture():
    """A frontier; the experts weigh unlike much."""
    return Mixture(), (torch.randn(4, 3, 24, 24), torch.randint(0, 10, (4,)))


class Siamese(nn.Module):
    """Two images through one body, and a head that holds nearly all weights."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.body = nn.Sequential(conv(3, width), conv(width, width, 3, 2), conv(width, width, 3, 2))
        self.head = nn.Sequential(nn.Linear(2 * width * 16, 2048), nn.ReLU(), nn.Linear(2048, 2))

    def forward(self, left, right, same):
        both = torch.cat([self.body(left).flatten(1), self.body(right).flatten(1)], 1)
        return nn.functional.cross_entropy(self.head(both), same)


def build_siamese():
    """A frontier; the weights of the body are read twice."""
    images = torch.randn(2, 4, 3, 16, 16)
    return Siamese(), (images[0], images[1], torch.randint(0, 2, (4,)))


class UNet(nn.Module):
    """Down and up again, each level joined with the one that it came from."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.second = conv(3, width), conv(width, 2 * width)
        self.bottom = conv(2 * width, 4 * width)
        self.up = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2)
        self.third = conv(4 * width, 2 * width)
        self.last = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.fourth = conv(2 * width, width)
        self.head = nn.Conv2d(width, 4, 1)

    def forward(self, images, classes):
        pool = nn.functional.max_pool2d
        a = self.first(images)
        b = self.second(pool(a, 2))
        x = self.third(torch.cat([b, self.up(self.bottom(pool(b, 2)))], 1))
        x = self.fourth(torch.cat([a, self.last(x)], 1))
        return nn.functional.cross_entropy(self.head(x), classes)


def build_unet():
    """A frontier; what is joined lives from the way down to the way up."""
    return UNet(), (torch.randn(2, 3, 32, 32), torch.randint(0, 4, (2, 32, 32)))
