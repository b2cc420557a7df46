"""What kernels of ours move on a GPU, beside operands and results of the one kernel that they stand for."""

from __future__ import annotations

from math import prod

import pytest

from tensoropt.costs.compute import _call_class, moved_bytes
from tensoropt.graph import Ref
from tensoropt.ops.calls import LocalCall
from tensoropt.ops.families.norms import BATCH_NORM
from tensoropt.ops.registry import _SPECS, cost_class_of
from tensoropt.profiling.fact_finding import find_facts
from tensoropt.profiling.workload import TensorSpec, Workload

WHOLE, PARTS = (32, 64, 14, 14), 8
BY_BATCH = (WHOLE[0] // PARTS, *WHOLE[1:])
BY_CHANNELS = (WHOLE[0], WHOLE[1] // PARTS, *WHOLE[2:])
COUNT = WHOLE[0] * WHOLE[2] * WHOLE[3]
BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}
BATCH_AXIS = (1,)


def moved(call: LocalCall, shapes: dict[str, tuple[tuple[int, ...], str]], results: int = 1) -> float:
    """The bytes that a call moves on a GPU, as a multiple of its largest operand."""
    inputs = tuple(
        (name, TensorSpec(shape, dtype, name == "x"), "read") for name, (shape, dtype) in shapes.items()
    )
    names = tuple(f"y{i}" for i in range(results))
    facts = find_facts(Workload(inputs, ((call, names),), None, names[:1], {}), capability=(8, 0))
    (of,) = facts.work_of_calls
    largest = max(prod(shape) * BYTES[dtype] for shape, dtype in shapes.values())
    return moved_bytes(_call_class(call), of) / largest


def batch_norm(function: str, shape: tuple[int, ...], dtype: str, *static: object) -> float:
    names = ("x", "weight", "bias", "mean", "var")
    shapes = dict.fromkeys(names, ((shape[1],), "float32")) | {"x": (shape, dtype)}
    arguments = (*map(Ref, names), True, 0.1, 1e-5)
    return moved(LocalCall(function, arguments, {}, "norm", static), shapes, 5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_batch_norm_moves_the_same_however_it_is_split(dtype: str) -> None:
    """Its input twice and its result once: statistics need all of it before the first result."""
    by_batch = batch_norm("kernels.sync_batch_norm", BY_BATCH, dtype, BATCH_AXIS, COUNT)
    by_channels = batch_norm(BATCH_NORM, BY_CHANNELS, dtype)
    assert by_batch == pytest.approx(3.0, rel=0.1)
    assert by_channels == pytest.approx(by_batch, rel=0.1)
    # Every operand and result once is two passes.
    assert by_batch < 2 * 2.0


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_batch_norm_in_steps_moves_as_much_as_in_one(dtype: str) -> None:
    statistics = ((2, WHOLE[1]), "float32")
    sums = LocalCall("kernels.batch_norm_sums", (Ref("x"), True), {}, "sums")
    arguments = (Ref("x"), Ref("statistics"), None, None, 1e-5)
    by_statistics = LocalCall("kernels.batch_norm_by_statistics", arguments, {}, "norm")
    x = {"x": (BY_BATCH, dtype)}
    assert moved(sums, x) == pytest.approx(1.0, rel=0.1)
    assert moved(by_statistics, {**x, "statistics": statistics}) == pytest.approx(2.0, rel=0.1)


def test_kernels_have_the_class_of_what_they_stand_for() -> None:
    for spec in _SPECS:
        for name in spec.kernels:
            assert cost_class_of(name) is spec.cost_class, name
