"""LSTM, GRU and RNN: PyTorch's own if it computes the same, otherwise unrolled step by step.

ONNX stacks gates as i, o, f, c (LSTM) and z, r, h (GRU); PyTorch as i, f, g, o and r, z, n.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from tensoropt.capture.onnx.importer import Call, converter
from tensoropt.capture.onnx.values import OnnxError, Traced

_MAX_STEPS = 2048
"""The most steps of an unrolled sequence."""
_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
_TORCH_ORDER = {"LSTM": (0, 2, 3, 1), "GRU": (1, 0, 2), "RNN": (0,)}
_DEFAULTS = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"], "RNN": ["Tanh"]}


@dataclass(frozen=True)
class _Layer:
    """One call with its operands; time comes first, states are (directions, batch, hidden)."""

    call: Call
    x: Traced
    weight: Traced
    recurrence: Traced
    bias: Traced
    lengths: list[int] | None
    hidden: Traced
    cell: Traced
    peepholes: Traced
    directions: int
    size: int
    activations: list[str]

    @property
    def op(self) -> str:
        return self.call.op


@converter("LSTM", "GRU", "RNN")
def recurrent(call: Call) -> Any:
    layer = _layer(call)
    outputs = _whole(layer) if _is_torchs(layer) else _unrolled(layer)
    return _arranged(call, layer, outputs)


def _layer(call: Call) -> _Layer:
    x, size = call[0], call.attribute("hidden_size") or call[2].shape[-1]
    batch_first = bool(call.attribute("layout", 0))
    x = torch.transpose(x, 0, 1) if batch_first else x
    directions = 2 if call.attribute("direction", "forward") == "bidirectional" else 1
    steps, batch = x.shape[:2]
    lengths = call.ints(4, "sequence lengths") if call.optional(4) is not None else None
    if lengths is not None and all(n == steps for n in lengths):
        lengths = None

    def state(index: int) -> Traced:
        initial = call.optional(index)
        if initial is None:
            return call.builder.known(torch.zeros((), dtype=x.dtype).expand(directions, batch, size))
        return torch.transpose(initial, 0, 1) if batch_first else initial

    lstm = call.op == "LSTM"
    names = call.attribute("activations") or _DEFAULTS[call.op] * directions
    return _Layer(
        call=call,
        x=x,
        weight=call[1],
        recurrence=call[2],
        bias=call.optional(3),
        lengths=lengths,
        hidden=state(5),
        cell=state(6) if lstm else None,
        peepholes=call.optional(7) if lstm else None,
        directions=directions,
        size=size,
        activations=[n[:1].upper() + n[1:] for n in names],
    )


def _is_torchs(layer: _Layer) -> bool:
    call = layer.call
    # PyTorch's fused layers lack lengths, clipping, coupled gates, peepholes, and backward only.
    plain = layer.lengths is None and call.attribute("clip") is None and not call.attribute("input_forget", 0)
    plain = plain and layer.peepholes is None and call.attribute("direction", "forward") != "reverse"
    default = layer.activations == _DEFAULTS[layer.op] * layer.directions
    if layer.op == "GRU":
        # PyTorch's GRU applies the reset gate after the recurrent product.
        return plain and default and bool(call.attribute("linear_before_reset", 0))
    if layer.op == "RNN":
        return plain and (default or set(layer.activations) == {"Relu"})
    return plain and default


def _gate_rows(value: Traced, layer: _Layer, order: Sequence[int]) -> Traced:
    """Return the rows of stacked gates, reordered."""
    size = layer.size
    if list(order) == list(range(len(order))):
        return value
    return torch.cat([torch.narrow(value, 0, gate * size, size) for gate in order], 0)


def _whole(layer: _Layer) -> tuple[Traced, Traced, Traced]:
    order, gates = _TORCH_ORDER[layer.op], _GATES[layer.op]
    weights: list[Traced] = []
    for d in range(layer.directions):
        weights.append(_gate_rows(torch.select(layer.weight, 0, d), layer, order))
        weights.append(_gate_rows(torch.select(layer.recurrence, 0, d), layer, order))
        if layer.bias is not None:
            both = torch.select(layer.bias, 0, d)
            rows = gates * layer.size
            # ONNX stores both biases in one row, the input's first, as PyTorch's layers take them.
            for start in (0, rows):
                weights.append(_gate_rows(torch.narrow(both, 0, start, rows), layer, order))
    arguments = (layer.bias is not None, 1, 0.0, False, layer.directions == 2, False)
    builder = layer.call.builder
    if layer.op == "LSTM":
        out, hidden, cell = builder.call(torch.lstm, layer.x, [layer.hidden, layer.cell], weights, *arguments)
        return out, hidden, cell
    function = {"GRU": torch.gru, "RNN": torch.rnn_tanh}[layer.op]
    if layer.op == "RNN" and layer.activations[0] == "Relu":
        function = torch.rnn_relu
    out, hidden = builder.call(function, layer.x, layer.hidden, weights, *arguments)
    return out, hidden, None


# -- unrolled --------------------------------------------------------------------------------------


def _activation(layer: _Layer, index: int) -> Callable[[Traced], Traced]:
    name = layer.activations[index]
    alphas, betas = (
        layer.call.attribute("activation_alpha") or [],
        layer.call.attribute("activation_beta") or [],
    )
    alpha = alphas[index] if index < len(alphas) else None
    beta = betas[index] if index < len(betas) else None
    functions: dict[str, Callable[[Traced], Traced]] = {
        "Affine": lambda v: v * (1.0 if alpha is None else alpha) + (0.0 if beta is None else beta),
        "Elu": lambda v: F.elu(v, 1.0 if alpha is None else alpha),
        "HardSigmoid": lambda v: torch.clamp(
            v * (0.2 if alpha is None else alpha) + (0.5 if beta is None else beta), 0.0, 1.0
        ),
        "LeakyRelu": lambda v: F.leaky_relu(v, 0.01 if alpha is None else alpha),
        "Relu": torch.relu,
        "ScaledTanh": lambda v: (
            torch.tanh(v * (1.0 if beta is None else beta)) * (1.0 if alpha is None else alpha)
        ),
        "Sigmoid": torch.sigmoid,
        "Softplus": F.softplus,
        "Softsign": F.softsign,
        "Tanh": torch.tanh,
        "ThresholdedRelu": lambda v: F.threshold(v, 1.0 if alpha is None else alpha, 0.0),
    }
    if name not in functions:
        raise OnnxError(f"its activation '{name}' is unknown")
    clip = layer.call.attribute("clip")
    function = functions[name]
    return function if clip is None else lambda v: function(torch.clamp(v, -clip, clip))


def _unrolled(layer: _Layer) -> tuple[Traced, Traced, Traced]:
    steps = layer.x.shape[0]
    if steps > _MAX_STEPS:
        raise OnnxError(f"its form has to be unrolled, over {steps} steps; at most {_MAX_STEPS} are")
    outs, hiddens, cells = [], [], []
    for d in range(layer.directions):
        backward = d == 1 or layer.call.attribute("direction", "forward") == "reverse"
        out, hidden, cell = _direction(layer, d, backward)
        outs.append(out)
        hiddens.append(hidden)
        cells.append(cell)
    cell = torch.stack(cells, 0) if layer.cell is not None else None
    return torch.cat(outs, 2), torch.stack(hiddens, 0), cell


def _direction(layer: _Layer, d: int, backward: bool) -> tuple[Traced, Traced, Traced]:
    step = {"LSTM": _lstm_step, "GRU": _gru_step, "RNN": _rnn_step}[layer.op](layer, d)
    hidden = torch.select(layer.hidden, 0, d)
    cell = None if layer.cell is None else torch.select(layer.cell, 0, d)
    gates = _GATES[layer.op] * layer.size
    bias = None if layer.bias is None else torch.narrow(torch.select(layer.bias, 0, d), 0, 0, gates)
    # The inputs' product for all steps at once: only the recurrent part has to wait for the previous step.
    inputs = F.linear(layer.x, torch.select(layer.weight, 0, d), bias)
    steps = range(layer.x.shape[0])
    outputs_by_step: dict[int, Traced] = {}
    for t in reversed(steps) if backward else steps:
        new_hidden, new_cell = step(torch.select(inputs, 0, t), hidden, cell)
        if layer.lengths is None:
            hidden, cell, outputs_by_step[t] = new_hidden, new_cell, new_hidden
            continue
        runs = layer.call.builder.constant([[t < n] for n in layer.lengths])
        # Beyond a sequence's end, outputs are zero and the state stays unchanged.
        outputs_by_step[t] = torch.where(runs, new_hidden, torch.zeros_like(new_hidden))
        hidden = torch.where(runs, new_hidden, hidden)
        cell = None if cell is None else torch.where(runs, new_cell, cell)
    return torch.stack([outputs_by_step[t] for t in steps], 0), hidden, cell


_Step = Callable[[Traced, Traced, Traced], tuple[Traced, Traced]]


def _recurrent_bias(layer: _Layer, d: int) -> Traced:
    if layer.bias is None:
        return None
    rows = _GATES[layer.op] * layer.size
    return torch.narrow(torch.select(layer.bias, 0, d), 0, rows, rows)


def _rnn_step(layer: _Layer, d: int) -> _Step:
    matrix, bias, act = torch.select(layer.recurrence, 0, d), _recurrent_bias(layer, d), _activation(layer, d)

    def step(x: Traced, hidden: Traced, cell: Traced) -> tuple[Traced, Traced]:
        return act(x + F.linear(hidden, matrix, bias)), None

    return step


def _gru_step(layer: _Layer, d: int) -> _Step:
    size, first = layer.size, 2 * d
    gate, candidate = _activation(layer, first), _activation(layer, first + 1)
    matrix, bias = torch.select(layer.recurrence, 0, d), _recurrent_bias(layer, d)
    before = bool(layer.call.attribute("linear_before_reset", 0))

    def part(value: Traced, start: int, count: int) -> Traced:
        return (
            None
            if value is None
            else torch.narrow(value, value.ndim - 1 if value.ndim == 1 else 0, start, count)
        )

    gate_matrix, gate_bias = part(matrix, 0, 2 * size), part(bias, 0, 2 * size)
    last_matrix, last_bias = part(matrix, 2 * size, size), part(bias, 2 * size, size)

    def step(x: Traced, hidden: Traced, cell: Traced) -> tuple[Traced, Traced]:
        gates = gate(torch.narrow(x, 1, 0, 2 * size) + F.linear(hidden, gate_matrix, gate_bias))
        update, reset = torch.narrow(gates, 1, 0, size), torch.narrow(gates, 1, size, size)
        if before:
            recurrent_part = reset * F.linear(hidden, last_matrix, last_bias)
        else:
            recurrent_part = F.linear(reset * hidden, last_matrix, last_bias)
        new = candidate(torch.narrow(x, 1, 2 * size, size) + recurrent_part)
        return new + update * (hidden - new), None

    return step


def _lstm_step(layer: _Layer, d: int) -> _Step:
    size, first = layer.size, 3 * d
    f, g, h = (_activation(layer, first + i) for i in range(3))
    matrix, bias = torch.select(layer.recurrence, 0, d), _recurrent_bias(layer, d)
    peep = None if layer.peepholes is None else torch.select(layer.peepholes, 0, d)
    coupled = bool(layer.call.attribute("input_forget", 0))

    def step(x: Traced, hidden: Traced, cell: Traced) -> tuple[Traced, Traced]:
        total = x + F.linear(hidden, matrix, bias)
        i, o, forget, c = (torch.narrow(total, 1, k * size, size) for k in range(4))

        def seen(value: Traced, index: int, state: Traced) -> Traced:
            return value if peep is None else value + torch.narrow(peep, 0, index * size, size) * state

        i = f(seen(i, 0, cell))
        forget = 1.0 - i if coupled else f(seen(forget, 2, cell))
        new_cell = forget * cell + i * g(c)
        return f(seen(o, 1, new_cell)) * h(new_cell), new_cell

    return step


def _arranged(call: Call, layer: _Layer, outputs: tuple[Traced, Traced, Traced]) -> Any:
    """Return the outputs in ONNX's layout: (time, directions, batch, hidden), or batch first with ``layout``
    1.
    """
    out, hidden, cell = outputs
    steps, batch, _ = out.shape
    out = out.reshape(steps, batch, layer.directions, layer.size)
    if call.attribute("layout", 0):
        states = [s if s is None else torch.transpose(s, 0, 1) for s in (hidden, cell)]
        return (out.permute(1, 0, 2, 3), *states)
    return out.permute(0, 2, 1, 3), hidden, cell
