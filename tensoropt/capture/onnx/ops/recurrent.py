"""LSTM, GRU and RNN, in the forms that PyTorch supports.

ONNX stacks gates as i, o, f, c (LSTM) and z, r, h (GRU); PyTorch as i, f, g, o and r, z, n.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tensoropt.capture.onnx.importer import Call, converter
from tensoropt.capture.onnx.values import OnnxError, Traced

_TORCH_ORDER = {"LSTM": (0, 2, 3, 1), "GRU": (1, 0, 2), "RNN": (0,)}
"""The position of each of PyTorch's gates in ONNX's stack."""
_ACTIVATIONS = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"], "RNN": ["Tanh"]}


@converter("LSTM", "GRU", "RNN")
def _recurrent(call: Call) -> Any:
    x, size = call[0], call.attribute("hidden_size") or call[2].shape[-1]
    direction = call.attribute("direction", "forward")
    directions = 2 if direction == "bidirectional" else 1
    activations = call.attribute("activations") or _ACTIVATIONS[call.op] * directions
    _refuse_other_forms(call, x.shape[0], activations)
    steps, batch = x.shape[:2]

    def state(index: int) -> Traced:
        if call.optional(index) is not None:
            return call[index]
        return call.builder.known(torch.zeros((), dtype=x.dtype).expand(directions, batch, size))

    weights = _weights(call, directions, size)
    options = (call.optional(3) is not None, 1, 0.0, False, directions == 2, False)
    if call.op == "LSTM":
        out, *states = call.builder.call(torch.lstm, x, [state(5), state(6)], weights, *options)
    else:
        relu = activations[0].capitalize() == "Relu"
        function = torch.gru if call.op == "GRU" else torch.rnn_relu if relu else torch.rnn_tanh
        out, *states = call.builder.call(function, x, state(5), weights, *options)
    return out.reshape(steps, batch, directions, size).permute(0, 2, 1, 3), *states


def _refuse_other_forms(call: Call, steps: int, activations: list[str]) -> None:
    count = len(_ACTIVATIONS[call.op])
    kinds = [
        [name.capitalize() for name in activations[i : i + count]] for i in range(0, len(activations), count)
    ]
    usual = [_ACTIVATIONS[call.op]] + [["Relu"]] * (call.op == "RNN")
    other = {
        "direction='reverse'": call.attribute("direction", "forward") == "reverse",
        "layout=1": call.attribute("layout", 0),
        "clip": call.attribute("clip") is not None,
        "input_forget": call.attribute("input_forget", 0),
        "peepholes": call.op == "LSTM" and call.optional(7) is not None,
        "linear_before_reset=0": call.op == "GRU" and not call.attribute("linear_before_reset", 0),
        "other activations": kinds[0] not in usual or kinds[1:] not in ([], kinds[:1]),
        "sequences of several lengths": call.optional(4) is not None
        and any(n != steps for n in call.ints(4, "sequence lengths")),
    }
    for form, present in other.items():
        if present:
            raise OnnxError(f"a recurrent layer with {form} cannot be imported; export PyTorch's own layer")


def _weights(call: Call, directions: int, size: int) -> list[Traced]:
    order = _TORCH_ORDER[call.op]
    weights: list[Traced] = []
    for d in range(directions):
        weights += [_reordered(torch.select(call[i], 0, d), size, order) for i in (1, 2)]
        if call.optional(3) is not None:
            # ONNX stores both biases in one row, the input's first, as PyTorch's layers take them.
            both, rows = torch.select(call[3], 0, d), len(order) * size
            weights += [_reordered(torch.narrow(both, 0, start, rows), size, order) for start in (0, rows)]
    return weights


def _reordered(value: Traced, size: int, order: Sequence[int]) -> Traced:
    if len(order) == 1:
        return value
    return torch.cat([torch.narrow(value, 0, gate * size, size) for gate in order], 0)
