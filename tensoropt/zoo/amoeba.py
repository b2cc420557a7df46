"""AmoebaNet-D, the evolved network of the pipeline papers.

``x (batch, 3, size, size)``, ``labels (batch,)`` to the mean cross entropy. The evolution paper's
figure and its released TensorFlow code disagree about which states a normal cell concatenates; the
code's choice is used, because GPipe's parameter counts are said to come out only with it (comment in
torchgpipe's benchmark).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensoropt.zoo.inputs import images, tokens
from tensoropt.zoo.registry import Recipe, register
from tensoropt.zoo.residual import ConvNorm

_AMOEBA = (
    "Real et al., Regularized Evolution, AAAI 2019; sizes (layers, filters) of Huang et al. (GPipe), 2019"
)

# A cell adds pairs: state n+2 is the sum of the two operations at 2n and 2n+1, each on an earlier state.
_NORMAL = (
    (1, "conv1"), (1, "max3"), (1, "same"), (0, "conv7"), (0, "conv1"),
    (0, "conv7"), (2, "max3"), (2, "same"), (1, "average"), (5, "conv1"),
)  # fmt: skip
_REDUCTION = (
    (0, "max2"), (0, "max3"), (2, "same"), (1, "conv3"), (2, "conv7"),
    (2, "max3"), (3, "same"), (1, "max2"), (2, "average"), (3, "conv1"),
)  # fmt: skip
_NORMAL_OUT = (0, 3, 4, 6)
_REDUCTION_OUT = (4, 5, 6)


class Active(nn.Module):
    """ReLU, convolution without bias, batch norm."""

    def __init__(
        self, channels: int, out: int, kernel: tuple[int, int] = (1, 1), stride: tuple[int, int] = (1, 1)
    ) -> None:
        super().__init__()
        padding = (kernel[0] // 2, kernel[1] // 2)
        self.convolution = nn.Conv2d(channels, out, kernel, stride, padding, bias=False)
        self.norm = nn.BatchNorm2d(out)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.convolution(F.relu(x)))


class Halve(nn.Module):
    """Half the resolution by two 1x1 convolutions on the even and the odd pixels."""

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
            return nn.Identity() if stride == 1 else Halve(c, c)
        case "average":
            return nn.AvgPool2d(3, stride, 1, count_include_pad=False)
        case "max3":
            return nn.MaxPool2d(3, stride, 1)
        case "max2":
            return nn.MaxPool2d(2, stride)
        case "conv1":
            return Active(c, c, stride=(stride, stride))
        case "conv3":
            return nn.Sequential(
                Active(c, narrow), Active(narrow, narrow, (3, 3), (stride, stride)), Active(narrow, c)
            )
        case _:
            return nn.Sequential(
                Active(c, narrow),
                Active(narrow, narrow, (1, 7), (1, stride)),
                Active(narrow, narrow, (7, 1), (stride, 1)),
                Active(narrow, c),
            )


class AmoebaCell(nn.Module):
    """``(previous, before)`` to the new output; ``before`` is the output of the cell before the previous."""

    def __init__(self, before: int, previous: int, channels: int, halves: bool, halved: bool) -> None:
        super().__init__()
        self.genes = _REDUCTION if halves else _NORMAL
        self.out = _REDUCTION_OUT if halves else _NORMAL_OUT
        self.first = Active(previous, channels)
        if halved:
            self.second: nn.Module = Halve(before, channels)
        else:
            self.second = nn.Identity() if before == channels else Active(before, channels)
        self.operations = nn.ModuleList(
            _operation(kind, channels, 2 if halves and state < 2 else 1) for state, kind in self.genes
        )

    def forward(self, previous: Tensor, before: Tensor) -> Tensor:
        states = [self.first(previous), self.second(before)]
        results = ((op, state) for op, (state, _) in zip(self.operations, self.genes, strict=True))
        for (one, a), (two, b) in zip(results, results, strict=True):
            states.append(one(states[a]) + two(states[b]))
        return torch.cat([states[index] for index in self.out], dim=1)


class AmoebaNet(nn.Module):
    """Stem, two reductions, three runs of ``layers / 3`` normal cells with reductions between."""

    def __init__(self, layers: int, filters: int, classes: int) -> None:
        super().__init__()
        channels = filters // 4
        self.stem = ConvNorm(3, channels, 3, 2)
        run = [False] * (layers // 3)
        before = previous = channels
        halved = False
        self.cells = nn.ModuleList()
        for halves in [True, True, *run, True, *run, True, *run]:
            channels = 2 * channels if halves else channels
            cell = AmoebaCell(before, previous, channels, halves, halved)
            before, previous, halved = previous, channels * len(cell.out), halves
            self.cells.append(cell)
        self.classifier = nn.Linear(previous, classes)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        before = x = self.stem(F.relu(x))
        for cell in self.cells:
            x, before = cell(x, before), x
        return F.cross_entropy(self.classifier(x.mean((2, 3))), labels)


@register(
    "amoebanet-d-tiny", paper=_AMOEBA, size="laptop", batch=4, layers=3, filters=32, image=64, classes=10
)
@register("amoebanet-d", paper=_AMOEBA, size="paper", batch=128)
def amoebanet_d(
    batch: int, layers: int = 18, filters: int = 256, image: int = 224, classes: int = 1000
) -> Recipe:
    """AmoebaNet-D, an image classifier found by evolution."""
    return AmoebaNet(layers, filters, classes), (images(batch, 3, image), tokens(classes, batch)), {}
