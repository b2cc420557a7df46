"""Comparison of an imported ONNX file with the same file run by onnx's own evaluator."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tensoropt.capture.steps import difference
from tensoropt.engine.models import ModelSpec
from tensoropt.errors import MeasurementError, TensorOptError
from tensoropt.question.model_source import OnnxOptions, is_onnx
from tensoropt.ranks.worker_process import call_in_fork

_ALLOWED_S = 30.0
"""The time limit in seconds of the evaluator, which runs in plain NumPy."""
_LARGEST_BYTES = 1 << 28
"""The maximum size of a compared file; the evaluator holds several copies of it."""
_TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Tolerance by an output's dtype, relative to the output's largest value; 1e-3 for others. Assumptions."""
_RANDOM = ("RandomNormal", "RandomUniform")


@dataclass(frozen=True)
class FileFindings:
    """The result of comparing a file with its import.

    Attributes:
        difference: the largest relative difference of any output; None if not compared.
        ok: whether the difference is rounding.
        why: why the file was not compared, or "".
    """

    difference: float | None
    ok: bool = True
    why: str = ""


def verify_file(spec: ModelSpec) -> FileFindings | None:
    """Compare an imported ONNX file with onnx's evaluator on example inputs; None for other models."""
    if not is_onnx(spec.source):
        return None
    if Path(spec.source).stat().st_size > _LARGEST_BYTES:
        return FileFindings(None, why="it is too large for onnx's evaluator")
    options = spec.onnx or OnnxOptions()
    try:
        return call_in_fork(lambda: _compared(spec.source, options, spec.seed), _ALLOWED_S)
    except MeasurementError as error:
        return FileFindings(None, why=f"onnx's evaluator: {error}")


def _compared(source: str, options: OnnxOptions, seed: int) -> FileFindings:
    import numpy as np
    import onnx
    from onnx.reference import ReferenceEvaluator

    from tensoropt.capture.onnx import import_onnx

    torch.set_num_threads(1)
    try:
        imported = import_onnx(source, dict(options.dims), outputs=options.outputs)
        model = onnx.load(source)
        drawn = sorted({node.op_type for node in model.graph.node if node.op_type.startswith(_RANDOM)})
        if drawn:
            return FileFindings(None, why=f"{drawn[0]} draws other numbers")
        example = imported.example(seed)
        feeds = {i.name: value.numpy() for i, value in zip(imported.inputs, example, strict=True)}
        wanted = ReferenceEvaluator(model).run(list(imported.outputs), feeds)
        with torch.no_grad():
            result: Any = imported.module.eval()(*example)
    except TensorOptError:
        raise
    except Exception as error:  # the evaluator lacks operators, and files may do anything
        return FileFindings(None, why=f"onnx's evaluator fails ({type(error).__name__})")
    results = [result] if isinstance(result, torch.Tensor) else list(result)
    worst, right = 0.0, True
    for got, other in zip(results, wanted, strict=True):
        # By way of NumPy, as PyTorch does not read all of its types.
        far = difference(got, torch.from_numpy(np.asarray(other).astype(np.float64)), floor=1e-6)
        worst, right = max(worst, far), right and far <= _TOLERANCE.get(got.dtype, 1e-3)
    return FileFindings(worst, ok=right)
