"""Writes at indices and into slices: scatter, index_add, index_put and similar operators."""

from __future__ import annotations

from tensoropt.graph import Ref
from tensoropt.ops.calls import CostClass, Samples, aten
from tensoropt.ops.families.indexing import along_a_dim, along_dims
from tensoropt.ops.index_space import Builder, Opaque, alike


@alike("reduce include_self value")
def _scatter(b: Builder) -> None:
    """Allow splits of every dim in which tensor and index are equally long, except the written dim. If
    entries are added, the written dim of the index may be split, which gives partial sums."""
    shape, index = b.tensor(b.arg(0)).shape, b.tensor(b.arg(2)).shape
    if not shape or len(index) != len(shape):
        raise Opaque(b.op.name)
    dim = b.arg(1) % max(len(shape), 1)
    adds = b.op.target == "aten.scatter_add.default"
    labels = b.around([i for i, size in enumerate(shape) if i == dim or size != index[i]], added=adds)
    written = list(labels)
    if adds:
        written[dim] = b.loop("index", index[dim])
    b.read(b.arg(2), written)
    if isinstance(b.arg(3), Ref):
        if b.tensor(b.arg(3)).shape != index:
            raise Opaque(b.op.name)
        b.read(b.arg(3), written)
    b.write(labels)


@alike("alpha")
def _index_add(b: Builder) -> None:
    """Describe ``y = x; y[index[i]] += source[i]``; splits of the rows ``i`` give partial sums."""
    shape = b.tensor(b.arg(0)).shape
    if not shape or not b.tensor(b.arg(2)).shape:
        raise Opaque(b.op.name)
    dim, adds = b.arg(1) % max(len(shape), 1), "add" in b.op.target
    labels = b.around([dim], added=adds)
    rows = b.loop("index", b.tensor(b.arg(2)).shape[0], splittable=adds)
    b.read(b.arg(2), [rows])
    b.read(b.arg(3), [rows if i == dim else label for i, label in enumerate(labels)])
    b.write(labels)


@alike("value")
def _index_fill(b: Builder) -> None:
    b.along(b.dim(1))


def _index_put(b: Builder) -> None:
    """Describe ``y = x; y[i, j, :] = values``: written dims stay whole; with ``+=``, values may be split."""
    source, indices = b.tensor(b.arg(0)), b.arg(1)
    positions = [i for i, index in enumerate(indices) if isinstance(index, Ref)]
    tensors = [b.tensor(indices[p]) for p in positions]
    adjacent = positions and positions == list(range(positions[0], positions[-1] + 1))
    if not adjacent or any(t.dtype in ("bool", "uint8") for t in tensors):
        raise Opaque(b.op.name)
    adds = bool(b.arg(3, "accumulate", False))
    rank = max(len(t.shape) for t in tensors)
    sizes = [max([t.shape[i - rank] for t in tensors if len(t.shape) >= rank - i]) for i in range(rank)]
    rows = [b.loop(f"index{i}", size, splittable=adds) for i, size in enumerate(sizes)]
    labels = b.around(positions, added=adds)
    for position, tensor in zip(positions, tensors, strict=True):
        b.read(indices[position], rows[rank - len(tensor.shape) :])
    values = [*labels[: positions[0]], *rows, *labels[positions[-1] + 1 :]]
    values_shape = b.tensor(b.arg(2)).shape
    if adds and values_shape != (*(s for i, s in enumerate(source.shape) if i < positions[0]), *sizes,
                          *source.shape[positions[-1] + 1 :]):  # fmt: skip
        raise Opaque(b.op.name)  # repeated values would count once per part
    b.read(b.arg(2), values[len(values) - len(values_shape) :])
    b.write(labels)


@alike("index start end step")
def _scatter_into_slice(b: Builder) -> None:
    """Allow splits of all dims but the written one; the result is linear in base and source."""
    narrow, dim = b.op.target == "aten.slice_scatter.default", b.dim(2, "dim", 0)
    labels = b.along(dim)
    b.read(b.arg(1), labels if narrow else labels[:dim] + labels[dim + 1 :])
    b.linear = b.cheap = True


_ALONG_A_DIM = Samples(limits=along_a_dim, timed=False)

SPECS = (
    aten(
        "scatter.src scatter.value scatter.reduce scatter.value_reduce",
        _scatter,
        samples=_ALONG_A_DIM,
        cost_class=CostClass.LOOKUP,
    ),
    aten("scatter_add.default scatter_reduce.two", _scatter, samples=_ALONG_A_DIM),
    aten("index_add.default index_copy.default", _index_add, samples=_ALONG_A_DIM),
    aten("index_fill.int_Scalar", _index_fill, samples=_ALONG_A_DIM),
    aten(
        "index_put.default",
        _index_put,
        samples=Samples(limits=along_dims, timed=False),
        cost_class=CostClass.LOOKUP,
    ),
    aten("slice_scatter.default select_scatter.default", _scatter_into_slice),
)
