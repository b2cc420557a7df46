"""Operator graphs as JSON: everything comes back, the fingerprint too."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tensoropt.graph.ir import (
    Operator,
    OperatorGraph,
    Ref,
    Tensor,
    TorchLiteral,
    graph_from_dict,
    graph_to_dict,
)


def graph(*args, **kwargs) -> OperatorGraph:
    tensors = [
        Tensor("x", (2, 3), "float32", "input", False, "0"),
        Tensor("w", (3,), "bfloat16", "parameter", True, "layer.weight", "float32"),
        Tensor("y", (2, 3), "float32", "activation", True),
    ]
    return OperatorGraph(
        tensors={t.name: t for t in tensors},
        operators=(Operator("y", "aten.odd.default", args, kwargs, ("y",), "layer", "model.py:3"),),
        inputs=("x",),
        outputs=("y",),
        mutations={},
        aliases={"tied.weight": "layer.weight"},
        training=False,
        notes=("a note",),
        compute_dtype="bfloat16",
    )


def there_and_back(value: OperatorGraph) -> OperatorGraph:
    return graph_from_dict(json.loads(json.dumps(graph_to_dict(value), allow_nan=False)))


@pytest.mark.parametrize(
    "argument",
    [
        None, True, 3, -0.0, 1e-12, float("inf"), -float("inf"), "mean", [1, -1], (1, 2), [(Ref("w"), None)],
        TorchLiteral("float32"), (), [],
    ],
    ids=repr,
)  # fmt: skip
def test_every_kind_of_argument_comes_back(argument):
    made = graph(Ref("x"), argument, scale=argument)
    found = there_and_back(made)
    assert found == made
    assert found.fingerprint == made.fingerprint
    assert repr(found.operators) == repr(made.operators)  # lists stay lists, tuples tuples


def test_values_of_constants_are_left_out():
    constant = Tensor("c", (2,), "float32", "constant")
    made = graph(Ref("x"))
    made = replace(made, tensors={**made.tensors, "c": constant}, constants={"c": object()})
    assert there_and_back(made).constants == {}


def test_what_no_file_can_hold_is_named():
    with pytest.raises(TypeError, match=r"y \(aten.odd.default\) has an argument.*is a complex"):
        graph_to_dict(graph(Ref("x"), 1j))
