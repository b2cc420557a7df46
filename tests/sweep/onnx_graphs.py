"""Random ONNX graphs, imported and run, beside the package's own evaluator.

A graph is a chain of the standard's own cases that are imported alone: nodes with the attributes and the
other operands that the package ships. What one of them gives is bent into what the next one takes: the case's
operand, and a tenth of it. ``python -m tests.sweep.onnx_graphs 200`` runs so many.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from functools import cache
from math import ceil, prod
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from tensoropt.capture.onnx import OnnxError, import_onnx
from tests.capture.onnx.models import node, ran
from tests.capture.onnx.test_nodes import cases, decoded, imported

NODES = 4
SIZE = 24
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
        graph = case.model.graph
        names = [i.name for i in graph.input]
        arrays = [np.asarray(decoded(value)) for value in case.data_sets[0][0]]
        shape, count = arrays[0].shape, arrays[0].size
        own = {
            "flat": np.array([-1]), "times": np.array([ceil(count / size)]), "start": np.array([0]),
            "end": np.array([count]), "shape": np.array(shape, np.int64), "tenth": np.float32(0.1),
        }  # fmt: skip
        own |= dict(zip(names, arrays, strict=True))
        held += [numpy_helper.from_array(np.asarray(a), f"{name}_{number}") for name, a in own.items()]

        def named(text: str, number: int = number) -> str:
            return " ".join(f"{word}_{number}" for word in text.split())

        nodes += [
            helper.make_node("Reshape", [value, named("flat")], [named("row")]),
            node("Tile", named("row times"), named("tiled")),
            node("Slice", named("tiled start end"), named("cut")),
            node("Tanh", named("cut"), named("bent")),
            node("Mul", named("bent tenth"), named("small")),
            node("Reshape", named("small shape"), named("formed")),
            helper.make_node("Add", [named("formed"), named(names[0])], [named("operand")]),
        ]
        made = onnx.NodeProto()
        made.CopyFrom(graph.node[0])
        made.name = f"case_{number}"
        taken = ["operand" if name == names[0] else name for name in graph.node[0].input]
        made.input[:] = [f"{name}_{number}" if name else "" for name in taken]
        made.output[:] = [f"made{i}_{number}" if name else "" for i, name in enumerate(graph.node[0].output)]
        nodes.append(made)
        value, size = f"made0_{number}", prod(decoded(case.data_sets[0][1][0]).shape)
        results.append(helper.make_tensor_value_info(value, onnx.TensorProto.FLOAT, None))
    graph = helper.make_graph(
        nodes,
        "chain",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [SIZE])],
        results,
        held,
    )
    newest = max(case.model.opset_import[0].version for of in links().values() for case in of)
    imports = [helper.make_opsetid("", newest)]
    return helper.make_model(graph, opset_imports=imports), [case.name for case in chain]


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
    for name, got, want in zip(names, found, wanted, strict=True):
        if got.shape != want.shape or not np.allclose(got, want, STEEP, STEEP, equal_nan=True):
            first = f"{got.flatten()[:4]} {got.shape} for {want.flatten()[:4]} {want.shape}"
            return f"wrong: {name} of {names}: {first}"
        if not np.isfinite(want).all():
            break  # what operators make of these is nobody's standard
    return "right"


def outcomes(seeds: range) -> Iterator[str]:
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        for seed in seeds:
            try:
                yield outcome(seed)
            except Exception as error:  # neither right nor refused
                yield f"wrong: {built(seed)[1]}: {type(error).__name__}: {error}"


def main() -> None:
    from tests.sweep.__main__ import kind_of

    counted = Counter(
        kind_of(one) if one[:5] != "wrong" else one for one in outcomes(range(int(sys.argv[1])))
    )
    for why, count in counted.most_common():
        print(count, why)


if __name__ == "__main__":
    main()
