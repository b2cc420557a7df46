"""Random programs under random strategies, on ranks that are threads, beside the unsplit model.

The widest net for what no single rule can get wrong: atoms that views disagree about, partial sums that
travel too far, hubs, tied weights, writes in place, buffers, constants that are added up. A statement draws
itself from its own seed and the value before it, so that others can be left out of a program that fails.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn import functional as F

from tensoropt.capture import capture
from tensoropt.capture.steps import largest_of
from tensoropt.engine.models import model_values
from tensoropt.errors import CaptureError
from tensoropt.sharding.atoms import refine_graph
from tensoropt.sharding.configurations import MicroBatchRefused
from tensoropt.sharding.groups import GroupGraph, group_operators
from tensoropt.verify.random_strategies import micro_strategies, random_strategy
from tests.engine.threads import largest_differences, step, unsplit_engine

MESHES = ((1, 2), (1, 3), (1, 2, 2), (2, 2))
BATCH, TOKENS = 4, 12
LENGTH = 9
FAR = 1e-9
"""In float64."""
LARGEST = 4096
Move = Callable[["Program", torch.Tensor, random.Random], torch.Tensor | None]
"""A statement: the value after it, or None where it does not fit the value before it."""


class Program(nn.Module):
    """A chain of random statements; values along the way are kept, some are added, joined or lost later."""

    def __init__(self, seeds: Sequence[int]):
        super().__init__()
        self.weights, self.statements = nn.ParameterDict(), list[tuple[Move, int]]()
        torch.manual_seed(0)
        x, tokens = inputs()
        self.begin(tokens)
        for number, seed in enumerate(seeds):
            move = random.Random(seed).choice(MOVES) if number else linear
            if (made := self.after(x, move, seed)) is not None:
                self.statements.append((move, seed))
                x = made
        for buffer in self.buffers():
            buffer.fill_(0.5)

    def begin(self, tokens: torch.Tensor) -> None:
        self.past, self.used, self.losses = list[torch.Tensor](), list[nn.Parameter](), list[torch.Tensor]()
        self.tokens = tokens

    def weight(self, *shape: int) -> nn.Parameter:
        """The next one; it is made when the program is."""
        if (name := f"w{len(self.used)}") not in self.weights:
            self.weights[name] = nn.Parameter(torch.randn(shape, dtype=torch.float64) * 0.4)
        self.used.append(self.weights[name])
        return self.used[-1]

    def after(self, x: torch.Tensor, move: Move, seed: int) -> torch.Tensor | None:
        """The value after a statement; None if it does not fit the value before it."""
        rng = random.Random(seed)
        if self.past:
            rng.choice(MOVES)
        if (made := move(self, x, rng)) is not None:
            self.past.append(made)
        return made

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        self.begin(tokens)
        for move, seed in self.statements:
            x = self.after(x, move, seed)
        return x.square().mean() + sum(self.losses)


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH, 6, 8, dtype=torch.float64, generator=made)
    return x, torch.randint(0, TOKENS, (BATCH, 6), generator=made)


def linear(m, v, rng):
    weight = m.weight(rng.choice([6, 8, 12]), v.shape[-1])
    return F.linear(v, weight, m.weight(len(weight)) if rng.random() < 0.7 else None)


def tied(m, v, rng):
    """A weight that an earlier statement has, as it is or transposed."""
    matrices = [w for w in m.used if w.dim() == 2 and v.shape[-1] in w.shape]
    if not matrices:
        return None
    w = rng.choice(matrices)
    return v @ (w.T if w.shape[1] == v.shape[-1] else w)


def alone(m, v, rng):
    """A function of the value alone, of its elements or along a dim."""
    dim = rng.randrange(1, v.dim())
    of_elements = [torch.tanh, F.gelu, F.silu, torch.sigmoid, lambda v: v * 0.5, lambda v: v + 0.3]
    gates = [
        lambda v: torch.where(v > 0.1, torch.tanh(v), 0.2 * v),
        lambda v: v.masked_fill(v.detach() < 0, 0.5),
        lambda v: v.clamp(min=-1.0, max=2.0),
    ]
    along = [
        lambda v: torch.softmax(v, dim) * 3.0,
        lambda v: torch.cumsum(v, dim) * 0.3,
        lambda v: torch.log_softmax(v, dim) * 0.3,
        lambda v: torch.sort(v, dim).values,
        lambda v: torch.flip(v, (dim,)),
        lambda v: torch.roll(v, 1, dim),
        lambda v: F.normalize(v, dim=dim),
    ]
    return rng.choice(rng.choice([of_elements, gates, along]))(v)


def scaled(m, v, rng):
    w, b = m.weight(v.shape[-1]), m.weight(v.shape[-1])
    return F.layer_norm(v, v.shape[-1:], w, b) if rng.random() < 0.5 else v * w


def viewed(m, v, rng):
    """Dims that are reordered, taken apart, merged or repeated."""
    order, dim, by = [*range(1, v.dim())], rng.randrange(1, v.dim()), rng.choice([2, 3, 4])
    rng.shuffle(order)
    ways = [lambda: v.permute(0, *order)]
    if v.dim() <= 4 and v.shape[dim] % by == 0 and v.shape[dim] > by:
        ways += 2 * [lambda: v.unflatten(dim, (by, -1))]
    if v.dim() > 3 and dim < v.dim() - 1:
        ways += 2 * [lambda: v.flatten(dim, dim + 1)]
    if v.dim() == 3:
        ways += [lambda: v.unsqueeze(1).expand(v.shape[0], 2, *v.shape[1:])]
    return rng.choice(ways)()


def reduced(m, v, rng):
    if v.dim() < 4:
        return None
    dim, keep = rng.randrange(1 - v.dim(), 0), rng.random() < 0.3
    function = rng.choice([torch.mean, torch.sum, torch.amax, torch.logsumexp, torch.var])
    return function(v, dim=dim, keepdim=keep) * 0.4


def add_past(m, v, rng):
    like = [past for past in m.past[:-1] if past.shape == v.shape]
    return v + rng.choice(like) if like else None


def parted(m, v, rng):
    """Parts along a dim: multiplied, joined with others, or left out."""
    dim, parts = rng.randrange(1, v.dim()), rng.choice([2, 4])
    ways = []
    if v.shape[-1] % parts == 0 and v.shape[-1] > parts:
        ways += [lambda: torch.stack(v.chunk(parts, -1), 1).prod(1)]
    if v.numel() <= LARGEST:
        ways += [lambda: torch.cat([v, torch.tanh(v)], dim)]
    if (size := v.shape[dim]) >= 4:
        start = rng.choice([0, 1, size // 2])
        ways += [lambda: v.narrow(dim, start, size // 2)]
    return rng.choice(ways)() if ways else None


def product(m, v, rng):
    """A product with itself or attention, a convolution, a product to which a constant is added."""
    if v.numel() > LARGEST:
        return None
    causal = rng.random() < 0.5
    ways = [
        lambda: (v @ v.transpose(-1, -2)) * 0.2,
        lambda: F.scaled_dot_product_attention(v, torch.tanh(v), v, is_causal=causal),
    ]
    if v.dim() == 3:
        w, b, batched = m.weight(6, v.shape[1], 3), m.weight(6), m.weight(v.shape[0], v.shape[2], 8)
        added = torch.arange(8, dtype=v.dtype).expand(*v.shape[:2], 8)
        ways += [
            lambda: F.conv1d(v, w, b, padding=1),
            lambda: torch.baddbmm(added, v, batched, beta=0.1, alpha=0.5),
        ]
    return rng.choice(ways)() if v.dim() > 2 else None


def written(m, v, rng):
    """A write in place: to all of a copy, or to a view of it."""
    dim, kind, copy = rng.randrange(1, v.dim()), rng.randrange(4), v * 1.0
    part = copy.narrow(dim, 0, max(copy.shape[dim] // 2, 1))
    if kind == 0:
        copy.mul_(0.5).add_(0.1)
    elif kind == 1:
        part.mul_(0.3)
    elif kind == 2:
        part.copy_(torch.tanh(v.narrow(dim, v.shape[dim] - part.shape[dim], part.shape[dim])))
    else:
        copy.select(dim, -1).zero_()
    return copy


def picked(m, v, rng):
    """A gather: of fixed places, of places that values decide, or the largest."""
    dim, kind = rng.randrange(1, v.dim()), rng.randrange(4)
    places = [rng.randrange(v.shape[dim]) for _ in range(4)]
    if kind == 0:
        return v.index_select(dim, torch.tensor(places))
    if kind == 1:
        return torch.take_along_dim(v, v.argsort(dim), dim)
    if kind == 2 and v.shape[dim] > 2:
        return v.topk(2, dim).values
    return v[(slice(None),) * dim + (places,)]


def embedded(m, v, rng):
    """A lookup of the tokens, and a scatter of its rows."""
    if v.dim() != 3 or v.shape[1] != 6:
        return None
    w = m.weight(TOKENS, v.shape[2])
    if rng.random() < 0.5:
        return v + F.embedding(m.tokens, w)
    return v.scatter_add(1, (m.tokens % 6).unsqueeze(-1).expand_as(v), torch.tanh(v))


def buffered(m, v, rng):
    """A buffer that is read, and changed by some."""
    name, changes = f"b{len(m.past)}", rng.random() < 0.5
    if not hasattr(m, name):
        m.register_buffer(name, torch.full((v.shape[-1],), 0.5, dtype=v.dtype))
    buffer = m.get_buffer(name)
    result = v * (buffer.clone() if changes else buffer)  # PyTorch's backward wants the old values
    if changes:
        buffer.mul_(0.9).add_(v.detach().flatten(0, -2).mean(0), alpha=0.1)
    return result


def turned(m, v, rng):
    """Complex numbers: a rotation of pairs, or a transform and back."""
    if v.shape[-1] % 2 or v.numel() > LARGEST:
        return None
    if rng.random() < 0.4:
        return torch.fft.irfft(torch.fft.rfft(v) * 0.5, v.shape[-1])
    half = v.shape[-1] // 2
    pairs = torch.view_as_complex(v.unflatten(-1, (half, 2)).contiguous())
    angles = torch.arange(half, dtype=v.dtype)
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


def lost(m, v, rng):
    """One more loss of what is there."""
    kind, rows = rng.randrange(3), v.flatten(0, -2)
    if kind == 0:
        targets = torch.arange(rows.shape[0]) % v.shape[-1]
        m.losses.append(0.3 * F.cross_entropy(rows, targets))
    elif kind == 1:
        m.losses.append(F.mse_loss(v, torch.zeros_like(v)))
    else:
        m.losses.append(v.abs().mean() * 0.1)
    return v


MOVES: tuple[Move, ...] = (
    *(linear, linear, alone, alone, alone, scaled, scaled, viewed, viewed, viewed, viewed, reduced, reduced),
    *(add_past, add_past, parted, parted, product, product, tied, written, written, picked, picked),
    *(embedded, buffered, turned, lost),
)


def seeds_of(program: int) -> list[int]:
    return [program * 1000 + i for i in range(LENGTH)]


def refusal(seeds: Sequence[int], choice: int) -> str:
    """Run a program with a strategy on each mesh; return why there is nothing to compare, if so.

    Args:
        choice: the seed of the strategies.

    Raises:
        AssertionError: a strategy computes something else.
    """
    model, given = Program(seeds), inputs()
    try:
        captured = capture(model, given)
    except CaptureError as error:
        return str(error)
    graph: GroupGraph = group_operators(refine_graph(captured.graph))
    values = {name: value.detach().clone() for name, value in model_values(captured).items()}
    engine = unsplit_engine(graph, values)
    loss, gradients = step(engine, given)
    wanted = float(model(*given).detach())
    if wanted != wanted:
        return "its loss is NaN"  # a variance of one element
    assert abs(loss - wanted) <= FAR * max(1.0, abs(loss)), f"unsplit: {loss} instead of {wanted}"
    if largest_of(gradients.values()) < FAR:
        return "its gradients are rounding"  # of a mean square of what is normalised
    whole = loss, gradients | engine.buffers
    rng = random.Random(choice)
    for mesh in MESHES:
        try:
            micro = micro_strategies(graph, mesh[0])
        except MicroBatchRefused:
            continue
        strategy = random_strategy(graph, mesh, micro, rng)
        far, gradient, worst = largest_differences(strategy, values, given, whole)
        chosen = {n: c.labels for n, c in strategy.configurations.items()}
        assert max(far, gradient) < FAR, f"{mesh}: loss {far:.1e}, {worst} {gradient:.1e}: {chosen}"
    return ""
