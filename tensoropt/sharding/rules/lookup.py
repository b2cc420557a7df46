"""Embeddings, gathers and losses."""

from __future__ import annotations

from tensoropt.graph import Ref
from tensoropt.sharding.rules.registry import Builder, Label, Opaque, rule


@rule("aten.embedding.default")
def embedding(b: Builder) -> None:
    """``y[..., h] = sum_v [index[...] == v] w[v, h]``: the vocabulary is a contracted loop."""
    w, index = b.arg(0), b.arg(1)
    vocabulary, hidden = b.tensor(w).shape
    rows = b.loops(b.tensor(index).shape)
    v = b.loop("vocabulary", vocabulary, uneven=True)
    h = b.loop("hidden", hidden)
    b.read(w, [v, h])
    b.read(index, rows)
    b.write([*rows, h])


@rule("aten.embedding_bag.padding_idx")
def embedding_bag(b: Builder) -> None:
    """``y[bag, h] = sum w[index, h]`` over the items of a bag (or their mean or maximum).

    The vocabulary is a contracted loop except of maxima. Bags split where constant offsets say that all are
    equally long: where a bag lies among the items must not depend on values.
    """
    w, index, offsets = b.arg(0), b.arg(1), b.arg(2)
    by_frequency, mode, factors, last = b.arg(3), b.arg(4), b.arg(6), b.arg(7)
    if any(name in b.graph.consumers or name in b.graph.outputs for name in b.op.outputs[1:]):
        raise Opaque(b.op.name)  # positions within the whole batch
    vocabulary, hidden = b.tensor(w).shape
    bags, items = b.output().shape[0], b.tensor(index).shape[0]
    alike = not last and _count_by(b, offsets, items // max(bags, 1)) and items % max(bags, 1) == 0
    bag = b.loop("bag", bags, splittable=alike and not by_frequency)
    item = b.loop("item", items // max(bags, 1), splittable=False)
    contracted = mode != _MAXIMUM and not by_frequency
    v = b.loop("vocabulary", vocabulary, splittable=contracted, uneven=True)
    h = b.loop("hidden", hidden)
    b.read(w, [v if contracted else None, h])
    b.read(index, [(bag, item) if alike else None])
    b.read(offsets, [bag if alike else None])
    b.read(factors, [(bag, item) if alike else None])
    b.write([bag if alike else None, h])


_MAXIMUM = 2


def _count_by(b: Builder, offsets: Ref, length: int) -> bool:
    """Whether offsets are known, and those of bags of this length."""
    value = b.graph.constants.get(offsets.name)
    if value is None or value.is_meta:
        return False
    (size,) = b.tensor(offsets).shape
    return bool(value.expand(size).tolist() == [i * length for i in range(size)])


@rule("aten.cross_entropy_loss.default")
def cross_entropy(b: Builder) -> None:
    """Rows are summed (over the true mass for a mean); the classes may be split (``local`` does it)."""
    logits, target, weight = b.arg(0), b.arg(1), b.arg(2, "weight")
    reduction = b.arg(3, "reduction", 1)
    shape, labels_shape = b.tensor(logits).shape, b.tensor(target).shape
    if len(shape) == 1 or (weight is not None and b.tensor(weight).requires_grad):
        raise Opaque(b.op.name)
    rows = [b.loop(f"d{i}", s) for i, s in enumerate(shape) if i != 1]
    if shape == labels_shape:
        # Targets are chances: a row needs all of its classes.
        b.read(logits, [rows[0], None, *rows[1:]])
        b.read(target, [rows[0], None, *rows[1:]])
        b.write([] if reduction else rows)
        return
    classes = b.loop("classes", shape[1], uneven=True)
    b.read(logits, [rows[0], classes, *rows[1:]])
    b.read(target, rows)
    b.write([] if reduction else rows, synced=[classes])


@rule("aten.nll_loss_nd.default", "aten.nll_loss.default")
def nll_loss(b: Builder) -> None:
    inputs, target = b.arg(0), b.arg(1)
    shape = b.tensor(inputs).shape
    if len(shape) == 1:
        raise Opaque(b.op.name)
    rows = [b.loop(f"d{i}", s) for i, s in enumerate(shape) if i != 1]
    b.read(inputs, [rows[0], None, *rows[1:]])
    b.read(target, rows)
    b.write([] if b.arg(3, "reduction", 1) else rows)


REDUCTION = {
    "aten.binary_cross_entropy.default": 3,
    "aten.binary_cross_entropy_with_logits.default": 4,
    "aten.hinge_embedding_loss.default": 3,
    "aten.poisson_nll_loss.default": 5,
} | dict.fromkeys(
    (f"aten.{name}_loss.default" for name in ("mse", "l1", "smooth_l1", "huber", "soft_margin")), 2
) | {"aten.kl_div.default": 2}  # fmt: skip
"""Losses of single elements -> position of their reduction (0 none, 1 mean, 2 sum)."""


@rule(*REDUCTION)
def elementwise_loss(b: Builder) -> None:
    """Every element of the operands is a loop; weights of elements or classes broadcast to them."""
    x, position = b.tensor(b.arg(0)).shape, REDUCTION[b.op.target]
    if x != b.tensor(b.arg(1)).shape:
        raise Opaque(b.op.name)
    loops = b.loops(x)
    b.read(b.arg(0), loops)
    b.read(b.arg(1), loops)
    weights = (b.arg(2, "weight"), b.arg(3, "pos_weight")) if "cross_entropy" in b.op.target else ()
    for weight in weights:
        if isinstance(weight, Ref):
            b.read(weight, loops[len(loops) - len(b.tensor(weight).shape) :])
    b.write([] if b.arg(position, "reduction", 1) else loops)


@rule("aten.gather.default", "aten.take_along_dim.default")
def gather(b: Builder) -> None:
    """Other dims split together; what is looked up stays whole, the looking up splits."""
    where = 2 if "gather" in b.op.target else 1
    shape, index = b.tensor(b.arg(0)).shape, b.tensor(b.arg(where)).shape
    dim = b.arg(3 - where, "dim")
    if dim is None or not shape or len(index) != len(shape):
        raise Opaque(b.op.name)
    dim %= len(shape)
    labels: list[Label] = [
        b.loop(f"d{i}", s) if i != dim and s == index[i] else None for i, s in enumerate(shape)
    ]
    found = list(labels)
    found[dim] = b.loop("index", index[dim])
    b.read(b.arg(0), labels)
    b.read(b.arg(where), found)
    b.write(found)


@rule("aten.index_select.default")
def index_select(b: Builder) -> None:
    shape = b.tensor(b.arg(0)).shape
    dim = b.arg(1) % len(shape)
    labels: list[Label] = [b.loop(f"d{i}", s) if i != dim else None for i, s in enumerate(shape)]
    rows = b.loop("index", b.tensor(b.arg(2)).shape[0])
    b.read(b.arg(0), labels)
    b.read(b.arg(2), [rows])
    b.write([rows if i == dim else label for i, label in enumerate(labels)])
