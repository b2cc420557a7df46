"""Control flow that is determined at import: a branch is taken, a loop is unrolled."""

from __future__ import annotations

from typing import Any

import torch

from tensoropt.capture.onnx.importer import Call, converter, positive
from tensoropt.capture.onnx.values import DataDependentError, OnnxError

_MAX_ITERATIONS = 4096


@converter("If")
def _if_(call: Call) -> Any:
    condition = call[0]
    if condition.data is None:
        raise DataDependentError(
            "which branch it takes depends on the values of an input; export the model without the condition"
        )
    assert call.run is not None
    branch = call.attribute("then_branch" if bool(condition.data) else "else_branch")
    return tuple(call.run(branch, []))


@converter("Loop")
def loop(call: Call) -> Any:
    assert call.run is not None
    body = call.attribute("body")
    count = int(call.scalar(0, _MAX_ITERATIONS + 1, "trip count"))
    running = bool(call.scalar(1, True, "condition"))
    state = [call[i] for i in range(2, len(call))]
    collected: list[list[Any]] = [[] for _ in range(len(body.output) - 1 - len(state))]
    step = 0
    while running and step < count:
        if step >= _MAX_ITERATIONS:
            raise OnnxError(f"it runs more than {_MAX_ITERATIONS} times")
        results = call.run(
            body, [call.builder.constant(step, torch.int64), call.builder.constant(True), *state]
        )
        if results[0].data is None:
            raise DataDependentError("when it ends depends on the values of an input")
        running = bool(results[0].data)
        state = results[1 : 1 + len(state)]
        for items, result in zip(collected, results[1 + len(state) :], strict=True):
            items.append(result)
        step += 1
    if any(not items for items in collected):
        raise OnnxError("it never runs, so its collected outputs have no shape")
    return (*state, *(torch.stack(items, 0) for items in collected))


@converter("Scan", since=9)
def scan(call: Call) -> Any:
    assert call.run is not None
    body, scanned = call.attribute("body"), int(call.attribute("num_scan_inputs"))
    states = len(call) - scanned
    state, inputs = [call[i] for i in range(states)], [call[states + i] for i in range(scanned)]
    outs = len(body.output) - states
    in_axes = call.attribute("scan_input_axes") or [0] * scanned
    in_axes = [positive(a, x.ndim) for a, x in zip(in_axes, inputs, strict=True)]
    backwards = call.attribute("scan_input_directions") or [0] * scanned
    length = inputs[0].shape[in_axes[0]]
    if length > _MAX_ITERATIONS:
        raise OnnxError(f"it runs {length} times; at most {_MAX_ITERATIONS} are unrolled")
    collected: list[list[Any]] = [[] for _ in range(outs)]
    for step in range(length):
        rows = [
            torch.select(x, a, length - 1 - step if back else step)
            for x, a, back in zip(inputs, in_axes, backwards, strict=True)
        ]
        results = call.run(body, [*state, *rows])
        state = results[:states]
        for items, result in zip(collected, results[states:], strict=True):
            items.append(result)
    out_axes = call.attribute("scan_output_axes") or [0] * outs
    turned = call.attribute("scan_output_directions") or [0] * outs
    stacked = [
        torch.stack(items[::-1] if back else items, axis)
        for items, axis, back in zip(collected, out_axes, turned, strict=True)
    ]
    return (*state, *stacked)


@converter("OptionalHasElement")
def _optional_has_element(call: Call) -> Any:
    return call.builder.constant(call.optional(0) is not None)


@converter("Optional", "OptionalGetElement")
def _optional_element(call: Call) -> Any:
    return (call[0],)
