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
