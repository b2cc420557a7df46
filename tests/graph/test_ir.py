"""The operator graph's own invariants, without PyTorch, and its JSON, which brings back everything."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest

from tensoropt.graph import Operator, OperatorGraph, Ref, Tensor, TorchLiteral, iter_refs, map_refs
from tensoropt.graph.ir import graph_from_dict, graph_to_dict


def graph(**changes) -> OperatorGraph:
    """``y = relu(x @ w)``, ``z = y + y``."""
    tensors = [
        Tensor("x", (4, 8), "float32", "input"),
        Tensor("w", (8, 2), "bfloat16", "parameter", True, "layer.weight", "float32"),
        Tensor("h", (4, 2), "float32", "activation", True),
        Tensor("y", (4, 2), "float32", "activation", True),
        Tensor("z", (4, 2), "float32", "activation", True),
    ]
    operators = (
        Operator("mm", "aten.mm.default", (Ref("x"), Ref("w")), {}, ("h",)),
        Operator("relu", "aten.relu.default", (Ref("h"),), {}, ("y",)),
        Operator("add", "aten.add.Tensor", (Ref("y"), Ref("y")), {"alpha": 1}, ("z",)),
    )
    parts = {
        "tensors": {t.name: t for t in tensors},
        "operators": operators,
        "inputs": ("x",),
        "outputs": ("z",),
    }
    return OperatorGraph(**{**parts, **changes})


def test_sizes():
    w = graph().tensors["w"]
    assert (w.elements, w.element_bytes, w.bytes) == (16, 2, 32)
    assert Tensor("scalar", (), "int64", "constant").bytes == 8
    assert Tensor("nothing", (0, 4), "float32", "activation").bytes == 0


def test_who_makes_and_who_reads():
    g = graph()
    assert g.producer["y"].name == "relu"
    assert "x" not in g.producer
    assert [op.name for op in g.consumers["y"]] == ["add"]  # once, though read twice
    assert g.by_name["add"].inputs() == ("y", "y")
    assert [t.name for t in g.parameters] == ["w"]


def test_references_inside_lists_and_keywords():
    value = (Ref("a"), [Ref("b"), None, (Ref("c"), 3)])
    assert list(iter_refs(value)) == ["a", "b", "c"]
    assert map_refs(value, str.upper) == ("A", ["B", None, ("C", 3)])
    op = Operator("f", "aten.f.default", (Ref("a"),), {"mask": Ref("m"), "scale": 2.0}, ("y",))
    assert op.inputs() == ("a", "m")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda g: {"operators": g.operators[1:]}, "relu reads h before it is made"),
        (lambda g: {"operators": g.operators[::-1]}, "add reads y before it is made"),
        (lambda g: {"operators": (*g.operators, g.operators[0])}, "two operators are called mm"),
        (lambda g: {"outputs": ("lost",)}, "lost is listed but never made"),
        (lambda g: {"mutations": {"x": "lost"}}, "lost is listed but never made"),
        (
            lambda g: {"operators": (*g.operators, dataclasses.replace(g.operators[1], name="again"))},
            "y is made twice",
        ),
        (
            lambda g: {"operators": (dataclasses.replace(g.operators[0], outputs=("q",)),)},
            "mm makes the unknown tensor q",
        ),
    ],
)
def test_broken_graphs_are_refused(change, message):
    with pytest.raises(AssertionError, match=message):
        graph(**change(graph()))


def test_the_fingerprint_tells_what_is_computed():
    g = graph()
    assert g.fingerprint == graph().fingerprint
    wider = {**g.tensors, "x": dataclasses.replace(g.tensors["x"], dtype="float64")}
    other = (*g.operators[:2], dataclasses.replace(g.operators[2], kwargs={"alpha": 2}))
    prints = [h.fingerprint for h in (g, graph(tensors=wider), graph(operators=other), graph(training=False))]
    assert len(set(prints)) == 4
    # Where the code stands does not matter.
    moved = tuple(dataclasses.replace(op, source="elsewhere", module="m") for op in g.operators)
    assert graph(operators=moved).fingerprint == g.fingerprint


def test_the_graph_needs_no_pytorch():
    code = "import sys, tensoropt.graph; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# -- as JSON ----------------------------------------------------------------------------------------


def odd(*args, **kwargs) -> OperatorGraph:
    """A graph that has something of everything, and an operator with these arguments."""
    operator = Operator("odd", "aten.odd.default", args, kwargs, ("z",), "layer", "model.py:3")
    more = {"aliases": {"tied.weight": "layer.weight"}, "notes": ("a note",), "compute_dtype": "bfloat16"}
    return graph(operators=(*graph().operators[:2], operator), training=False, **more)


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
    made = odd(Ref("x"), argument, scale=argument)
    found = there_and_back(made)
    assert found == made
    assert found.fingerprint == made.fingerprint
    assert repr(found.operators) == repr(made.operators)  # lists stay lists, tuples tuples


def test_values_of_constants_are_left_out():
    constant = Tensor("c", (2,), "float32", "constant")
    made = graph(tensors={**graph().tensors, "c": constant}, constants={"c": object()})
    assert there_and_back(made).constants == {}


def test_what_no_file_can_hold_is_named():
    with pytest.raises(TypeError, match=r"odd \(aten.odd.default\) has an argument.*is a complex"):
        graph_to_dict(odd(Ref("x"), 1j))
