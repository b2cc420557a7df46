"""Advanced indexing and writes into slices."""

from __future__ import annotations

from tensoropt.graph import Ref, Tensor
from tensoropt.sharding.rules.registry import Builder, Label, Opaque, rule


def index_positions(b: Builder) -> list[int]:
    """Dims of the source that ``aten.index.Tensor`` looks up."""
    return [i for i, index in enumerate(b.arg(1)) if isinstance(index, Ref)]


def counts_along(b: Builder, tensor: Tensor, size: int) -> int | None:
    """The dim along which a constant index counts ``0 .. size - 1``, the same along all other dims."""
    value = b.graph.constants.get(tensor.name)
    if value is None or value.is_meta or tensor.dtype == "bool" or size == 1:
        return None
    # Constants are kept at broadcast-reduced shape: a counting index varies along one dim only.
    varying = [dim for dim, length in enumerate(value.shape) if length > 1]
    counted = len(varying) == 1 and value.numel() == size and value.flatten().tolist() == list(range(size))
    return varying[0] if counted else None


@rule("aten.index.Tensor")
def index(b: Builder) -> None:
    """``y = x[i, j, :]``: dims that are looked up stay whole, index dims and the others are loops.

    An index that counts (``hidden[arange(batch), last]``) keeps its row together with the result's: a
    loop of its own, for which ``local`` makes the shard's positions relative.
    """
    source, positions = b.tensor(b.arg(0)), index_positions(b)
    indices = {p: b.tensor(b.arg(1)[p]) for p in positions}
    if not positions or any(t.dtype in ("bool", "uint8") for t in indices.values()):
        raise Opaque(b.op.name)
    rank = max(len(t.shape) for t in indices.values())
    adjacent = positions == list(range(positions[0], positions[-1] + 1))
    at = positions[0] if adjacent else 0
    shape = b.output().shape[at : at + rank]
    loops = [b.loop(f"index{i}", size) for i, size in enumerate(shape)]
    labels: list[Label] = [
        None if i in indices else b.loop(f"d{i}", size) for i, size in enumerate(source.shape)
    ]
    kept = [label for i, label in enumerate(labels) if i not in indices]
    counting = {
        p: dim + rank - len(t.shape)
        for p, t in indices.items()
        if (dim := counts_along(b, t, source.shape[p])) is not None
    }
    for position, dim in counting.items():
        if list(counting.values()).count(dim) == 1:
            labels[position] = loops[dim]
    b.read(b.arg(0), labels)
    for position, tensor in indices.items():
        b.read(b.arg(1)[position], loops[rank - len(tensor.shape) :])
    b.write([*kept[:at], *loops, *kept[at:]])


@rule("aten.slice_scatter.default", "aten.select_scatter.default")
def scatter_into_slice(b: Builder) -> None:
    """The written dim stays whole; base and source are added up, each where it is seen."""
    shape = b.tensor(b.arg(0)).shape
    narrow = b.op.target == "aten.slice_scatter.default"
    dim = b.arg(2, "dim", 0) % len(shape)
    labels: list[Label] = [b.loop(f"d{i}", s) if i != dim else None for i, s in enumerate(shape)]
    b.read(b.arg(0), labels)
    b.read(b.arg(1), labels if narrow else labels[:dim] + labels[dim + 1 :])
    b.write(labels)
    b.linear = b.cheap = True
