"""Every case that the onnx package ships for its operators: imported and right, or refused with a reason.

Making the cases is most of what they cost, so one test goes through all of them.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from tensoropt.capture.onnx import OnnxError, import_onnx
from tests.capture.onnx.models import ran

RANDOM = re.compile("bernoulli|training_dropout(_default)?$")
"""Only shape and type can be compared: the generator is another one."""
REFUSALS = (
    "unsupported operators",
    "cannot be imported",
    "is a sequence, map or optional",
    "is a sequence; only tensors can be returned",
    "depends on an input's values",
    "depends on the values of an input",
    "PyTorch does not support this resizing",
    "are understood; export it again",
    "dims must be at least 1",
)
LEAST_RIGHT = 0.55
"""Of all cases; their number grows with every release of the package."""
LOW_PRECISION = {torch.float16: 2e-3, torch.bfloat16: 2e-2}


@functools.cache
def cases() -> tuple[Any, ...]:
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tuple(collect_testcases(None))


def decoded(value: Any) -> Any:
    return onnx.numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else value


def tensor(value: Any) -> torch.Tensor:
    """A case's value as PyTorch holds it."""
    array = np.asarray(decoded(value))
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.astype(np.float32)).to(torch.bfloat16)
    return torch.from_numpy(np.array(array))


def imported(case: Any) -> Any:
    """The case with as few of its inputs constant as the operator allows."""
    given = map(decoded, case.data_sets[0][0])
    values = dict(zip([v.name for v in case.model.graph.input], given, strict=True))
    shapes = {n: np.shape(v) for n, v in values.items() if isinstance(v, np.ndarray | np.generic)}
    names = list(shapes)
    whole = {n for n in names if values[n].dtype.kind in "iub"}
    error: OnnxError | None = None
    for constant in (set(), whole, set(names[1:]), set(names)):
        model = onnx.ModelProto()
        model.CopyFrom(case.model)
        dims = {}
        for value in model.graph.input:
            if value.name in constant:
                held = np.array(values[value.name], order="C")
                model.graph.initializer.append(onnx.numpy_helper.from_array(held, value.name))
            elif value.name in shapes:
                sizes = value.type.tensor_type.shape.dim
                open_dims = [i for i, d in enumerate(sizes) if d.dim_value <= 0]
                dims |= {f"{value.name}[{i}]": shapes[value.name][i] for i in open_dims}
        try:
            return import_onnx(model, dims)
        except OnnxError as found:
            error = error or found
    assert error is not None
    raise error


def outcome(case: Any) -> str:
    """``right``, ``random``, ``refused``, or what is wrong."""
    try:
        model = imported(case)
    except OnnxError as error:
        return "refused" if any(reason in str(error) for reason in REFUSALS) else f"{case.name}: {error}"
    inputs, outputs = case.data_sets[0]
    given = dict(zip([v.name for v in case.model.graph.input], inputs, strict=True))
    found = ran(model.module, *(tensor(given[i.name]) for i in model.inputs))
    wrong = list(differences(case, found, [tensor(v) for v in outputs]))
    if wrong:
        return f"{case.name}: {wrong[0]}"
    return "random" if RANDOM.search(case.name.removesuffix("_expanded")) else "right"


def differences(case: Any, found: list[torch.Tensor], wanted: list[torch.Tensor]) -> Iterator[str]:
    for got, want in zip(found, wanted, strict=True):
        if (got.shape, got.dtype) != (want.shape, want.dtype):
            yield f"{got.dtype} {list(got.shape)} instead of {want.dtype} {list(want.shape)}"
        elif not RANDOM.search(case.name.removesuffix("_expanded")):
            least = LOW_PRECISION.get(got.dtype, 0.0)
            rtol, atol = max(case.rtol, 1e-3, least), max(case.atol, 1e-5, least)
            if not np.allclose(got.double(), want.double(), rtol, atol, equal_nan=True):
                yield f"{float((got.double() - want.double()).abs().max()):.3g} off"


def test_a_wrong_result_is_found() -> None:
    case, one = SimpleNamespace(name="test_add", rtol=1e-3, atol=1e-5), torch.ones(2)
    assert [list(differences(case, [got], [one])) for got in (one, one + 1)] == [[], ["1 off"]]
    assert list(differences(case, [one.double()], [one]))
    assert list(differences(case, [one[:1]], [one]))


@pytest.mark.slow
def test_every_case_of_the_standard() -> None:
    found = Counter(map(outcome, cases()))
    wrong = [name for name in found if name not in ("right", "random", "refused")]
    assert not wrong, "\n".join(wrong)
    assert found["right"] >= LEAST_RIGHT * len(cases()), found
