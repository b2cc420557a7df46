"""Converters of control flow, which is resolved at import: a branch is chosen, a loop is unrolled."""

from __future__ import annotations

from typing import Any

import torch

from tensoropt.capture.onnx.importer import Call, converter
from tensoropt.capture.onnx.values import OnnxError

_MAX_ITERATIONS = 4096


@converter("If")
def _if_(call: Call) -> Any:
    condition = call[0]
    if condition.data is None:
        raise OnnxError(
            "which branch it takes depends on the values of an input; export the model without the condition"
        )
    branch = call.attribute("then_branch" if bool(condition.data) else "else_branch")
    return tuple(call.run(branch, []))


@converter("Loop")
def _loop(call: Call) -> Any:
    body = call.attribute("body")
    count = int(call.scalar(0, _MAX_ITERATIONS + 1, "trip count"))
    running = bool(call.scalar(1, True, "condition"))
    state = [call[i] for i in range(2, len(call))]
    collected: list[list[Any]] = [[] for _ in range(len(body.output) - 1 - len(state))]
    step = 0
    while running and step < count:
        if step >= _MAX_ITERATIONS:
            raise OnnxError(f"it runs more than {_MAX_ITERATIONS} times; export a shorter loop")
        results = call.run(
            body, [call.builder.constant(step, torch.int64), call.builder.constant(True), *state]
        )
        if results[0].data is None:
            raise OnnxError("its number of iterations depends on an input's values; export a fixed number")
        running = bool(results[0].data)
        state = results[1 : 1 + len(state)]
        for items, result in zip(collected, results[1 + len(state) :], strict=True):
            items.append(result)
        step += 1
    if any(not items for items in collected):
        raise OnnxError("without iterations the shape of its stacked outputs is unknown; remove this loop")
    return (*state, *(torch.stack(items, 0) for items in collected))
