"""Reductions: the reduced dim of a sum or mean may be split; that of a maximum, sort or norm may not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tensoropt.ops.calls import LocalCall, OperatorShard, Precision, Samples, aten
from tensoropt.ops.index_space import Builder, Loops, Opaque, alike


def _reduced(b: Builder, dims: int | Sequence[int] | None, keepdim: bool, *, contracted: bool) -> None:
    shape = b.tensor(b.arg(0)).shape
    if dims is None or dims == [] or dims == ():
        reduced = set(range(len(shape)))
    else:
        reduced = {d % max(len(shape), 1) for d in (dims if isinstance(dims, Sequence) else [dims])}
    labels: list[Loops] = [
        b.loop(f"d{i}", s, splittable=contracted or i not in reduced) for i, s in enumerate(shape)
    ]
    b.read(b.arg(0), labels)
    after: list[Loops] = []
    for i, label in enumerate(labels):
        if i not in reduced:
            after.append(label)
        elif keepdim:
            after.append(None)
    for index in range(len(b.op.outputs)):
        b.write(after, index)


def _sum(b: Builder) -> None:
    _reduced(b, b.arg(1, "dim"), b.arg(2, "keepdim", False), contracted=True)
    b.linear = b.cheap = True


_ORDERING = {"aten.topk.default": 2, "aten.sort.default": 1, "aten.sort.stable": 2}
"""Operator -> position of the dim among its arguments."""


@alike("k largest sorted descending stable")
def _dim_reduction(b: Builder) -> None:
    if b.op.target in _ORDERING:
        b.along(b.dim(_ORDERING[b.op.target], "dim", -1))
        return
    _reduced(b, b.arg(1, "dim"), b.arg(2, "keepdim", False), contracted=False)


@alike("ord correction unbiased")
def _norm_or_variance(b: Builder) -> None:
    """Allow splits of unreduced dims only, because roots and deviations of parts do not add up."""
    dims = b.arg(2 if "norm" in b.op.target else 1, "dim")
    _reduced(b, dims, b.arg(3, "keepdim", False), contracted=False)


def _cosine_similarity(b: Builder) -> None:
    """Allow splits of all dims but the one that the vectors lie along."""
    if b.tensor(b.arg(1)).shape != b.shape:
        raise Opaque(b.op.name)
    dim = b.dim(2, "dim", 1)
    labels = b.around([dim])
    b.read(b.arg(1), labels)
    b.write([label for i, label in enumerate(labels) if i != dim])


@alike("p compute_mode")
def _distances(b: Builder) -> None:
    """Describe ``y[..., p, r] = |x[..., p, :] - z[..., r, :]|``; the vectors' own dim stays whole."""
    x, z = b.tensor(b.arg(0)).shape, b.tensor(b.arg(1)).shape
    if x[:-2] != z[:-2]:
        raise Opaque(b.op.name)
    lead, p, r = b.loops(x[:-2], "batch"), b.loop("left", x[-2]), b.loop("right", z[-2])
    b.read(b.arg(0), [*lead, p, None])
    b.read(b.arg(1), [*lead, r, None])
    b.write([*lead, p, r])


def _local_mean(shard: OperatorShard, call: LocalCall) -> LocalCall:
    if not shard.split({*shard.space.reads[0].loops} - {*shard.space.writes[0].loops}):
        return call
    graph = shard.atoms.graph
    count = graph.tensors[shard.op.inputs()[0]].elements // max(
        graph.tensors[shard.op.outputs[0]].elements, 1
    )
    # The sum that takes the mean's arguments unchanged.
    total = "aten.sum.default" if shard.op.target == "aten.mean.default" else "aten.sum.dim_IntList"
    return replace(call, function="kernels.mean_as_sum", static=(total, count))


SPECS = (
    aten("sum.default sum.dim_IntList", _sum, precision=Precision.WIDE),
    aten("mean.default mean.dim", _sum, localiser=_local_mean, precision=Precision.WIDE),
    aten(
        "amax.default amin.default max.dim min.dim argmax.default argmin.default any.dim all.dim "
        "topk.default sort.default sort.stable",
        _dim_reduction,
    ),
    aten("logsumexp.default", _dim_reduction, precision=Precision.WIDE),
    aten("prod.dim_int", _dim_reduction, samples=Samples(positive=True), precision=Precision.WIDE),
    aten(
        "linalg_vector_norm.default",
        _norm_or_variance,
        without_rule=("norm", "dist", "var_mean", "std_mean"),
        precision=Precision.WIDE,
    ),
    aten("var.correction std.correction var.dim std.dim", _norm_or_variance, precision=Precision.WIDE),
    aten("cdist.default", _distances, precision=Precision.WIDE),
    aten("cosine_similarity.default", _cosine_similarity),
)
