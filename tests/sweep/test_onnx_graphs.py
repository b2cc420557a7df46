"""Random ONNX graphs give what the onnx package's own evaluator gives.

A graph is a chain of the standard's own cases that are imported alone: nodes with the attributes and the
other operands that the package ships. What one of them gives is bent into what the next one takes: the case's
operand, and a tenth of it.
"""

from __future__ import annotations

import random
import warnings
from functools import cache
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from tensoropt.capture.onnx import OnnxError, import_onnx
from tests.capture.onnx.models import ran
from tests.capture.onnx.test_nodes import cases, decoded, imported

QUICK, NODES, SIZE = 10, 4, 24
STEEP = 1e-3
"""Relative: chains of a few float32 kernels that sum in another order."""


@cache
def links() -> dict[str, list[Any]]:
    """The cases of one node whose first operand and result are floats, by its operator."""

    def fits(case: Any) -> bool:
        graph = case.model.graph
        draws = "training_dropout" in case.name or "bernoulli" in case.name
        if len(graph.node) != 1 or draws or len(case.data_sets[0][0]) != len(graph.input):
            return False
        first, *_ = (decoded(value) for value in case.data_sets[0][0] or [None])
        made = decoded(case.data_sets[0][1][0])
        floats = all(isinstance(v, np.ndarray) and v.dtype == np.float32 for v in (first, made))
        return floats and first.size > 0 and 0 < made.size <= 4096 and graph.node[0].domain == ""

    found: dict[str, list[Any]] = {}
    for case in filter(fits, cases()):
        found.setdefault(case.model.graph.node[0].op_type, []).append(case)
    return found


@cache
def is_imported(name: str) -> bool:
    """Whether a case alone is imported."""
    try:
        return bool(imported(next(case for of in links().values() for case in of if case.name == name)))
    except OnnxError:
        return False


def built(seed: int) -> tuple[onnx.ModelProto, list[str]]:
    """A chain of random cases, and their names."""
    rng = random.Random(seed)
    chain = []
    while len(chain) < NODES:
        case = rng.choice(links()[rng.choice(list(links()))])
        chain += [case] if is_imported(case.name) else []
    nodes, held, value, size, results = [], [], "x", SIZE, []
    for number, case in enumerate(chain):
        names = [i.name for i in case.model.graph.input]
        arrays = [np.asarray(decoded(value)) for value in case.data_sets[0][0]]
        places = np.arange(arrays[0].size).reshape(arrays[0].shape) % size
        own = {"flat": np.array([-1]), "places": places, "tenth": np.float32(0.1)}
        own |= dict(zip(names, arrays, strict=True))
        held += [numpy_helper.from_array(np.asarray(a), f"{name}_{number}") for name, a in own.items()]
        bent = [
            ("Reshape", "result flat", "row"),
            ("Gather", "row places", "formed"),
            ("Tanh", "formed", "bent"),
            ("Mul", "bent tenth", "small"),
            ("Add", f"small {names[0]}", "operand"),
        ]
        for operator, taken, given in bent:
            read = [f"{name}_{number}" if name != "result" else value for name in taken.split()]
            nodes.append(helper.make_node(operator, read, [f"{given}_{number}"]))
        made = onnx.NodeProto()
        made.CopyFrom(case.model.graph.node[0])
        made.name = f"case_{number}"
        taken = ["operand" if name == names[0] else name for name in made.input]
        made.input[:] = [f"{name}_{number}" if name else "" for name in taken]
        made.output[:] = [f"made{i}_{number}" if name else "" for i, name in enumerate(made.output)]
        nodes.append(made)
        value, size = f"made0_{number}", decoded(case.data_sets[0][1][0]).size
        results.append(helper.make_tensor_value_info(value, onnx.TensorProto.FLOAT, None))
    given = [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [SIZE])]
    graph = helper.make_graph(nodes, "chain", given, results, held)
    newest = max(case.model.opset_import[0].version for of in links().values() for case in of)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", newest)])
    return model, [case.name for case in chain]


def outcome(seed: int) -> str:
    """``right``, why it is refused, or what is wrong (which begins with "wrong")."""
    model, names = built(seed)
    x = np.random.default_rng(seed).standard_normal(SIZE).astype(np.float32)
    try:
        wanted = ReferenceEvaluator(model).run(None, {"x": x})
    except Exception as error:
        return f"the evaluator fails: {type(error).__name__}"
    try:
        found = [value.numpy() for value in ran(import_onnx(model).module, torch.from_numpy(x.copy()))]
    except OnnxError as error:
        return str(error)
    except Exception as error:  # neither right nor refused
        return f"wrong: {names}: {type(error).__name__}: {error}"
    for name, got, want in zip(names, found, wanted, strict=True):
        if got.shape != want.shape or not np.allclose(got, want, STEEP, STEEP, equal_nan=True):
            first = f"{got.flatten()[:4]} {got.shape} for {want.flatten()[:4]} {want.shape}"
            return f"wrong: {name} of {names}: {first}"
        if not np.isfinite(want).all():
            break  # what operators make of these is nobody's standard
    return "right"


def outcomes(seeds: range) -> list[str]:
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        return [outcome(seed) for seed in seeds]


@pytest.mark.parametrize(
    "seeds", [range(QUICK), pytest.param(range(1000, 1200), marks=pytest.mark.slow)], ids=str
)
def test_graphs_are_imported_right(seeds: range) -> None:
    found = outcomes(seeds)
    assert [one for one in found if one.startswith("wrong")] == []
    assert found.count("right") > len(seeds) / 2, found


def test_a_wrong_result_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    run = ReferenceEvaluator.run
    monkeypatch.setattr(
        ReferenceEvaluator, "run", lambda self, *given: [np.asarray(v) + 1 for v in run(self, *given)]
    )
    assert all(one != "right" for one in outcomes(range(3)))
