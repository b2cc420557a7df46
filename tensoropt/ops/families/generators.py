"""Random numbers: every element is a hash of its global index, so that every dim may be split."""

from __future__ import annotations

import threading
from math import prod
from typing import Any

import torch
from torch import Tensor

from tensoropt.graph import Operator, Ref, TorchLiteral
from tensoropt.ops.calls import Domain, LocalCall, OperatorShard, OpSpec, Samples, aten
from tensoropt.ops.families.pointwise import broadcast
from tensoropt.ops.index_space import Builder, Operand, alike
from tensoropt.ops.kernels import ShardContext
from tensoropt.ops.layouts import chunk, flat_index
from tensoropt.ops.overloads import resolve_overload

# -- index spaces ---------------------------------------------------------------------------------


@alike("size low high")
def _random(b: Builder) -> None:
    b.write(b.loops(b.output().shape))


@alike("*")
def _random_like(b: Builder) -> None:
    b.along()


@alike("p train")
def _dropout(b: Builder) -> None:
    broadcast(b)
    b.linear = True


# -- calls of one shard ---------------------------------------------------------------------------


def pieces_of(shard: OperatorShard, operand: Operand) -> tuple[Any, ...]:
    """Return (local size, global stride, step between shards, axes) of each factor (atom) of an output's
    dims.

    A factor in zig-zag order (two chunks per rank) also has the number of shards. A factor that an inner axis
    cuts unevenly has two entries.
    """
    sizes = shard.atoms.atom_sizes(operand.tensor)
    layout = shard.layout(operand, written=True)
    pieces = []
    for position, size in enumerate(sizes):
        axes = tuple(a for a, c in enumerate(layout) if c == position and shard.mesh[a] > 1)
        parts, stride = prod(shard.mesh[a] for a in axes), prod(sizes[position + 1 :])
        if size % parts and len(axes) > 1:
            # Of the parts of the outer axes, which are equal, each one is cut by the innermost axis.
            *outer, inner = axes
            size //= prod(shard.mesh[a] for a in outer)
            pieces.append((1, stride, size, tuple(outer)))
            axes, parts = (inner,), shard.mesh[inner]
        step = -(-size // parts)
        local = step
        if axes and shard.coordinate is not None:
            local = chunk(size, parts, flat_index(shard.mesh, shard.coordinate, axes))[1]
        zigzag = (parts,) if axes and shard.zigzag and shard.coordinate is not None else ()
        zigzag = zigzag if (operand.tensor, position) in shard.atoms.zigzag else ()
        pieces.append((local, stride, step, axes, *zigzag))
    return tuple(pieces)


def _local_dropout(shard: OperatorShard, call: LocalCall) -> LocalCall:
    """Return dropout with a mask hashed from global indices, even on one device, so that all runs agree."""
    pieces = pieces_of(shard, shard.space.writes[0])
    return LocalCall("kernels.dropout", call.args[:2], {}, call.name, (pieces,))


def _local_random(shard: OperatorShard, call: LocalCall) -> LocalCall:
    kind, offset, scale = _distribution(shard)
    output = shard.space.writes[0]
    dtype = TorchLiteral(shard.atoms.graph.tensors[output.tensor].dtype)
    like = tuple(Ref(name) for name in shard.op.inputs())  # passed on, so that the priced move takes place
    args = (kind, shard.write_shape(), dtype, offset, scale, *like)
    return LocalCall("kernels.random", args, {}, call.name, (pieces_of(shard, output),))


def _distribution(shard: OperatorShard) -> tuple[str, float, float]:
    packet, args = shard.op.target.split(".", 1)[1], shard.op.args
    if packet == "uniform.default":
        low, high = shard.argument(1, "from", 0.0), shard.argument(2, "to", 1.0)
        return "rand", low, high - low
    if packet == "normal_functional.default":
        return "randn", shard.argument(1, "mean", 0.0), shard.argument(2, "std", 1.0)
    if packet == "exponential.default":
        return "exponential", 0.0, 1.0 / shard.argument(1, "lambd", 1.0)
    if packet.startswith("randint"):
        low, high = args[:2] if packet == "randint.low" else (0, args[0])
        return "randint", low, high - low
    return ("randn" if "randn" in packet else "rand"), 0.0, 1.0


def _local_bernoulli(shard: OperatorShard, call: LocalCall) -> LocalCall:
    pieces = pieces_of(shard, shard.space.writes[0])
    return LocalCall("kernels.bernoulli", call.args, {}, call.name, (pieces,))


# -- kernels --------------------------------------------------------------------------------------


def _signed(value: int) -> int:
    # PyTorch has only int64; its products wrap around like those of uint64.
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN, _MIX = _signed(0x9E3779B97F4A7C15), _signed(0xBF58476D1CE4E5B9)
"""The increment and first multiplier of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
_STEP = _signed(0xD6E8FEB86659FD93)
"""The multiplier of the step's number, which separates steps; any odd number with well-spread bits."""


def _key(seed: int, name: str) -> int:
    state = 0xCBF29CE484222325  # FNV-1a over the operator's name and seed
    for byte in f"{name}/{seed}".encode():
        state = ((state ^ byte) * 0x100000001B3) % (1 << 64)
    return _signed(state)


def keep_mask(
    context: ShardContext, name: str, p: float, shape: tuple[int, ...], pieces: Any, device: torch.device
) -> Tensor:
    """Return a dropout mask, True where kept: a hash of (seed, operator, step, global index).

    Args:
        shape: local shape of the result.
        pieces: (local size, global stride, step between shards, axes[, shards if zig-zag]) of each factor of
            the dims. Its local element ``i`` adds ``(coordinate(axes) * step + i) * stride`` to the global
            index.
    """
    state = _hashed(context, name, pieces, device)
    # 24 bits are what a float32 holds exactly, so p and the hash are compared without rounding.
    return (state.bitwise_and_(0xFFFFFF) >= int(p * (1 << 24))).reshape(shape)


def _hashed(context: ShardContext, name: str, pieces: Any, device: torch.device) -> Tensor:
    # One dim per atom: the global index is a sum of one-dimensional ranges, which broadcast to it.
    index = torch.zeros((), dtype=torch.int64, device=device)
    for position, (size, stride, step, axes, *parts) in enumerate(pieces):
        coordinate = context.coordinate(axes) if axes else 0
        starts = [coordinate * step]
        if parts:
            starts = [place * (step // 2) for place in (coordinate, 2 * parts[0] - 1 - coordinate)]
        length = size // len(starts)
        elements = [torch.arange(length, dtype=torch.int64, device=device) + start for start in starts]
        values = (elements[0] if len(elements) == 1 else torch.cat(elements)) * stride
        index = index + values.view((size,) + (1,) * (len(pieces) - 1 - position))
    # The step is a number that a compiler may leave symbolic, so that it compiles once for all steps.
    moment = torch.full((), context.step, dtype=torch.int64, device=device).mul_(_STEP)
    state = index.mul(_GOLDEN).add_(_key(context.seed, name)).add_(moment)
    # One mixing round where SplitMix64 has two, for fewer passes over the mask; it is an assumption that
    # dropout needs no better numbers.
    state.bitwise_xor_(state >> 29).mul_(_MIX)
    return state.bitwise_xor_(state >> 32)


def _random_kernel(
    context: ShardContext,
    name: str,
    pieces: Any,
    kind: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    offset: float = 0.0,
    scale: float = 1.0,
    *_: Any,
) -> Tensor:
    """Return ``offset + scale * sample``, where each sample comes from a hash of its global index.

    Args:
        kind: distribution: ``rand``, ``randn`` (Box-Muller transform of two hashes), ``randint`` (``rand``,
            with the result rounded down) or ``exponential``.
    """
    device = context.device

    def uniform(stream: str) -> Tensor:
        # The half keeps it away from 0 and 1, where the logarithms below are infinite or zero.
        return (_hashed(context, stream, pieces, device).bitwise_and_(0xFFFFFF).double() + 0.5) / (1 << 24)

    value = uniform(name)
    if kind == "randn":
        # A separate stream for the angle, which must not depend on the radius.
        value = (-2.0 * value.log()).sqrt() * (2.0 * torch.pi * uniform(f"{name}/angle")).cos()
    elif kind == "exponential":
        value = -value.log()
    value = (value * scale + offset).reshape(shape)
    return (value.floor() if kind == "randint" else value).to(dtype)


_SEEDING = threading.Lock()


def _seeded(context: ShardContext, name: str, target: str, *args: Any, **kwargs: Any) -> Any:
    """Run PyTorch's random operator ``target`` unsplit, with one seed on all ranks."""
    function = resolve_overload(target)
    # PyTorch's generator belongs to the process: threads that stand for ranks must not seed it between each
    # other's draws. Seeding also seeds all GPUs; this must not affect what the script draws next on its GPU.
    on_gpu = context.device.type == "cuda" and torch.cuda.is_initialized()
    with _SEEDING, torch.random.fork_rng(devices=[context.device] if on_gpu else []), context.device:
        torch.manual_seed((_key(context.seed, name) + context.step * _STEP) & ((1 << 63) - 1))
        return function(*args, **kwargs)


def _bernoulli_kernel(
    context: ShardContext, name: str, pieces: Any, x: Tensor, p: float | None = None, *_: Any
) -> Tensor:
    """Return 1 with probability ``p`` (by default ``x``), else 0, by hashed global indices; no gradient."""
    if p is not None:
        return keep_mask(context, name, 1.0 - p, tuple(x.shape), pieces, x.device).to(x.dtype)
    state = _hashed(context, name, pieces, x.device).bitwise_and_(0xFFFFFF).reshape(x.shape)
    return (state < x.detach() * (1 << 24)).to(x.dtype)


class _MaskedScale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.scale = scale
        return x * mask * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        (mask,) = ctx.saved_tensors
        return grad * mask * ctx.scale, None, None


def dropout_kernel(context: ShardContext, name: str, pieces: Any, x: Tensor, p: float, *_: Any) -> Tensor:
    """Apply dropout with a mask that is a hash of global indices (:func:`keep_mask`)."""
    if p == 0.0:
        return x
    mask = keep_mask(context, name, p, tuple(x.shape), pieces, x.device)
    return _MaskedScale.apply(x, mask, 1.0 / (1.0 - p) if p < 1.0 else 0.0)


def _evaluated_dropout(op: Operator, call: LocalCall) -> LocalCall:
    return LocalCall("aten.alias.default", call.args[:1], {}, call.name)


SPECS = (
    aten(
        "rand.default randn.default randint.low randint.default",
        _random,
        localiser=_local_random,
        kernels={"kernels.random": _random_kernel, "kernels.seeded": _seeded},
        random=True,
    ),
    aten(
        "rand_like.default randn_like.default uniform.default normal_functional.default exponential.default",
        _random_like,
        localiser=_local_random,
        random=True,
    ),
    OpSpec(
        without_rule=("multinomial", "poisson", "binomial", "normal", "_standard_gamma", "_sample_dirichlet"),
        samples=Samples(domains={0: Domain.UNIT, 1: Domain.UNIT}),
    ),
    aten(
        "bernoulli.p bernoulli.default",
        _random_like,
        localiser=_local_bernoulli,
        kernels={"kernels.bernoulli": _bernoulli_kernel},
        samples=Samples(domains={0: Domain.UNIT}),
        random=True,
    ),
    aten(
        "dropout.default",
        _dropout,
        localiser=_local_dropout,
        kernels={"kernels.dropout": dropout_kernel},
        random=True,
        evaluated=_evaluated_dropout,
    ),
)
