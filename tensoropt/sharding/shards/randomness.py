"""Random numbers: every element is a hash of its global index."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from tensoropt.graph import Ref, TorchLiteral
from tensoropt.sharding.index_space import Operand
from tensoropt.sharding.local import LocalCall, Placed, localiser
from tensoropt.sharding.placement import chunk


def _pieces(placed: Placed, operand: Operand, extra: Sequence[int] = ()) -> tuple[Any, ...]:
    """Per atom of an output (and of whole trailing dims): local size, global stride, step, axes."""
    atoms = [size for dim in placed.atoms.atoms[operand.tensor] for size in dim]
    layout = placed.layout(operand, written=True)
    sizes = [*atoms, *extra]
    pieces = []
    for position, size in enumerate(sizes):
        axes = tuple(a for a, c in enumerate(layout) if c == position and placed.mesh[a] > 1)
        parts = prod(placed.mesh[a] for a in axes)
        step = -(-size // parts)
        local = step
        if axes and placed.coordinate is not None:
            index = 0
            for a in axes:
                index = index * placed.mesh[a] + placed.coordinate[a]
            local = chunk(size, parts, index)[1]
        pieces.append((local, prod(sizes[position + 1 :]), step, axes))
    return tuple(pieces)


@localiser("aten.dropout.default")
def _dropout(placed: Placed, call: LocalCall) -> LocalCall:
    pieces = _pieces(placed, placed.space.writes[0])
    return LocalCall("kernels.dropout", call.args[:2], {}, call.name, (pieces,))


@localiser(
    "aten.rand.default", "aten.randn.default", "aten.rand_like.default", "aten.randn_like.default",
    "aten.uniform.default", "aten.normal_functional.default", "aten.exponential.default",
    "aten.randint.low", "aten.randint.default",
)  # fmt: skip
def _random(placed: Placed, call: LocalCall) -> LocalCall:
    kind, offset, scale = _distribution(placed)
    output = placed.space.writes[0]
    dtype = TorchLiteral(placed.atoms.graph.tensors[output.tensor].dtype)
    like = tuple(Ref(name) for name in placed.op.inputs())  # brought here, so that what is priced is sent
    args = (kind, placed.write_shape(), dtype, offset, scale, *like)
    return LocalCall("kernels.random", args, {}, call.name, (_pieces(placed, output),))


def _distribution(placed: Placed) -> tuple[str, float, float]:
    """(kind, offset, scale) of what the operator draws."""
    packet, args = placed.op.target.split(".", 1)[1], placed.op.args
    if packet == "uniform.default":
        low, high = placed.argument(1, "from", 0.0), placed.argument(2, "to", 1.0)
        return "rand", low, high - low
    if packet == "normal_functional.default":
        return "randn", placed.argument(1, "mean", 0.0), placed.argument(2, "std", 1.0)
    if packet == "exponential.default":
        return "exponential", 0.0, 1.0 / placed.argument(1, "lambd", 1.0)
    if packet.startswith("randint"):
        low, high = args[:2] if packet == "randint.low" else (0, args[0])
        return "randint", low, high - low
    return ("randn" if "randn" in packet else "rand"), 0.0, 1.0


@localiser("aten.bernoulli.p", "aten.bernoulli.default")
def _bernoulli(placed: Placed, call: LocalCall) -> LocalCall:
    pieces = _pieces(placed, placed.space.writes[0])
    return LocalCall("kernels.bernoulli", call.args, {}, call.name, (pieces,))


@localiser("aten.scaled_dot_product_attention.default")
def _attention(placed: Placed, call: LocalCall) -> LocalCall:
    """Attention's own kernel, except with dropout: then the math form with a counter-based mask."""
    p = placed.argument(4, "dropout_p", 0.0)
    if p == 0.0:
        return call
    tensors = placed.atoms.graph.tensors
    keys = tensors[placed.op.inputs()[1]].shape[-2]
    output = placed.space.writes[0]
    # Weights are [..., heads, queries, keys]: the output's atoms without its last dim, then the keys.
    last = placed.atoms.atoms[output.tensor][-1]
    pieces = _pieces(placed, output)
    kept = pieces[: len(pieces) - len(last)]
    stride = prod(size for dim in placed.atoms.atoms[output.tensor][-1:] for size in dim)
    weights = (*((n, s // stride * keys, step, axes) for n, s, step, axes in kept), (keys, 1, keys, ()))
    mask = placed.argument(3, "attn_mask", None)
    args = (*call.args[:3], mask, p, placed.argument(5, "is_causal", False), placed.op.kwargs.get("scale"))
    return LocalCall("kernels.attention_with_dropout", args, {}, call.name, (weights,))
