"""Parameters with several readers, and parts without gradient: each model is explored, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.models import Call, situation

Built = tuple[nn.Module, tuple[Any, ...]]
WIDTH = 16


class Siamese(nn.Module):
    """One encoder of alike layers for two inputs.

    Args:
        apart: what becomes of the second branch: ``trained``, ``no_grad`` or ``detach``.
    """

    def __init__(self, layers: int, apart: str = "trained") -> None:
        super().__init__()
        self.apart = apart
        self.encoder = nn.Sequential(
            *(module for _ in range(layers) for module in (nn.Linear(WIDTH, WIDTH), nn.Tanh()))
        )
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        p = self.head(self.encoder(x))
        with torch.set_grad_enabled(self.apart != "no_grad"):
            t = self.encoder(z)
        if self.apart == "detach":
            t = t.detach()
        return -F.cosine_similarity(p, t, dim=-1).mean()


def _built(make: Callable[[], nn.Module], *shapes: tuple[int, ...]) -> Any:
    """A build function of inputs of these shapes."""
    return situation(make, lambda: tuple(torch.randn(shape) for shape in shapes or [(8, WIDTH)]))


def siamese(layers: int, apart: str = "trained") -> Built:
    """A siamese net, ready to be captured."""
    return _built(lambda: Siamese(layers, apart), (8, WIDTH), (8, WIDTH))()


# Frontiers: what both branches read is trained by both, is detached in the second, or has no gradient there.
build_siamese_three = _built(lambda: Siamese(3), (8, WIDTH), (8, WIDTH))
build_siamese_six = _built(lambda: Siamese(6, "detach"), (8, WIDTH), (8, WIDTH))
build_target_without_gradient = _built(lambda: Siamese(4, "no_grad"), (8, WIDTH), (8, WIDTH))


class Twice(nn.Module):
    """Blocks that read their weight twice, with a stem and a head."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(blocks))
        self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.stem(x)
        for block in self.blocks:
            h = torch.tanh(block(torch.tanh(block(h)))) + h
        return self.head(h).square().mean()


# A frontier: each of six blocks reads its own weight twice, one behind the other.
build_weight_read_twice_in_each_block = _built(lambda: Twice(6))


def layers(count: int) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))


def _momentum(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Two chains of layers of their own, the second one without gradient though its parameters ask for it."""
    a = b = x
    for layer in m.online:
        a = torch.tanh(layer(a))
    with torch.no_grad():
        for layer in m.target:
            b = torch.tanh(layer(b))
    return (m.head(a) - b).square().mean()


# A frontier, and pipelines that run: cuts go through the branch without gradient as well.
build_momentum_target = _built(
    lambda: Call(_momentum, online=layers(3), target=layers(3), head=nn.Linear(WIDTH, WIDTH))
)


def _detached_later(m: Any, x: torch.Tensor) -> torch.Tensor:
    """What one layer makes is read with a gradient nearby and, layers later, without one."""
    first, *rest = m.layers
    kept = torch.tanh(first(x))
    h = kept
    for layer in rest:
        h = torch.tanh(layer(h))
    with torch.no_grad():
        aim = torch.softmax(kept * 2.0, -1)
        strong = kept > 0
    return ((h - aim) * strong).square().mean() + (h * kept.detach()).mean()


# A frontier, and pipelines that run: an activation is read without gradient in a later stage alone.
build_detached_later = _built(lambda: Call(_detached_later, layers=layers(5)))


def _integers(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Numbers, masks and a frozen part that cross from where they are made to the end."""
    h = torch.tanh(m.layers[0](x))
    best, sure = h.argmax(-1), h > 0.1
    steady = torch.tanh(m.frozen(x))
    for layer in m.layers[1:]:
        h = torch.tanh(layer(h))
    logits = h.masked_fill(sure, 0.0) + steady
    return F.nll_loss(logits.log_softmax(-1), best, reduction="sum") / len(best)


def _pseudo_labels(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Targets that the model itself found, of a mean."""
    h = torch.tanh(m.layers[0](x))
    return F.cross_entropy(m.layers[1](h), h.argmax(-1))


# A frontier, and pipelines that run: integers, masks and activations without gradient cross.
build_integers_and_masks_that_cross = _built(
    lambda: Call(_integers, frozen=nn.Linear(WIDTH, WIDTH).requires_grad_(False), layers=layers(4))
)


# A frontier without micro-batches, as a mean's targets are counted before the step.
build_targets_made_of_parameters = _built(lambda: Call(_pseudo_labels, layers=layers(2)))


class MadeOfParameters(nn.Module):
    """A chain of layers whose weights are made of parameters alone: bounded, split, merged, normed."""

    def __init__(self, how: str, layers: int = 4) -> None:
        super().__init__()
        self.how = how
        self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.weights = nn.ParameterList(
            torch.randn(*(2 * WIDTH if how == "split" else WIDTH, WIDTH)) / 4 for _ in range(layers)
        )
        self.low = nn.Parameter(torch.randn(2, WIDTH) / 4)
        self.high = nn.Parameter(torch.randn(WIDTH, 2) / 4)
        self.gain = nn.Parameter(torch.ones(WIDTH, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, weights = self.stem(x), list(self.weights)
        if self.how == "early":
            # All are made at the beginning and read one after the other.
            weights = [weight.tanh() for weight in weights]
        for weight in weights:
            if self.how == "split":
                left, right = weight.split(WIDTH)
                h = torch.tanh(h @ left) @ right
            elif self.how == "merged":
                h = F.linear(h, weight + self.high @ self.low)
            elif self.how == "normed":
                h = F.linear(h, self.gain * weight / weight.norm(dim=1, keepdim=True))
            elif self.how == "penalty":
                h = F.linear(h, weight)
            else:
                h = h @ weight
            h = torch.tanh(h)
        loss = self.head(h).square().mean()
        if self.how == "penalty":
            loss = loss + 0.1 * sum(weight.abs().mean() for weight in weights)
        return loss


def made_of_parameters(how: str) -> Built:
    """A chain of layers of made weights, ready to be captured."""
    return _built(lambda: MadeOfParameters(how))()


# Frontiers: bounded weights, all made before the first layer; both halves of each weight, one behind the
# other; one pair of low-rank weights, merged into each layer's; a gain that all layers share, and weights
# divided by their norms; a penalty on the weights as a part of the loss.
build_bounded_early = _built(lambda: MadeOfParameters("early"))
build_split_weights = _built(lambda: MadeOfParameters("split"))
build_merged_adapters = _built(lambda: MadeOfParameters("merged"))
build_normed_weights = _built(lambda: MadeOfParameters("normed"))
build_penalty_on_parameters = _built(lambda: MadeOfParameters("penalty"))


# A frontier: blocks without a stem or a head.
def _stack(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Nothing but alike blocks; the loss is part of the last one's result."""
    for block in m.blocks:
        x = torch.relu(block(x)) + x
    return x.square().mean()


build_bare_stack_of_six = _built(lambda: Call(_stack, blocks=layers(6)))


def _nested(m: Any, x: torch.Tensor) -> torch.Tensor:
    """A part without gradient, inside which one layer has a gradient again, of weights that are trained."""
    first, second, third = m.layers
    with torch.no_grad():
        a = torch.tanh(first(x))
        with torch.enable_grad():
            b = torch.tanh(second(a))
        c = torch.tanh(first(b))
    return (third(b) - c).square().mean()


# A frontier: gradients of the layer inside, and none of the weight that is read before and behind it.
build_gradient_inside_no_grad = _built(lambda: Call(_nested, layers=layers(3)))


def _cross_attention(m: Any, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """A fused weight whose parts are read by different products."""
    h, memory = m.stem(x), torch.tanh(m.stem(memory))
    for fused in m.fused:
        q_weight, kv_weight = fused.split([WIDTH, 2 * WIDTH])
        k, v = F.linear(memory, kv_weight).chunk(2, -1)
        h = h + F.scaled_dot_product_attention(F.linear(h, q_weight), k, v)
    return h.square().mean()


# A frontier: a fused projection of cross attention, a part of which reads another sequence.
build_fused_projections = _built(
    lambda: Call(
        _cross_attention,
        stem=nn.Linear(WIDTH, WIDTH),
        fused=nn.ParameterList(torch.randn(3 * WIDTH, WIDTH) / 4 for _ in range(2)),
    ),
    (4, 4, WIDTH),
    (4, 4, WIDTH),
)


class NormedTwice(nn.Module):
    """A siamese encoder with norms, whose statistics the first branch changes before the second does."""

    def __init__(self, norm: type[nn.Module], layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv1d(4, 4, 3, padding=1) for _ in range(layers))
        self.norms = nn.ModuleList(
            norm(4, affine=True, track_running_stats=True, momentum=0.3) for _ in range(layers)
        )

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = torch.relu(norm(layer(x)))
        return x.mean(-1)

    def forward(self, one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
        a, b = self.encode(one), self.encode(two)
        held = self.norms[0].running_mean
        return F.mse_loss(a, b.detach()) + F.mse_loss(b, a.detach()) + (a - held).abs().mean()


# Frontiers: each norm, of batches or of samples, is applied twice, and its statistics are read once more.
build_siamese_with_batch_norms = _built(lambda: NormedTwice(nn.BatchNorm1d), (8, 4, 6), (8, 4, 6))
build_siamese_with_instance_norms = _built(lambda: NormedTwice(nn.InstanceNorm1d), (8, 4, 6), (8, 4, 6))


def _waves(m: Any, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    for layer in m.layers:
        x = torch.sin(layer(x))
    return (x - z).square().mean()


def build_input_with_gradient() -> Built:
    """Layers without anything in front of them. The gradient of the input, which a script would have in
    ``x.grad``, is no part of a plan."""
    inputs = torch.randn(8, WIDTH, requires_grad=True), torch.randn(8, WIDTH)
    return Call(_waves, layers=layers(3)), inputs
