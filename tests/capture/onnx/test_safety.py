"""Corrupt, truncated and hostile files: one clear error, bounded memory, nothing read or run elsewhere."""

from __future__ import annotations

import contextlib
import os
import random
import resource
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

from tensoropt.capture.onnx import OnnxError, import_onnx
from tensoropt.capture.onnx.values import FOLDED_BYTES
from tests.capture.onnx.models import LIGHT, model, node, perceptron, ran

INT = np.int64


def refused(proto: onnx.ModelProto, match: str, dims: dict[str, int] | None = None) -> str:
    with pytest.raises(OnnxError, match=match) as caught:
        import_onnx(proto, dims)
    return str(caught.value)


# -- what is not supported ------------------------------------------------------------------------


def test_unsupported_operators_are_listed_together() -> None:
    nodes = [
        node("Foo", "x", "a"),
        node("Foo", "a", "b"),
        helper.make_node("Bar", ["b"], ["y"], name="last", domain="shop.example"),
    ]
    text = refused(model(nodes, {"x": [2]}, ["y"]), "unsupported operators")
    assert "Foo (nodes foo_a, foo_b)" in text
    assert "shop.example.Bar (nodes last)" in text


def test_other_obstacles_are_listed_beside_them() -> None:
    nodes = [
        node("Foo", "x", "a"),
        node("NonZero", "x", "b"),
        node("Add", "a a", "y"),
        node("Cast", "b", "z", to=1),
    ]
    text = refused(model(nodes, {"x": [2]}, ["y", "z"]), "Foo")
    assert "NonZero 'nonzero_b'" in text
    assert "--output" in text


def test_old_and_future_opsets() -> None:
    for opset in (6, 99):
        refused(model([node("Neg", "x", "y")], {"x": [2]}, ["y"], opset=opset), f"opset {opset}")


# -- malformed graphs -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "output", "match"),
    [
        ([node("Add", "x b", "a"), node("Neg", "a", "b")], "b", "cycle"),
        ([node("Add", "x nobody", "y")], "y", "'nobody', which is not defined"),
        ([node("Neg", "x", "y"), node("Abs", "x", "y")], "y", "'y' is defined twice"),
        ([node("Neg", "x", "y")], "z", "'z' is defined by no node"),
    ],
)
def test_circles_and_missing_and_repeated_names(nodes: list[onnx.NodeProto], output: str, match: str) -> None:
    refused(model(nodes, {"x": [2]}, [output]), match)


def test_nodes_are_sorted_without_a_deep_stack_and_those_that_no_output_needs_left_out() -> None:
    nodes = [node("Neg", f"v{i}" if i else "x", f"v{i + 1}") for i in range(3001)][::-1]
    proto = model([*nodes, node("NonZero", "v3", "z")], {"x": [2]}, ["z"])
    assert ran(import_onnx(proto, outputs=["v3001"]).module, torch.ones(2))[0].tolist() == [-1.0, -1.0]


def test_functions_that_multiply_or_call_themselves() -> None:
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("here", 1)]

    def function(name: str, calls: str, times: int) -> onnx.FunctionProto:
        nodes = [
            helper.make_node(calls, ["a" if i == 0 else f"b{i - 1}"], [f"b{i}"], domain="here")
            for i in range(times)
        ]
        return helper.make_function("here", name, ["a"], [f"b{times - 1}"], nodes, opsets)

    def proto(functions: list[onnx.FunctionProto]) -> onnx.ModelProto:
        made = model(
            [helper.make_node("F0", ["x"], ["y"], domain="here")], {"x": [2]}, ["y"], functions=functions
        )
        made.opset_import.append(helper.make_opsetid("here", 1))
        return made

    refused(proto([function("F0", "F0", 1)]), "call themselves")
    bomb = [function(f"F{i}", f"F{i + 1}", 30) for i in range(8)]
    refused(
        proto([*bomb, helper.make_function("here", "F8", ["a"], ["b"], [node("Neg", "a", "b")], opsets)]),
        "nodes",
    )


# -- sizes ----------------------------------------------------------------------------------------

BOMBS = {
    "constant of shape": (
        [node("ConstantOfShape", "s", "c"), node("Tile", "c r", "t")],
        {"s": INT([2**20, 2**10]), "r": INT([4, 4])},
    ),
    "tile": ([node("Tile", "v r", "t")], {"v": np.float32([1, 2]), "r": INT([2**40])}),
    "expand": (
        [node("Expand", "v s", "e"), node("Neg", "e", "t")],
        {"v": np.float32([1]), "s": INT([2**30, 2**9])},
    ),
    "range": ([node("Range", "a b c", "t")], {"a": np.float32(0), "b": np.float32(1e18), "c": np.float32(1)}),
    "one hot": ([node("OneHot", "v d o", "t")], {"v": INT([1]), "d": INT(2**50), "o": np.float32([0, 1])}),
    "pad": ([node("Pad", "v p", "t", mode="edge")], {"v": np.float32([1]), "p": INT([2**40, 2**40])}),
}


@pytest.mark.parametrize("case", BOMBS)
def test_bombs_are_not_built(case: str) -> None:
    nodes, constants = BOMBS[case]
    nodes = [*nodes, node("ReduceMax", "t", "m"), node("Add", "x m", "y")]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused(model(nodes, {"x": [2]}, ["y"], constants, opset=13), "")
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < FOLDED_BYTES


def test_absurd_inputs_and_initializers() -> None:
    refused(model([node("Neg", "x", "y")], {"x": [2**31, 2**31]}, ["y"]), "give smaller sizes")
    proto = perceptron()
    proto.graph.initializer[0].dims[0] = 2**60
    refused(proto, "cannot be read.*corrupt", {"batch": 2})
    proto.graph.initializer[0].dims[0] = -1
    refused(proto, "cannot be negative", {"batch": 2})


# -- files ----------------------------------------------------------------------------------------


def save(folder: Path) -> Path:
    """A model whose first weight lies in a file beside it."""
    folder.mkdir(exist_ok=True)
    path = folder / "m.onnx"
    onnx.save(perceptron(), path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    return path


def relocate(path: Path, key: str, value: str) -> None:
    proto = onnx.load(path, load_external_data=False)
    for entry in proto.graph.initializer[0].external_data:
        if entry.key == key:
            entry.value = value
    path.write_bytes(proto.SerializeToString())


def test_external_data_is_read(tmp_path: Path) -> None:
    x = torch.randn(2, 12)
    inside = ran(import_onnx(perceptron(), {"batch": 2}).module, x)
    outside = ran(import_onnx(save(tmp_path / "m"), {"batch": 2}).module, x)
    assert torch.equal(inside[0], outside[0])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("location", "../weights.bin"), ("location", "/etc/passwd"), ("location", "linked.bin"),
        ("location", "circle.bin"), ("location", "pipe"), ("location", "missing.bin"),
        ("offset", "99999999"), ("offset", "-4"), ("length", "3"), ("length", "many"),
    ],
)  # fmt: skip
def test_external_data_that_lies(tmp_path: Path, key: str, value: str) -> None:
    path = save(tmp_path / "m")
    (tmp_path / "weights.bin").write_bytes((path.parent / "weights.bin").read_bytes())
    (path.parent / "linked.bin").symlink_to(tmp_path / "weights.bin")
    (path.parent / "circle.bin").symlink_to(path.parent / "circle.bin")
    os.mkfifo(path.parent / "pipe")
    relocate(path, key, value)
    with pytest.raises(OnnxError, match=r"tensor '\S+' of shape \[.*\] cannot be read"):
        import_onnx(path, {"batch": 2})


def test_what_is_no_model(tmp_path: Path) -> None:
    for content in (b"", b"this is no model", b"\x00" * 100, b"PK\x03\x04"):
        path = tmp_path / "no.onnx"
        path.write_bytes(content)
        with pytest.raises(OnnxError, match="not an ONNX model"):
            import_onnx(path)
    with pytest.raises(OnnxError, match="there is no file"):
        import_onnx(tmp_path / "none.onnx")
    huge = tmp_path / "huge.onnx"
    with huge.open("wb") as stream:
        stream.truncate(2**32)
    with pytest.raises(OnnxError, match="external data"):
        import_onnx(huge)


@pytest.mark.parametrize("seed", range(4))
def test_truncated_and_flipped_files(tmp_path: Path, seed: int) -> None:
    """Whatever is wrong, it is an ``OnnxError``; a flip that changes nothing of importance may pass."""
    whole = perceptron().SerializeToString() if seed % 2 else (LIGHT / "light_squeezenet.onnx").read_bytes()
    path, rng = tmp_path / "f.onnx", random.Random(seed)
    for _ in range(40):
        data = bytearray(whole)
        if rng.random() < 0.3:
            del data[rng.randrange(len(data)) :]
        for _ in range(rng.choice((1, 3, 10))):
            if data:
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        with contextlib.suppress(OnnxError):
            import_onnx(path, {"batch": 2} if seed % 2 else None, device="meta")


@pytest.mark.parametrize("dtype", [TensorProto.STRING, TensorProto.UINT32, TensorProto.INT4])
def test_element_types_that_pytorch_cannot_compute_with(dtype: int) -> None:
    name = TensorProto.DataType.Name(dtype)
    refused(model([node("Identity", "x", "y")], {"x": [2]}, ["y"], dtype=dtype), name)
