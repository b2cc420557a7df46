"""What a step reads and computes: samples, tokens, FLOP; what is not known says why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tensoropt.plan.findings import Findings

MODEL_FLOPS = "model_flops"
"""The name in an exploration's report of FLOP by number format (:mod:`tensoropt.plan.model_flops`)."""
_INTEGERS = ("int64", "int32", "int16", "int8", "uint8")
_LOOKUP = "aten.embedding"


@dataclass(frozen=True)
class StepWork:
    """What a step reads and computes.

    Attributes:
        samples, tokens: of the global batch; None where unknown.
        flops: of the model by number format; None where unknown.
        whys: by the name of an attribute that is None, why.
    """

    samples: int | None
    tokens: int | None
    flops: Mapping[str, float] | None
    whys: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, found: Findings) -> StepWork:
        """The step that an exploration is of."""
        whys: dict[str, str] = {}
        inputs = list(_inputs(found))
        samples, why = _samples(found, inputs)
        if samples is None:
            whys["samples"] = why
        tokens, why = _tokens(found, inputs, samples)
        if tokens is None:
            whys["tokens"] = why
        flops = found.report.get(MODEL_FLOPS)
        if flops is None:
            whys["flops"] = "it was saved without the FLOP of its model; explore or recost it again"
        return cls(samples, tokens, flops, whys)


def _inputs(found: Findings) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """(name, shape, dtype) of what a caller passes, as far as that is known."""
    if found.recorded is not None:
        graph = found.recorded.graph
        for name in graph.inputs:
            yield name, tuple(graph.tensors[name].shape), graph.tensors[name].dtype
        return
    call: Mapping[str, Any] = found.model.call or {}
    named = [*enumerate(call.get("args", ())), *call.get("kwargs", {}).items()]
    for name, value in named:
        if isinstance(value, Mapping) and "tensor" in value:
            yield str(name), tuple(value["tensor"]), str(value["dtype"])


def _samples(found: Findings, inputs: list[tuple[str, tuple[int, ...], str]]) -> tuple[int | None, str]:
    sizes = list(dict.fromkeys(shape[0] for _, shape, _ in inputs if shape))
    if len(sizes) == 1 and sizes[0] > 0:
        return sizes[0], ""
    if found.model.batch:  # what the command line asked of a model of the zoo
        return found.model.batch, ""
    if not sizes:
        return None, "the shapes of the model's inputs were not saved"
    return None, f"its inputs have no batch in common (first sizes {', '.join(map(str, sizes))})"


def _tokens(
    found: Findings, inputs: list[tuple[str, tuple[int, ...], str]], samples: int | None
) -> tuple[int | None, str]:
    """Tokens are numbers that an embedding looks up: batch × sequence."""
    numbers = {
        name: shape
        for name, shape, dtype in inputs
        if dtype in _INTEGERS and len(shape) == 2 and shape[0] == samples
    }
    if found.recorded is not None:
        read = _looked_up(found)
        numbers = {name: shape for name, shape in numbers.items() if name in read}
    else:
        numbers = {name: shape for name, shape in numbers.items() if name == "input_ids"}
    lengths = list(dict.fromkeys(shape[1] for shape in numbers.values()))
    if len(lengths) == 1 and samples:
        return samples * lengths[0], ""
    if lengths:
        return None, f"it reads sequences of {' and '.join(map(str, lengths))} tokens a sample; count samples"
    return None, "it reads no sequences of token numbers; count samples"


def _looked_up(found: Findings) -> set[str]:
    """Inputs that an embedding reads as they are."""
    return {
        name
        for operator in found.recorded.graph.operators
        if operator.target.startswith(_LOOKUP)
        for name in operator.inputs()
    }
