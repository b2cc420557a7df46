"""Recurrent layers (LSTM, GRU, RNN), each as one call: only the batch may be split."""

from __future__ import annotations

from typing import Any

from torch.utils.flop_counter import shape_wrapper

from tensoropt.graph import Operator, Ref
from tensoropt.ops.calls import CostClass, OpSpec, Precision
from tensoropt.ops.index_space import Builder, Loops, Opaque, alike


@alike("has_biases num_layers bidirectional")
def _recurrent(b: Builder) -> None:
    states = b.arg(1) if isinstance(b.arg(1), (list, tuple)) else [b.arg(1)]
    dropout, train, batch_first = b.arg(5), b.arg(6), b.arg(8)
    shape = b.tensor(b.arg(0)).shape
    # Dropout between layers happens inside the call, where no counter-based mask can be used.
    if len(shape) != 3 or (dropout and train):
        raise Opaque(b.op.name)
    n = b.loop("batch", shape[0 if batch_first else 1])
    sequence: list[Loops] = [n, None, None] if batch_first else [None, n, None]
    b.read(b.arg(0), sequence)
    for state in states:
        b.read(state, [None, n, None])
    for weight in b.arg(2):
        if isinstance(weight, Ref):
            b.read(weight, [None] * len(b.tensor(weight).shape))
    b.write(sequence)
    for index in range(1, len(b.op.outputs)):
        b.write([None, n, None], index)


def _drops_between_layers(op: Operator) -> bool:
    return bool(op.args[5] and op.args[6])


def _layer_flops(x: Any, w: Any, h: Any, *_: Any, **__: Any) -> int:
    return 2 * int(x[0]) * int(x[1]) * (int(w[0]) * int(w[1]) + int(h[0]) * int(h[1]))


def _layer_backward_flops(x: Any, w: Any, h: Any, *_: Any, **__: Any) -> int:
    return 2 * _layer_flops(x, w, h)


SPECS = (
    OpSpec(
        targets=("aten.lstm.input", "aten.gru.input", "aten.rnn_tanh.input", "aten.rnn_relu.input"),
        rule=_recurrent,
        cost_class=CostClass.RECURRENT,
        precision=Precision.NARROW,
        flops={
            "aten::mkldnn_rnn_layer": shape_wrapper(_layer_flops),
            "aten::mkldnn_rnn_layer_backward": shape_wrapper(_layer_backward_flops),
        },
        # The gates and the cell of an LSTM.
        reserve={"aten.lstm.input": 5, "aten.gru.input": 6},
        draws=_drops_between_layers,
    ),
)
