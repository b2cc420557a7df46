"""Random programs under random strategies, on ranks that are threads, beside the unsplit model.

The widest net for what no single rule can get wrong: atoms that views disagree about, partial sums that
travel too far, hubs, tied weights, writes in place, buffers, constants that are added up. A statement draws
itself from its own seed and the value before it, so that a program that fails is shrunk by leaving statements
out.

``python -m tests.sweep.programs 2000`` runs so many in random order, goes on where it was stopped, and counts
what capture refuses.
"""

from __future__ import annotations

import json
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tensoropt.capture import capture
from tensoropt.engine.engine import unsplit_strategy
from tensoropt.engine.models import model_values
from tensoropt.engine.runtime import Runtime
from tensoropt.engine.sharded_engine import ShardedEngine
from tensoropt.errors import CaptureError
from tensoropt.sharding.atoms import refine_graph
from tensoropt.sharding.configurations import MicroBatchRefused
from tensoropt.sharding.groups import GroupGraph, group_operators
from tensoropt.verify.random_strategies import micro_strategies, random_strategy
from tensoropt.verify.reference import largest_of
from tests.engine.threads import largest_differences, step

MESHES = ((1, 2), (1, 3), (1, 2, 2), (2, 2))
BATCH, TOKENS = 4, 12
LENGTH = 9
FAR = 1e-9
"""In float64."""
LARGEST = 4096
LOG = Path(__file__).parents[2] / "out" / "sweep" / "programs.jsonl"
Step = Callable[["Program", torch.Tensor], torch.Tensor]


class Program(nn.Module):
    """A chain of random statements; values along the way are kept, some are added, joined or lost later."""

    def __init__(self, seeds: Sequence[int]):
        super().__init__()
        self.weights, self.steps = nn.ParameterDict(), list[Step]()
        torch.manual_seed(0)
        x, tokens = inputs()
        self.begin(tokens)
        for number, seed in enumerate(seeds):
            self.rng = random.Random(seed)
            move = self.rng.choice(MOVES) if number else linear
            if (drawn := move(self, x)) is not None:
                self.steps.append(drawn)
                x = drawn(self, x)
                self.past.append(x)
        for buffer in self.buffers():
            buffer.fill_(0.5)

    def begin(self, tokens: torch.Tensor) -> None:
        self.past: list[torch.Tensor] = []
        self.losses: list[torch.Tensor] = []
        self.tokens = tokens

    def weight(self, *shape: int) -> str:
        name = f"w{len(self.weights)}"
        self.weights[name] = nn.Parameter(torch.randn(shape, dtype=torch.float64) * 0.4)
        return name

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        self.begin(tokens)
        for statement in self.steps:
            x = statement(self, x)
            self.past.append(x)
        return x.square().mean() + sum(self.losses)


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH, 6, 8, dtype=torch.float64, generator=made)
    return x, torch.randint(0, TOKENS, (BATCH, 6), generator=made)


Move = Callable[[Program, torch.Tensor], "Step | None"]


def linear(c: Program, x: torch.Tensor) -> Step | None:
    out = c.rng.choice([6, 8, 12])
    w, b = c.weight(out, x.shape[-1]), c.weight(out) if c.rng.random() < 0.7 else None
    return lambda m, v: F.linear(v, m.weights[w], m.weights[b] if b else None)


def tied(c: Program, x: torch.Tensor) -> Step | None:
    """A weight that an earlier statement has, as it is or transposed."""
    matrices = [(name, w) for name, w in c.weights.items() if w.dim() == 2 and x.shape[-1] in w.shape]
    if not matrices:
        return None
    name, w = c.rng.choice(matrices)
    straight = w.shape[1] == x.shape[-1]
    return lambda m, v: v @ (m.weights[name].T if straight else m.weights[name])


def alone(c: Program, x: torch.Tensor) -> Step | None:
    """A function of the value alone, of its elements or along a dim."""
    dim = c.rng.randrange(1, x.dim())
    of_elements: list[Any] = [torch.tanh, F.gelu, F.silu, torch.sigmoid, lambda v: v * 0.5, lambda v: v + 0.3]
    gates: list[Any] = [
        lambda v: torch.where(v > 0.1, torch.tanh(v), 0.2 * v),
        lambda v: v.masked_fill(v.detach() < 0, 0.5),
        lambda v: v.clamp(min=-1.0, max=2.0),
    ]
    along: list[Any] = [
        lambda v: torch.softmax(v, dim) * 3.0,
        lambda v: torch.cumsum(v, dim) * 0.3,
        lambda v: torch.log_softmax(v, dim) * 0.3,
        lambda v: torch.sort(v, dim).values,
        lambda v: torch.flip(v, (dim,)),
        lambda v: torch.roll(v, 1, dim),
        lambda v: F.normalize(v, dim=dim),
    ]
    function = c.rng.choice(c.rng.choice([of_elements, gates, along]))
    return lambda m, v: function(v)


def scaled(c: Program, x: torch.Tensor) -> Step | None:
    w, b, norm = c.weight(x.shape[-1]), c.weight(x.shape[-1]), c.rng.random() < 0.5
    if norm:
        return lambda m, v: F.layer_norm(v, v.shape[-1:], m.weights[w], m.weights[b])
    return lambda m, v: v * m.weights[w]


def viewed(c: Program, x: torch.Tensor) -> Step | None:
    """Dims that are reordered, taken apart, merged or repeated."""
    order, dim, by = [*range(1, x.dim())], c.rng.randrange(1, x.dim()), c.rng.choice([2, 3, 4])
    c.rng.shuffle(order)
    ways: list[Any] = [lambda m, v: v.permute(0, *order)]
    if x.dim() <= 4 and x.shape[dim] % by == 0 and x.shape[dim] > by:
        ways += 2 * [lambda m, v: v.unflatten(dim, (by, -1))]
    if x.dim() > 3 and dim < x.dim() - 1:
        ways += 2 * [lambda m, v: v.flatten(dim, dim + 1)]
    if x.dim() == 3:
        ways += [lambda m, v: v.unsqueeze(1).expand(v.shape[0], 2, *v.shape[1:])]
    way: Step = c.rng.choice(ways)
    return way


def reduced(c: Program, x: torch.Tensor) -> Step | None:
    if x.dim() < 4:
        return None
    dim, keep = c.rng.randrange(1 - x.dim(), 0), c.rng.random() < 0.3
    function = c.rng.choice([torch.mean, torch.sum, torch.amax, torch.logsumexp, torch.var])
    return lambda m, v: function(v, dim=dim, keepdim=keep) * 0.4


def add_past(c: Program, x: torch.Tensor) -> Step | None:
    like = [i for i, p in enumerate(c.past[:-1]) if p.shape == x.shape]
    if not like:
        return None
    index = c.rng.choice(like)
    return lambda m, v: v + m.past[index]


def parted(c: Program, x: torch.Tensor) -> Step | None:
    """Parts along a dim: multiplied, joined with others, or left out."""
    dim, parts = c.rng.randrange(1, x.dim()), c.rng.choice([2, 4])
    ways: list[Any] = []
    if x.shape[-1] % parts == 0 and x.shape[-1] > parts:
        ways += [lambda m, v: torch.stack(v.chunk(parts, -1), 1).prod(1)]
    if x.numel() <= LARGEST:
        ways += [lambda m, v: torch.cat([v, torch.tanh(v)], dim)]
    if (size := x.shape[dim]) >= 4:
        start = c.rng.choice([0, 1, size // 2])
        ways += [lambda m, v: v.narrow(dim, start, size // 2)]
    return c.rng.choice(ways) if ways else None


def product(c: Program, x: torch.Tensor) -> Step | None:
    """A product with itself or attention, a convolution, a product to which a constant is added."""
    if x.numel() > LARGEST:
        return None
    causal = c.rng.random() < 0.5
    ways: list[Any] = [
        lambda m, v: (v @ v.transpose(-1, -2)) * 0.2,
        lambda m, v: F.scaled_dot_product_attention(v, torch.tanh(v), v, is_causal=causal),
    ]
    if x.dim() == 3:
        w, b, batched = c.weight(6, x.shape[1], 3), c.weight(6), c.weight(x.shape[0], x.shape[2], 8)
        added = torch.arange(8, dtype=x.dtype)
        ways += [
            lambda m, v: F.conv1d(v, m.weights[w], m.weights[b], padding=1),
            lambda m, v: torch.baddbmm(
                added.expand(*v.shape[:2], 8), v, m.weights[batched], beta=0.1, alpha=0.5
            ),
        ]
    return c.rng.choice(ways) if x.dim() > 2 else None


def written(c: Program, x: torch.Tensor) -> Step | None:
    """A write in place: to all of a copy, or to a view of it."""
    dim, kind = c.rng.randrange(1, x.dim()), c.rng.randrange(4)

    def run(m: Program, v: torch.Tensor) -> torch.Tensor:
        copy = v * 1.0
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

    return run


def picked(c: Program, x: torch.Tensor) -> Step | None:
    """A gather: of fixed places, of places that values decide, or the largest."""
    dim, kind = c.rng.randrange(1, x.dim()), c.rng.randrange(4)
    size = x.shape[dim]
    places = [c.rng.randrange(size) for _ in range(4)]
    if kind == 0:
        return lambda m, v: v.index_select(dim, torch.tensor(places))
    if kind == 1:
        return lambda m, v: torch.take_along_dim(v, v.argsort(dim), dim)
    if kind == 2 and size > 2:
        return lambda m, v: v.topk(2, dim).values
    where = (slice(None),) * dim + (places,)
    return lambda m, v: v[where]


def embedded(c: Program, x: torch.Tensor) -> Step | None:
    """A lookup of the tokens, and a scatter of its rows."""
    if x.dim() != 3 or x.shape[1] != 6:
        return None
    w, adds = c.weight(TOKENS, x.shape[2]), c.rng.random() < 0.5
    if adds:
        return lambda m, v: v + F.embedding(m.tokens, m.weights[w])
    return lambda m, v: v.scatter_add(1, (m.tokens % 6).unsqueeze(-1).expand_as(v), torch.tanh(v))


def buffered(c: Program, x: torch.Tensor) -> Step | None:
    """A buffer that is read, and changed by some."""
    name, changes, size = f"b{len(list(c.buffers()))}", c.rng.random() < 0.5, x.shape[-1]
    c.register_buffer(name, torch.full((size,), 0.5, dtype=x.dtype))

    def run(m: Program, v: torch.Tensor) -> torch.Tensor:
        buffer = m.get_buffer(name)
        result = v * (buffer.clone() if changes else buffer)  # PyTorch's backward wants the old values
        if changes:
            buffer.mul_(0.9).add_(v.detach().flatten(0, -2).mean(0), alpha=0.1)
        return result

    return run


def turned(c: Program, x: torch.Tensor) -> Step | None:
    """Complex numbers: a rotation of pairs, or a transform and back."""
    if x.shape[-1] % 2 or x.numel() > LARGEST:
        return None
    if c.rng.random() < 0.4:
        return lambda m, v: torch.fft.irfft(torch.fft.rfft(v) * 0.5, v.shape[-1])
    half = x.shape[-1] // 2

    def run(m: Program, v: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(v.unflatten(-1, (half, 2)).contiguous())
        angles = torch.arange(half, dtype=v.dtype)
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)

    return run


def lost(c: Program, x: torch.Tensor) -> Step | None:
    """One more loss of what is there."""
    kind, classes = c.rng.randrange(3), x.shape[-1]

    def run(m: Program, v: torch.Tensor) -> torch.Tensor:
        rows = v.flatten(0, -2)
        if kind == 0:
            targets = torch.arange(rows.shape[0]) % classes
            m.losses.append(0.3 * F.cross_entropy(rows, targets))
        elif kind == 1:
            m.losses.append(F.mse_loss(v, torch.zeros_like(v)))
        else:
            m.losses.append(v.abs().mean() * 0.1)
        return v

    return run


MOVES: tuple[Move, ...] = (
    *(linear, linear, alone, alone, alone, scaled, scaled, viewed, viewed, viewed, viewed, reduced, reduced),
    *(add_past, add_past, parted, parted, product, product, tied, written, written, picked, picked),
    *(embedded, buffered, turned, lost),
)


def seeds_of(program: int) -> list[int]:
    return [program * 1000 + i for i in range(LENGTH)]


def refusal(seeds: Sequence[int], choice: int, count: int = 1) -> str:
    """Run a program with some strategies on each mesh; return why there is nothing to compare, if so.

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
    engine = ShardedEngine(unsplit_strategy(graph), values, runtime=Runtime((1,), rank=0))
    loss, gradients = step(engine, given)
    wanted = model(*given)
    if wanted.isnan():
        return "its loss is NaN"  # a variance of one element
    assert abs(loss - float(wanted)) <= 1e-9 * max(1.0, abs(loss)), (
        f"unsplit: {loss} instead of {float(wanted)}"
    )
    if largest_of(gradients.values()) < FAR:
        return "its gradients are rounding"  # of a mean square of what is normalised
    whole = loss, gradients | engine.buffers
    rng = random.Random(choice)
    for mesh in MESHES:
        try:
            micro = micro_strategies(graph, mesh[0])
        except MicroBatchRefused:
            continue
        for _ in range(count):
            strategy = random_strategy(graph, mesh, micro, rng)
            far, gradient, worst = largest_differences(strategy, values, given, whole)
            chosen = {n: c.labels for n, c in strategy.configurations.items()}
            assert max(far, gradient) < FAR, f"{mesh}: loss {far:.1e}, {worst} {gradient:.1e}: {chosen}"
    return ""


def failure(seeds: Sequence[int], choices: Sequence[int]) -> str:
    """What is wrong with a program under any of some strategies; empty if nothing is."""
    for choice in choices:
        try:
            refusal(seeds, choice)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


def shrunk(seeds: Sequence[int], choices: Sequence[int]) -> list[int]:
    """The statements without which it does not fail."""
    left = list(seeds)
    for seed in reversed(seeds):
        fewer = [s for s in left if s != seed]
        if failure(fewer, choices):
            left = fewer
    return left


def described(seeds: Sequence[int], choice: int) -> str:
    """A failing program, as few statements as fail."""
    choices = range(choice, choice + 6)
    left = shrunk(seeds, choices)
    lines = [statement.__qualname__ for statement in Program(left).steps]
    return json.dumps({"seeds": left, "statements": lines, "why": failure(left, choices)[:1500]})


def main() -> None:
    from tests.sweep.__main__ import kind_of

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    LOG.parent.mkdir(parents=True, exist_ok=True)
    known = {}
    if LOG.exists():
        known = {one["program"]: one for one in map(json.loads, LOG.read_text().splitlines())}
    begin, _, end = sys.argv[1].rpartition(":")
    programs = range(int(begin or 0), int(end))
    with LOG.open("a") as log:
        for program in random.Random(0).sample(programs, len(programs)):
            if program in known:
                continue
            seeds, found = seeds_of(program), {"program": program, "refused": "", "wrong": ""}
            try:
                found["refused"] = kind_of(refusal(seeds, program))
            except Exception as error:
                found["wrong"] = f"{type(error).__name__}: {error}"[:1500]
                print(program, found["wrong"], described(seeds, program), flush=True)
            known[program] = found
            print(json.dumps(found), file=log, flush=True)
    run = [known[program] for program in programs]
    refused = Counter(one["refused"] for one in run if not one["wrong"])
    print(f"{len(run)} programs, {sum(bool(one['wrong']) for one in run)} wrong,", end=" ")
    print(f"{refused.pop('', 0)} right, refused: {dict(refused)}")


if __name__ == "__main__":
    main()
