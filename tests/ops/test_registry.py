"""The registry of operators: every operator is spoken of in one module, and every stage asks the registry."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tensoropt
from tensoropt.graph import Operator, Ref
from tensoropt.ops.calls import CostClass, LocalCall, Precision
from tensoropt.ops.families.stages import ARRIVE, DEPART
from tensoropt.ops.kernels import SingleDevice
from tensoropt.ops.overloads import packet_of, resolve_overload, returns_one_tensor
from tensoropt.ops.registry import (
    _BY_TARGET,
    _FAMILIES,
    _SPECS,
    KERNELS,
    bind,
    cost_class_of,
    evaluated,
    flops_of,
    launches,
    precision_of,
    resolve_function,
    samples_of,
    spec_of,
    timed_limits,
)

PACKAGE = Path(tensoropt.__file__).parent
FAMILY_FOLDER = PACKAGE / "ops" / "families"
TRANSLATES = PACKAGE / "capture"
"""Capture turns one call into another, and ONNX operators into calls; it keeps no facts about them."""

ONNX = PACKAGE / "capture" / "onnx"
"""Speaks of ONNX's operators, some of which are called like PyTorch's."""
PYTHON_CALLS = PACKAGE / "capture" / "forward_calls.py"
"""Follows calls of Python functions while a model is exported; no operators of a graph."""
WORDS = PACKAGE / "report" / "step_parts.py"
"""Says what people call operators; nothing follows from it but what is shown."""

NAMES_IN_USE = frozenset(
    {
        "kernels.mean_as_sum", "kernels.divided", "kernels.seeded", "kernels.random", "kernels.bernoulli",
        "kernels.dropout", "kernels.attention_with_dropout",
        "kernels.causal_attention_in_blocks", "kernels.ring_attention", "kernels.vocabulary_embedding",
        "kernels.embedding_bag", "kernels.index_relative", "kernels.sync_batch_norm",
        "kernels.batch_norm_sums", "kernels.batch_norm_statistics", "kernels.batch_norm_by_statistics",
        "loss_kernels.cross_entropy", "loss_kernels.nll_loss", "expert_kernels.grouped_mm",
        "expert_kernels.experts", "kernels.arrive", "kernels.depart", "quantised_kernels.quantised_linear",
    }
)  # fmt: skip
"""As they stand in profile stores and saved explorations."""


def strings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def modules_without(*folders: Path) -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        if not any(path.is_relative_to(folder) for folder in folders):
            yield str(path.relative_to(PACKAGE)), ast.parse(path.read_text())


def test_no_other_stage_names_an_operator():
    found = [
        f"{name}:{line} {text}"
        for name, tree in modules_without(FAMILY_FOLDER, TRANSLATES)
        for line, text in strings(tree)
        if text in _BY_TARGET
    ]
    assert not found, "say it in the operator's OpSpec"


def test_no_other_stage_keeps_a_table_of_operators():
    """A table is a literal of three operators or more, by their names without namespace and overload."""
    packets = {packet_of(t) for t in _BY_TARGET} | {n for spec in _SPECS for n in spec.without_rule}
    found = []
    for name, tree in modules_without(FAMILY_FOLDER, ONNX, PYTHON_CALLS, WORDS):
        for node in ast.walk(tree):
            items: list[ast.expr | None] = []
            if isinstance(node, ast.Set | ast.Tuple | ast.List):
                items = [*node.elts]
            elif isinstance(node, ast.Dict):
                items = [*node.keys]
            texts = [i.value for i in items if isinstance(i, ast.Constant) and isinstance(i.value, str)]
            if len(texts) > 2 and packets.issuperset(texts):
                found.append(f"{name}:{node.lineno} {texts}")
    assert not found, "say it in the operators' OpSpec"


def test_every_operator_is_spoken_of_in_one_module():
    spoken = defaultdict(set)
    for family in _FAMILIES:
        for spec in family.SPECS:
            for name in (*map(packet_of, spec.targets), *spec.without_rule):
                spoken[name].add(family.__name__.rsplit(".", 1)[1])
    shared = {name: sorted(families) for name, families in spoken.items() if len(families) > 1}
    # `max(x, dim)` is a reduction and `max(x, y)` is element-wise: one name, two operators.
    assert shared == {name: ["pointwise", "reductions"] for name in ("max", "min")}


def test_every_rule_is_for_an_operator_that_exists():
    """Or for one of a pipeline's stages, of which PyTorch knows nothing: they run as kernels."""
    targets = {name for name, spec in _BY_TARGET.items() if spec.rule is not None} - {ARRIVE, DEPART}
    assert all(map(resolve_function, targets))  # raises where there is none


def test_kernels_keep_their_names():
    assert set(KERNELS) == NAMES_IN_USE


def test_a_kernel_that_is_not_there_is_named():
    with pytest.raises(AttributeError, match=r"kernels\.missing"):
        resolve_function("kernels.missing")


def test_what_nobody_said_is_the_default():
    mine = "mine.operator.default"
    said = (spec_of(mine).rule, precision_of(mine), cost_class_of(mine), samples_of(mine).limits)
    assert said == (None,) * 4
    assert launches(mine)
    assert flops_of("mine::operator") is None


def test_what_operators_return():
    one = [returns_one_tensor(f"aten.{name}") for name in ("dropout.default", "split.Tensor", "max.dim")]
    assert one == [True, False, False]
    assert resolve_overload("aten.dropout.default") is torch.ops.aten.dropout.default


def test_classes_and_precision_hold_for_every_overload():
    assert precision_of("aten.softmax.Dimname") is Precision.WIDE
    assert precision_of("aten.convolution.default") is Precision.NARROW
    assert cost_class_of("aten.conv2d.padding") is CostClass.CONVOLUTION
    assert cost_class_of("loss_kernels.cross_entropy") is CostClass.LOSS
    assert not launches("aten.view.default")
    assert not launches("aten.transpose_.default")


def test_indices_of_timings_stay_in_range():
    shapes = {"w": (50, 8), "i": (4, 6), "x": (4, 7), "y": (4,)}
    for function, args, limits in (
        ("kernels.vocabulary_embedding", (Ref("w"), Ref("i")), {"i": 50}),
        ("aten.cross_entropy_loss.default", (Ref("x"), Ref("y")), {"y": 7}),
        ("aten.index.Tensor", (Ref("x"), [Ref("y")]), {}),
    ):
        assert dict(timed_limits(LocalCall(function, args, {}), shapes.__getitem__)) == limits


def test_a_kernel_is_bound_to_its_context():
    x = torch.ones(3)
    call = LocalCall("kernels.mean_as_sum", (Ref("x"),), {}, "mean", ("aten.sum.default", 6))
    assert bind(call, SingleDevice())(x) == 0.5
    assert bind(LocalCall("aten.sum.default", (Ref("x"),), {}), SingleDevice())(x) == 3


def test_evaluating_leaves_dropout_out():
    op = Operator("drop", "aten.dropout.default", (Ref("x"), 0.5, True), {}, ("drop",))
    call = LocalCall("kernels.dropout", (Ref("x"), 0.5), {}, "drop", ((),))
    assert evaluated(op, call) == LocalCall("aten.alias.default", (Ref("x"),), {}, "drop")
    other = Operator("relu", "aten.relu.default", (Ref("x"),), {}, ("relu",))
    assert evaluated(other, call) is call
