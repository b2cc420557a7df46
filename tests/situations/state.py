"""Small models whose forward changes something that outlives the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from tests.models import situation

Recipe = tuple[nn.Module, tuple[Any, ...]]


class Steps(nn.Module):
    """A counter of steps scales the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 4)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        loss = functional.cross_entropy(self.last(torch.relu(self.first(x))), y)
        return loss * torch.clamp(self.steps / 10, max=1.0)


class RunningScale(nn.Module):
    """A late layer keeps a decayed mean of its results, which an early one divides by in the next step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.last = nn.Linear(16, 4)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x / self.scale
        for layer in self.layers:
            x = torch.tanh(layer(x))
        logits = self.last(x)
        with torch.no_grad():
            self.scale.mul_(0.9).add_(0.1 * logits.abs().mean())
        return functional.cross_entropy(logits, y)


class Decaying(nn.Module):
    """A mask in a buffer decays from step to step, whatever the batch is, and is read by two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.register_buffer("mask", torch.ones(16))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x)) * self.mask
        self.mask = self.mask * 0.9 + 0.01
        x = torch.relu(self.second(x)) * self.mask
        return functional.cross_entropy(self.last(x), y)


class Teacher(nn.Module):
    """The weights of a teacher are buffers that follow the student's (EMA)."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.student, self.last = nn.Linear(16, width), nn.Linear(width, 16)
        self.register_buffer("weight", self.student.weight.detach().clone())
        self.register_buffer("bias", self.student.bias.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.lerp_(self.student.weight, 0.01)
            self.bias.lerp_(self.student.bias, 0.01)
            target = functional.linear(x, self.weight, self.bias)
        seen = self.student(x)
        return functional.mse_loss(seen, target) + self.last(torch.relu(seen)).square().mean()


class Codebook(nn.Module):
    """A codebook that follows what was assigned to it (VQ-VAE with EMA), with sums and counts in buffers."""

    def __init__(self, codes: int = 32, width: int = 16) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(16, width), nn.Linear(width, 16)
        book = torch.randn(codes, width)
        self.register_buffer("book", book)
        self.register_buffer("sums", book.clone())
        self.register_buffer("sizes", torch.ones(codes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.encoder(x)
        flat, book = z.detach(), self.book.clone()
        far = flat.square().sum(1, keepdim=True) - 2 * flat @ book.t() + book.square().sum(1)
        hot = functional.one_hot(torch.argmin(far, 1), book.shape[0]).to(z.dtype)
        quantised = hot @ book
        with torch.no_grad():
            self.sizes.mul_(0.9).add_(0.1 * hot.sum(0))
            self.sums.mul_(0.9).add_(0.1 * hot.t() @ flat)
            self.book.copy_(self.sums / self.sizes.clamp(min=1e-3).unsqueeze(1))
        passed = z + (quantised - z).detach()
        return functional.mse_loss(self.decoder(passed), x) + 0.25 * functional.mse_loss(z, quantised)


class Queue(nn.Module):
    """A queue of keys, of which a pointer in a buffer says where the next ones go (MoCo)."""

    def __init__(self, keys: int = 256, width: int = 32) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(16, width), nn.Linear(16, width)
        self.key.requires_grad_(False)
        self.register_buffer("queue", functional.normalize(torch.randn(keys, width), dim=1))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        query = functional.normalize(self.query(x), dim=1)
        with torch.no_grad():
            key = functional.normalize(self.key(seen), dim=1)
        alike = (query * key).sum(1, keepdim=True)
        other = query @ self.queue.clone().t()
        loss = functional.cross_entropy(torch.cat([alike, other], 1) / 0.1, x.new_zeros(len(x)).long())
        with torch.no_grad():
            rows = (self.place + torch.arange(len(x), device=x.device)) % len(self.queue)
            self.queue[rows] = key
            self.place.copy_((self.place + len(x)) % len(self.queue))
        return loss


class Shifted(nn.Module):
    """One buffer takes the last value of another, which takes the batch's mean."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 4)
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("before", torch.zeros(16))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x - 0.5 * (self.mean + self.before)
        self.before.copy_(self.mean)
        self.mean = x.detach().mean(0)
        return functional.cross_entropy(self.last(torch.relu(self.first(x))), y)


class Normed(nn.Module):
    """Convolutions with one norm each."""

    def __init__(self, *norms: nn.Module) -> None:
        super().__init__()
        self.norms = nn.ModuleList(norms)
        channels = [3, *[8] * (len(norms) - 1)]
        self.convolutions = nn.ModuleList(nn.Conv2d(n, 8, 3, padding=1) for n in channels)
        self.last = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = torch.relu(norm(convolution(x)))
        return functional.cross_entropy(self.last(x.mean((2, 3))), y)


class Critic(nn.Module):
    """A discriminator with spectral norms."""

    def __init__(self, norm: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.first, self.last = norm(nn.Conv2d(3, 8, 3, padding=1)), norm(nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.softplus(-self.last(torch.relu(self.first(x)).mean((2, 3)))).mean()


class Renormed(nn.Module):
    """An embedding that renormalises its table in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(16, 16, max_norm=1.0), nn.Linear(16, 4)

    def forward(self, rows: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.last(torch.tanh(self.table(rows)).mean(1)), y)


class Changed(nn.Module):
    """A model whose forward changes something by its method ``change``, and reads it."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(16, 16), nn.Linear(16, 4)
        self.frozen = nn.Parameter(torch.ones(16), requires_grad=False)
        self.register_buffer("kept", torch.ones(16))
        self.plain, self.count, self.found = torch.ones(16), 1, list[torch.Tensor]()
        self.change = change

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.layer(x))
        getattr(self, self.change)(x.detach())
        x = x * self.frozen * self.kept * self.plain * self.count
        return functional.cross_entropy(self.last(x), y)

    def clip_weight(self, x: torch.Tensor) -> None:
        with torch.no_grad():
            self.layer.weight.clamp_(-0.1, 0.1)

    def scale_data(self, x: torch.Tensor) -> None:
        self.layer.weight.data.mul_(0.99)

    def follow(self, x: torch.Tensor) -> None:
        with torch.no_grad():
            self.frozen.lerp_(x.mean(0), 0.1)

    def replace_bias(self, x: torch.Tensor) -> None:
        self.layer.bias = nn.Parameter(self.layer.bias * 0.5)

    def exchange_plain(self, x: torch.Tensor) -> None:
        self.plain = self.plain * 0.9

    def change_plain(self, x: torch.Tensor) -> None:
        self.plain.mul_(0.9)

    def make_buffer(self, x: torch.Tensor) -> None:
        if not hasattr(self, "late"):
            self.register_buffer("late", torch.ones(16))
        self.late.add_(1.0)

    def set_data(self, x: torch.Tensor) -> None:
        self.kept.data = 0.9 * self.kept + 0.1 * x.mean(0)

    def count_up(self, x: torch.Tensor) -> None:
        self.count += 1

    def collect(self, x: torch.Tensor) -> None:
        self.found.append(x.mean())


def _seeded(
    make: Callable[[], nn.Module], *shapes: tuple[int, ...], classes: int = 4, refused: str | None = None
):
    """A build function of inputs of these shapes, with a class for each sample unless there are none."""

    def inputs() -> tuple[torch.Tensor, ...]:
        labels = [torch.randint(0, classes, shapes[0][:1])] if classes else []
        return (*(torch.randn(shape) for shape in shapes), *labels)

    return situation(make, inputs, refused)


# Runs in one micro-batch, as a loss that is multiplied is no sum over micro-batches any more.
build_step_counter = _seeded(Steps, (8, 16))
# Runs, also in micro-batches and in pipelines, whose stages both read the mask.
build_decay = _seeded(Decaying, (8, 16))
# Runs in one micro-batch; stages that read the scale are sent it.
build_running_scale = _seeded(RunningScale, (8, 16))
# Runs, also in micro-batches: the teacher follows weights, not the batch.
build_teacher = _seeded(Teacher, (8, 16), classes=0)
# Runs in one micro-batch: the codes follow the batch.
build_codebook = _seeded(Codebook, (16, 16), classes=0)
# Runs in one micro-batch.
build_queue = _seeded(Queue, (16, 16), (16, 16), classes=0)
# Runs in one micro-batch; a buffer that takes another one's value has memory of its own.
build_shifted = _seeded(Shifted, (8, 16))


def instance_norms() -> nn.Module:
    """Three alike norms, of which the second one keeps no statistics."""
    kept = (True, False, True)
    return Normed(*(nn.InstanceNorm2d(8, affine=True, track_running_stats=one) for one in kept))


# Runs in one micro-batch: the first and the last norm have running statistics.
build_instance_norms = _seeded(instance_norms, (4, 3, 6, 6))


# Runs, also in micro-batches: no state at all.
build_group_norms = _seeded(lambda: Normed(nn.GroupNorm(2, 8), nn.GroupNorm(4, 8)), (4, 3, 6, 6))
# Run, also in micro-batches: one power iteration a step.
build_spectral = _seeded(lambda: Critic(parametrizations.spectral_norm), (8, 3, 6, 6), classes=0)
build_spectral_hooks = _seeded(lambda: Critic(nn.utils.spectral_norm), (8, 3, 6, 6), classes=0)


def _changed(change: str, refused: Any = None) -> Any:
    return _seeded(lambda: Changed(change), (8, 16), refused=refused)


# Runs in one micro-batch: the buffer is set through its data.
build_set_data = _changed("set_data")
# Run, with a note: every step begins with what the number and the list were.
build_python_counter, build_list = _changed("count_up"), _changed("collect")
# Refused: what forward changes is no buffer that was there before.
build_clipped_weight = _changed("clip_weight", r"changes its parameter layer\.weight in forward")
build_scaled_data = _changed("scale_data", r"changes its parameter layer\.weight in forward")
build_followed_parameter = _changed("follow", r"changes its parameter frozen in forward")
build_replaced_parameter = _changed("replace_bias", r"state\.py:\d+ .*makes a parameter in forward")
build_exchanged_tensor = _changed("exchange_plain", r"changes its tensor plain in forward")
build_changed_tensor = _changed("change_plain", r"changes its tensor plain in forward")
build_late_buffer = _changed("make_buffer", r"makes its buffer late in forward")
# Refused: the embedding renormalises its table.
build_max_norm = situation(
    Renormed,
    lambda: (torch.randint(0, 16, (8, 5)), torch.randint(0, 4, (8,))),
    r"changes its parameter table\.weight in forward.*max_norm",
)
