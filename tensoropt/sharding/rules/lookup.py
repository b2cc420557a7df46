"""Embeddings, gathers and losses."""

from __future__ import annotations

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


@rule("aten.cross_entropy_loss.default")
def cross_entropy(b: Builder) -> None:
    """Rows are summed (with the true count for a mean); the classes may be split (``local`` does it)."""
    logits, target, weight = b.arg(0), b.arg(1), b.arg(2, "weight")
    reduction, smoothing = b.arg(3, "reduction", 1), b.arg(5, "label_smoothing", 0.0)
    shape, labels_shape = b.tensor(logits).shape, b.tensor(target).shape
    if weight is not None or len(shape) == len(labels_shape) or len(shape) == 1:
        raise Opaque(b.op.name)
    rows = [b.loop(f"d{i}", s) for i, s in enumerate(shape) if i != 1]
    classes = b.loop("classes", shape[1], uneven=True, splittable=not smoothing and len(shape) == 2)
    b.read(logits, [rows[0], classes, *rows[1:]])
    b.read(target, rows)
    b.write([] if reduction else rows, synced=[classes])


@rule("aten.nll_loss_nd.default", "aten.nll_loss.default")
def nll_loss(b: Builder) -> None:
    inputs, target, weight = b.arg(0), b.arg(1), b.arg(2, "weight")
    shape = b.tensor(inputs).shape
    if weight is not None or len(shape) == 1:
        raise Opaque(b.op.name)
    rows = [b.loop(f"d{i}", s) for i, s in enumerate(shape) if i != 1]
    b.read(inputs, [rows[0], None, *rows[1:]])
    b.read(target, rows)
    b.write([] if b.arg(3, "reduction", 1) else rows)


@rule(
    "aten.mse_loss.default", "aten.l1_loss.default", "aten.smooth_l1_loss.default", "aten.huber_loss.default",
    "aten.binary_cross_entropy.default", "aten.binary_cross_entropy_with_logits.default",
)  # fmt: skip
def elementwise_loss(b: Builder) -> None:
    x, y = b.tensor(b.arg(0)).shape, b.tensor(b.arg(1)).shape
    if x != y or b.op.kwargs.get("weight") is not None or b.op.kwargs.get("pos_weight") is not None:
        raise Opaque(b.op.name)
    index = {"aten.binary_cross_entropy.default": 3, "aten.binary_cross_entropy_with_logits.default": 4}
    reduction = b.arg(index.get(b.op.target, 2), "reduction", 1)
    if any(a is not None for a in b.op.args[2 : index.get(b.op.target, 2)]):
        raise Opaque(b.op.name)
    loops = b.loops(x)
    b.read(b.arg(0), loops)
    b.read(b.arg(1), loops)
    b.write([] if reduction else loops)


@rule("aten.gather.default")
def gather(b: Builder) -> None:
    shape, index = b.tensor(b.arg(0)).shape, b.tensor(b.arg(2)).shape
    dim = b.arg(1) % len(shape)
    labels: list[Label] = [
        b.loop(f"d{i}", s) if i != dim and s == index[i] else None for i, s in enumerate(shape)
    ]
    b.read(b.arg(0), labels)
    b.read(b.arg(2), labels)
    b.write(labels)


@rule("aten.index_select.default")
def index_select(b: Builder) -> None:
    shape = b.tensor(b.arg(0)).shape
    dim = b.arg(1) % len(shape)
    labels: list[Label] = [b.loop(f"d{i}", s) if i != dim else None for i, s in enumerate(shape)]
    rows = b.loop("index", b.tensor(b.arg(2)).shape[0])
    b.read(b.arg(0), labels)
    b.read(b.arg(2), [rows])
    b.write([rows if i == dim else label for i, label in enumerate(labels)])
