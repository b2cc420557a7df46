"""Every converter against the cases and reference outputs that the onnx package ships for each operator."""

from __future__ import annotations

import functools
import re
import warnings
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from tensoropt.capture.onnx import OnnxError, import_onnx
from tensoropt.capture.onnx.reader import MAX_OPSET, MIN_OPSET
from tensoropt.capture.onnx.registry import supported
from tests.capture.onnx.models import ran

CASES_PER_OPERATOR = 2
NO_CASES = {"Constant", "ConstantOfShape", "Shape", "Size"}
"""Folded at import; other tests see their results."""
DIFFERENT_ON_PURPOSE = re.compile(
    "bernoulli|training_dropout|_fp16|_bf16|uint(16|32|64)|bitwise_not_3d|FLOAT8|FLOAT4|INT4|INT2"
    "|string|local_window|bidirectional_window|roialign_mode_max|nan_robustness|fullymasked|softmax_precision"
)
"""Random numbers, 16-bit rounding, element types that PyTorch does not compute with."""
NATIVE = {"float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool"}
REFUSED = re.compile(
    "scan_sum|nonmaxsuppression|_seq|_opt|sequence_map|optional|padded_kv|diff_heads_mask4d_padded"
)
"""Data-dependent shapes and sequences as inputs."""


@functools.cache
def cases() -> dict[str, list[Any]]:
    """By operator, cases of a single node of that operator."""
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found: dict[str, list[Any]] = {}
        for case in collect_testcases(None):
            nodes = case.model.graph.node
            opset = case.model.opset_import[0].version
            known = (
                MIN_OPSET <= opset <= MAX_OPSET
                and len(nodes) == 1
                and nodes[0].op_type in supported()
                and not nodes[0].domain
            )
            if (
                known
                and usable(case)
                and not DIFFERENT_ON_PURPOSE.search(case.name)
                and not REFUSED.search(case.name)
            ):
                found.setdefault(nodes[0].op_type, []).append(case)
    return found


def usable(case: Any) -> bool:
    """Whether NumPy and PyTorch share the element types of all its tensors, and it has tensors only."""
    values = [v for part in case.data_sets[0] for v in part]
    if not all(isinstance(v, (np.ndarray, np.generic, onnx.TensorProto)) for v in values):
        return False
    return all(as_array(v).dtype.name in NATIVE for v in values)


def as_array(value: Any) -> Any:
    return onnx.numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else value


def imported(case: Any, arrays: dict[str, np.ndarray]) -> Any:
    """The case with as few of its inputs constant as the operator allows."""
    names = list(arrays)
    error: OnnxError | None = None
    whole = {name for name, value in arrays.items() if value.dtype.kind in "iub"}
    for constant in (set(), whole, set(names[1:]), set(names)):
        model = onnx.ModelProto()
        model.CopyFrom(case.model)
        dims = {}
        for value in model.graph.input:
            if value.name in constant:
                model.graph.initializer.append(
                    onnx.numpy_helper.from_array(np.ascontiguousarray(arrays[value.name]), value.name)
                )
            else:
                dims |= {
                    f"{value.name}[{i}]": arrays[value.name].shape[i]
                    for i, d in enumerate(value.type.tensor_type.shape.dim)
                    if d.dim_value <= 0
                }
        try:
            return import_onnx(model, dims)
        except OnnxError as found:
            error = error or found
    assert error is not None
    raise error


def check(case: Any) -> None:
    inputs, outputs = ([as_array(v) for v in part] for part in case.data_sets[0])
    names = [v.name for v in case.model.graph.input]
    arrays = {name: np.asarray(value) for name, value in zip(names, inputs, strict=True)}
    model = imported(case, arrays)
    got = ran(model.module, *(torch.from_numpy(arrays[i.name].copy()) for i in model.inputs))
    for found, expected in zip(got, (as_array(v) for v in outputs), strict=False):
        assert found.numpy().dtype == expected.dtype, case.name
        assert found.shape == expected.shape, case.name
        np.testing.assert_allclose(
            found.numpy(), expected, rtol=max(case.rtol, 1e-3), atol=max(case.atol, 1e-5), err_msg=case.name
        )


@pytest.mark.parametrize(
    "operator", [name for name in supported() if "." not in name and name not in NO_CASES]
)
def test_operator_computes_what_the_standard_says(operator: str) -> None:
    known = cases().get(operator, [])
    if not known:
        pytest.skip(f"the onnx package has no case for {operator} alone")
    if operator == "QLinearMatMul" and np.lib.NumpyVersion(np.__version__) < "2.0.0":
        pytest.skip("the package computes this case with casts to int8, which wrapped before numpy 2")
    step = max(len(known) // CASES_PER_OPERATOR, 1)
    for case in known[::step][:CASES_PER_OPERATOR]:
        check(case)


@pytest.mark.slow
def test_every_case_of_the_standard() -> None:
    failed = []
    for group in cases().values():
        for case in group:
            try:
                check(case)
            except OnnxError as error:
                if "opset" not in str(error) and "depends on" not in str(error):
                    failed.append(f"{case.name}: {error}")
            except AssertionError as error:
                failed.append(f"{case.name}: {error}")
    assert not failed, "\n".join(failed)
