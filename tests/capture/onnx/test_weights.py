"""Which constants of a file train."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch

from tensoropt.capture.onnx import import_onnx
from tensoropt.capture.onnx.weights import DECLARED
from tests.capture.onnx.models import model, node, ran

RANDOM = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)


def trained(op: str, value: np.ndarray, *, declared: str = "", other: str = "") -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters of ``op(x, c)``, for a constant c of which the file says ``declared``, and
    says ``other`` of another tensor.
    """
    proto = model([node(op, "x c", "y")], {"x": [4, 4]}, ["y"], {"c": value})
    for name, kind in (("c", declared), ("elsewhere", other)):
        if kind:
            info = proto.graph.value_info.add()
            info.name = name
            entry = info.metadata_props.add()
            entry.key, entry.value = DECLARED, kind
    imported = import_onnx(onnx.ModelProto.FromString(proto.SerializeToString()))
    x = torch.randn(4, 4)
    compute = {"Add": torch.add, "Mul": torch.mul, "Sub": torch.sub, "MatMul": torch.matmul}[op]
    torch.testing.assert_close(ran(imported.module, x)[0], compute(x, torch.as_tensor(value)))
    return {name: tuple(p.shape) for name, p in imported.module.named_parameters()}


GRID = np.arange(16, dtype=np.float32).reshape(4, 4)


@pytest.mark.parametrize(
    ("op", "value", "trains"),
    [
        ("Add", RANDOM, True),
        ("Add", np.ones(4, np.float32), True),
        ("Mul", np.zeros(4, np.float32), True),
        ("Add", GRID, False),
        ("MatMul", GRID, True),
        ("Sub", RANDOM, False),
        ("Mul", np.float32([3.0]), False),
        ("Add", np.float32([[0, 0, -1e4, -1e4]]), False),
        ("Add", np.float32([0, 0, 0, -np.inf]), False),
    ],
)
def test_use_and_values_decide(op: str, value: np.ndarray, trains: bool) -> None:
    assert bool(trained(op, value)) == trains


def test_what_the_exporter_says_goes_first() -> None:
    assert trained("Sub", RANDOM, declared="PARAMETER")
    assert trained("Mul", np.float32(2.5), declared="PARAMETER") == {"c": ()}
    assert not trained("Add", RANDOM, declared="BUFFER")
    assert not trained("MatMul", RANDOM, declared="CONSTANT_TENSOR")


def test_whole_numbers_are_computed_in_a_file_that_names_its_parameters() -> None:
    zeros = np.zeros((4, 4), np.float32)
    assert trained("Add", zeros)
    assert not trained("Add", zeros, other="PARAMETER")
    assert trained("Add", RANDOM, other="PARAMETER")


def test_what_was_repeated_trains_once() -> None:
    row = np.repeat(RANDOM[:1], 4, 0)
    assert trained("Add", row) == {"c": (1, 4)}
    assert trained("Add", row, declared="PARAMETER") == {"c": (4, 4)}
    assert trained("Add", np.ones((4, 4), np.float32)) == {"c": (4, 4)}
    proto = model([node("Add", "x c", "y")], {"x": [4, 4]}, ["y"], {"c": row})
    (note,) = import_onnx(proto).notes
    assert note == "c of shape [4, 4] repeats its values; a parameter of shape [1, 4] is trained instead"
