"""Recurrent layers that are one call: only the batch splits (the hidden state feeds all of itself)."""

from __future__ import annotations

from tensoropt.graph import Ref
from tensoropt.sharding.rules.registry import Builder, Label, Opaque, rule


@rule("aten.lstm.input", "aten.gru.input", "aten.rnn_tanh.input", "aten.rnn_relu.input")
def recurrent(b: Builder) -> None:
    """``input [t, b, i]`` (``[b, t, i]`` batch-first), states ``[layers, b, h]``, weights whole."""
    states = b.arg(1) if isinstance(b.arg(1), (list, tuple)) else [b.arg(1)]
    dropout, train, batch_first = b.arg(5), b.arg(6), b.arg(8)
    shape = b.tensor(b.arg(0)).shape
    if len(shape) != 3 or (dropout and train):
        raise Opaque(b.op.name)
    n = b.loop("batch", shape[0 if batch_first else 1])
    sequence: list[Label] = [n, None, None] if batch_first else [None, n, None]
    b.read(b.arg(0), sequence)
    for state in states:
        b.read(state, [None, n, None])
    for weight in b.arg(2):
        if isinstance(weight, Ref):
            b.read(weight, [None] * len(b.tensor(weight).shape))
    b.write(sequence)
    for index in range(1, len(b.op.outputs)):
        b.write([None, n, None], index)
