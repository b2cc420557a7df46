"""Contractions: linear layers, matrix products, einsum."""

from __future__ import annotations

from functools import partial

import torch

from tensoropt.ops.calls import CostClass, Domain, LinearOperands, OpSpec, Precision, Samples, aten
from tensoropt.ops.index_space import Builder, Opaque, alike


def _linear(b: Builder) -> None:
    x, w, bias = b.arg(0), b.arg(1), b.arg(2, "bias")
    weight = b.tensor(w).shape
    if len(weight) != 2:
        raise Opaque(b.op.name)
    rows = b.loops(b.tensor(x).shape[:-1])
    o = b.loop("out_features", weight[0], uneven=True)
    i = b.loop("in_features", weight[1])
    b.read(x, [*rows, i])
    b.read(w, [o, i])
    b.read(bias, [o], added=True)
    b.write([*rows, o])


@alike("alpha beta")
def _mm(b: Builder) -> None:
    """Describe ``y[m, n] = sum_k x[m, k] w[k, n]``, or ``beta bias[n]`` plus ``alpha`` times this product."""
    *bias, x, w = (b.arg(index) for index in range(len(b.op.args)))
    m = b.loop("rows", b.tensor(x).shape[0])
    n = b.loop("out_features", b.tensor(w).shape[1], uneven=True)
    k = b.loop("in_features", b.tensor(w).shape[0])
    for added in bias:
        b.read(added, [m, n][2 - len(b.tensor(added).shape) :], added=True)
    b.read(x, [m, k])
    b.read(w, [k, n])
    b.write([m, n])


@alike("alpha beta")
def _bmm(b: Builder) -> None:
    """Describe ``z[b, m, n] = sum_k x[b, m, k] y[b, k, n]``, or ``beta t + alpha z`` with a term ``t``."""
    *terms, x, y = (b.arg(index) for index in range(len(b.op.args)))
    batch, m, k = b.loops(b.tensor(x).shape)
    n = b.loop("n", b.tensor(y).shape[2])
    for added in terms:
        b.read(added, [batch, m, n][3 - len(b.tensor(added).shape) :], added=True)
    b.read(x, [batch, m, k])
    b.read(y, [batch, k, n])
    b.write([batch, m, n])


def _matmul(b: Builder) -> None:
    x, y = b.tensor(b.arg(0)).shape, b.tensor(b.arg(1)).shape
    left, right = (x if len(x) > 1 else (1, *x)), (y if len(y) > 1 else (*y, 1))
    batch = b.loops(torch.broadcast_shapes(left[:-2], right[:-2]))
    m, k, n = b.loop("m", left[-2]), b.loop("k", left[-1]), b.loop("n", right[-1])
    b.read(b.arg(0), [*batch[len(batch) - len(left[:-2]) :], m, k] if len(x) > 1 else [k])
    b.read(b.arg(1), [*batch[len(batch) - len(right[:-2]) :], k, n] if len(y) > 1 else [k])
    b.write([*batch, *([m] if len(x) > 1 else []), *([n] if len(y) > 1 else [])])


@alike("path")
def _einsum(b: Builder) -> None:
    """Add one loop per letter of the equation; any of them may be split."""
    equation, tensors = b.arg(0).replace(" ", ""), b.arg(1)
    if "..." in equation or "->" not in equation or len(tensors) > 2:
        raise Opaque(b.op.name)
    left, right = equation.split("->")
    loops: dict[str, int] = {}
    for term, tensor in zip(left.split(","), tensors, strict=True):
        if len(set(term)) != len(term):
            raise Opaque(b.op.name)
        for letter, size in zip(term, b.tensor(tensor).shape, strict=True):
            if letter not in loops:
                loops[letter] = b.loop(letter, size)
    for term, tensor in zip(left.split(","), tensors, strict=True):
        b.read(tensor, [loops[letter] for letter in term])
    b.write([loops[letter] for letter in right])


def _mv(b: Builder) -> None:
    """Describe ``y[m] = sum_k w[m, k] x[k]``, with loops called ``d0`` and ``d1`` as in existing plans."""
    m, k = b.loops(b.tensor(b.arg(0)).shape)
    b.read(b.arg(0), [m, k])
    b.read(b.arg(1), [k])
    b.write([m])


def _bilinear(b: Builder) -> None:
    x, z, w = b.arg(0), b.arg(1), b.arg(2)
    rows = b.loops(b.tensor(x).shape[:-1])
    o, i, j = (b.loop(n, s) for n, s in zip(("out_features", "i", "j"), b.tensor(w).shape, strict=True))
    b.read(x, [*rows, i])
    b.read(z, [*rows, j])
    b.read(w, [o, i, j])
    b.read(b.arg(3, "bias"), [o], added=True)
    b.write([*rows, o])


def _lu_unpack(b: Builder) -> None:
    """Allow splits of batch dims; matrices stay whole, because PyTorch's kernel does not check pivots."""
    if not all((b.arg(2, "unpack_data", True), b.arg(3, "unpack_pivots", True))):
        return
    loops = b.loops(b.tensor(b.arg(0)).shape[:-2])
    b.read(b.arg(0), [*loops, None, None])
    b.read(b.arg(1), [*loops, None])
    for index in range(3):
        b.write([*loops, None, None], index)


_product = partial(aten, cost_class=CostClass.MATRIX, precision=Precision.NARROW)
_rare = partial(aten, precision=Precision.NARROW)

SPECS = (
    _product("linear.default", _linear, linear=LinearOperands(0, 1, 2, transposed=True)),
    _product("addmm.default", _mm, linear=LinearOperands(1, 2, 0, transposed=False)),
    _product("mm.default", _mm, linear=LinearOperands(0, 1, 2, transposed=False)),
    _product("bmm.default baddbmm.default", _bmm),
    _product("matmul.default", _matmul),
    _product("einsum.default", _einsum),
    _rare("dot.default", _matmul),
    _rare("mv.default", _mv),
    _rare("bilinear.default", _bilinear),
    OpSpec(
        without_rule=("cholesky", "linalg_cholesky", "linalg_cholesky_ex"),
        samples=Samples(domains={0: Domain.DEFINITE}),
    ),
    aten(
        "lu_unpack.default",
        _lu_unpack,
        without_rule=("linalg_lu_solve", "linalg_ldl_solve"),
        samples=Samples(domains={1: Domain.PIVOTS}),
    ),
    OpSpec(without_rule=("lu_solve",), samples=Samples(domains={2: Domain.PIVOTS})),
)
