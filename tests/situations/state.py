"""Small models whose forward changes something that outlives the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from tests.models import Call, situation

Recipe = tuple[nn.Module, tuple[Any, ...]]


def linears(**sizes: tuple[int, int]) -> dict[str, nn.Module]:
    return {name: nn.Linear(*size) for name, size in sizes.items()}


def _counted(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    m.steps += 1
    loss = functional.cross_entropy(m.last(torch.relu(m.first(x))), y)
    return loss * torch.clamp(m.steps / 10, max=1.0)


def _running_scale(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A late layer keeps a decayed mean of its results, which an early one divides by in the next step."""
    x = x / m.scale
    for layer in m.layers:
        x = torch.tanh(layer(x))
    logits = m.last(x)
    with torch.no_grad():
        m.scale.mul_(0.9).add_(0.1 * logits.abs().mean())
    return functional.cross_entropy(logits, y)


def _decaying(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A mask in a buffer decays from step to step, whatever the batch is, and is read by two layers."""
    x = torch.relu(m.first(x)) * m.mask
    m.mask = m.mask * 0.9 + 0.01
    x = torch.relu(m.second(x)) * m.mask
    return functional.cross_entropy(m.last(x), y)


def _taught(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        m.weight.lerp_(m.student.weight, 0.01)
        m.bias.lerp_(m.student.bias, 0.01)
        target = functional.linear(x, m.weight, m.bias)
    seen = m.student(x)
    return functional.mse_loss(seen, target) + m.last(torch.relu(seen)).square().mean()


def teacher() -> nn.Module:
    """The weights of a teacher are buffers that follow the student's (EMA)."""
    student = nn.Linear(16, 64)
    copies = {name: value.detach().clone() for name, value in student.named_parameters()}
    return Call(_taught, student=student, last=nn.Linear(64, 16), **copies)


def _coded(m: Any, x: torch.Tensor) -> torch.Tensor:
    z = m.encoder(x)
    flat, book = z.detach(), m.book.clone()
    far = flat.square().sum(1, keepdim=True) - 2 * flat @ book.t() + book.square().sum(1)
    hot = functional.one_hot(torch.argmin(far, 1), book.shape[0]).to(z.dtype)
    quantised = hot @ book
    with torch.no_grad():
        m.sizes.mul_(0.9).add_(0.1 * hot.sum(0))
        m.sums.mul_(0.9).add_(0.1 * hot.t() @ flat)
        m.book.copy_(m.sums / m.sizes.clamp(min=1e-3).unsqueeze(1))
    passed = z + (quantised - z).detach()
    return functional.mse_loss(m.decoder(passed), x) + 0.25 * functional.mse_loss(z, quantised)


def codebook() -> nn.Module:
    """A codebook that follows what was assigned to it (VQ-VAE with EMA), with sums and counts in buffers."""
    layers, book = linears(encoder=(16, 16), decoder=(16, 16)), torch.randn(32, 16)
    return Call(_coded, **layers, book=book, sums=book.clone(), sizes=torch.ones(32))


def _queued(m: Any, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    query = functional.normalize(m.query(x), dim=1)
    with torch.no_grad():
        key = functional.normalize(m.key(seen), dim=1)
    alike = (query * key).sum(1, keepdim=True)
    other = query @ m.queue.clone().t()
    loss = functional.cross_entropy(torch.cat([alike, other], 1) / 0.1, x.new_zeros(len(x)).long())
    with torch.no_grad():
        rows = (m.place + torch.arange(len(x), device=x.device)) % len(m.queue)
        m.queue[rows] = key
        m.place.copy_((m.place + len(x)) % len(m.queue))
    return loss


def queue() -> nn.Module:
    """A queue of keys, of which a pointer in a buffer says where the next ones go (MoCo)."""
    keys, place = functional.normalize(torch.randn(256, 32), dim=1), torch.zeros(1, dtype=torch.long)
    model = Call(_queued, **linears(query=(16, 32), key=(16, 32)), queue=keys, place=place)
    model.key.requires_grad_(False)
    return model


def _shifted(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """One buffer takes the last value of another, which takes the batch's mean."""
    x = x - 0.5 * (m.mean + m.before)
    m.before.copy_(m.mean)
    m.mean = x.detach().mean(0)
    return functional.cross_entropy(m.last(torch.relu(m.first(x))), y)


def _normed(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    for convolution, norm in zip(m.convolutions, m.norms, strict=True):
        x = torch.relu(norm(convolution(x)))
    return functional.cross_entropy(m.last(x.mean((2, 3))), y)


def normed(*norms: nn.Module) -> nn.Module:
    """Convolutions with one norm each."""
    channels = [3, *[8] * (len(norms) - 1)]
    convolutions = nn.ModuleList(nn.Conv2d(n, 8, 3, padding=1) for n in channels)
    return Call(_normed, norms=nn.ModuleList(norms), convolutions=convolutions, last=nn.Linear(8, 4))


def _judged(m: Any, x: torch.Tensor) -> torch.Tensor:
    return functional.softplus(-m.last(torch.relu(m.first(x)).mean((2, 3)))).mean()


def critic(norm: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """A discriminator with spectral norms."""
    return Call(_judged, first=norm(nn.Conv2d(3, 8, 3, padding=1)), last=norm(nn.Linear(8, 1)))


def _embedded(m: Any, rows: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(m.last(torch.tanh(m.table(rows)).mean(1)), y)


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


TWO = {"first": (16, 16), "last": (16, 4)}
# Runs in one micro-batch, as a loss that is multiplied is no sum over micro-batches any more.
build_step_counter = _seeded(
    lambda: Call(_counted, **linears(first=(16, 32), last=(32, 4)), steps=torch.zeros((), dtype=torch.long)),
    (8, 16),
)
# Runs, also in micro-batches and in pipelines, whose stages both read the mask.
build_decay = _seeded(
    lambda: Call(_decaying, **linears(second=(16, 16), **TWO), mask=torch.ones(16)), (8, 16)
)
# Runs in one micro-batch; stages that read the scale are sent it.
build_running_scale = _seeded(
    lambda: Call(
        _running_scale,
        layers=nn.ModuleList(nn.Linear(16, 16) for _ in range(3)),
        last=nn.Linear(16, 4),
        scale=torch.ones(()),
    ),
    (8, 16),
)
# Runs, also in micro-batches: the teacher follows weights, not the batch.
build_teacher = _seeded(teacher, (8, 16), classes=0)
# Runs in one micro-batch: the codes follow the batch.
build_codebook = _seeded(codebook, (16, 16), classes=0)
# Runs in one micro-batch.
build_queue = _seeded(queue, (16, 16), (16, 16), classes=0)
# Runs in one micro-batch; a buffer that takes another one's value has memory of its own.
build_shifted = _seeded(
    lambda: Call(_shifted, **linears(**TWO), mean=torch.zeros(16), before=torch.zeros(16)), (8, 16)
)
# Runs in one micro-batch: of three alike norms the first and the last have running statistics.
build_instance_norms = _seeded(
    lambda: normed(
        *(nn.InstanceNorm2d(8, affine=True, track_running_stats=kept) for kept in (True, False, True))
    ),
    (4, 3, 6, 6),
)
# Runs, also in micro-batches: no state at all.
build_group_norms = _seeded(lambda: normed(nn.GroupNorm(2, 8), nn.GroupNorm(4, 8)), (4, 3, 6, 6))
# Run, also in micro-batches: one power iteration a step.
build_spectral = _seeded(lambda: critic(parametrizations.spectral_norm), (8, 3, 6, 6), classes=0)
build_spectral_hooks = _seeded(lambda: critic(nn.utils.spectral_norm), (8, 3, 6, 6), classes=0)
# Refused: the embedding renormalises its table.
build_max_norm = situation(
    lambda: Call(_embedded, table=nn.Embedding(16, 16, max_norm=1.0), last=nn.Linear(16, 4)),
    lambda: (torch.randint(0, 16, (8, 5)), torch.randint(0, 4, (8,))),
    r"changes its parameter table\.weight in forward.*max_norm",
)


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
