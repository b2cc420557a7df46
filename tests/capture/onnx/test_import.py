"""What a file means: open dims, weights and buffers, versions of operators, control flow, losses."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper

from tensoropt.capture import capture
from tensoropt.capture.onnx import OnnxError, import_onnx, load_onnx
from tests.capture.onnx.models import model, node, perceptron, ran

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def weight(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


# -- dims, names, weights -------------------------------------------------------------------------


def test_open_dims_are_all_named_with_the_remedy() -> None:
    nodes = [node("Add", "x y", "z")]
    with pytest.raises(OnnxError, match=r"2 dims .*: batch, y\[1\]; .*--dim batch=8 --dim 'y\[1\]'=8"):
        import_onnx(model(nodes, {"x": ["batch", 4], "y": ["batch", None]}, ["z"]))


def test_unknown_dims_are_refused() -> None:
    with pytest.raises(OnnxError, match=r"no dim called bach; its dims are: batch, x\[1\]"):
        import_onnx(perceptron(), {"bach": 5})
    with pytest.raises(OnnxError, match="at least 1, but batch=0"):
        import_onnx(perceptron(), {"batch": 0})


def test_weights_keep_their_names_and_train() -> None:
    module, x = load_onnx(_saved(perceptron()), {"batch": 4}), torch.randn(4, 12)
    weights = dict(module.named_parameters())
    assert weights.keys() == {"layer.0.weight", "layer.0.bias", "head"}
    expected = F.relu(F.linear(x, weights["layer.0.weight"], weights["layer.0.bias"])) @ weights["head"]
    found = module(x)
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(y.square().mean(), list(weights.values())) for y in (found, expected)]
    torch.testing.assert_close(*gradients)


def test_what_does_not_train_becomes_a_buffer() -> None:
    mask = np.zeros((1, 4), np.float32)
    mask[0, 3] = -10000.0
    nodes = [node("Sub", "x mean", "a"), node("Mul", "a scale", "b"), node("Add", "b mask", "y")]
    constants = {"mean": weight(4), "scale": weight(4), "mask": mask}
    imported = import_onnx(model(nodes, {"x": [2, 4]}, ["y"], constants))
    assert [n for n, _ in imported.module.named_parameters()] == ["scale"]
    assert {n for n, _ in imported.module.named_buffers()} == {"mean", "mask"}


def test_names_that_python_has_no_room_for() -> None:
    nodes = [node("Mul", "x forward", "a"), node("Add", "a gpu_0/w:0", "b"), node("Add", "b gpu_0/w", "y")]
    constants = {"forward": weight(4), "gpu_0/w:0": weight(4), "gpu_0/w": weight(4) + 1}
    imported = import_onnx(model(nodes, {"x": [2, 4]}, ["y"], constants))
    assert len(dict(imported.module.named_parameters())) == 3
    x = torch.randn(2, 4)
    expected = x * constants["forward"] + constants["gpu_0/w:0"] + constants["gpu_0/w"]
    torch.testing.assert_close(ran(imported.module, x)[0], torch.as_tensor(expected))


def test_a_table_written_twice_stays_one_parameter() -> None:
    table = weight(11, 6)
    nodes = [node("Gather", "table ids", "h"), node("MatMul", "h projection", "logits")]
    graph = model(nodes, {"ids": [2, 3]}, ["logits"], {"table": table, "projection": table.T.copy()})
    graph.graph.input[0].type.tensor_type.elem_type = TensorProto.INT64
    imported = import_onnx(graph, loss="auto")
    assert [tuple(p.shape) for p in imported.module.parameters()] == [(11, 6)]
    assert any("tied" in note for note in imported.notes)
    ids, labels = imported.example()
    assert int(ids.max()) < 11
    assert labels.shape == (2, 3)


def _saved(proto: onnx.ModelProto) -> Path:
    path = Path(tempfile.mkdtemp()) / "model.onnx"
    onnx.save(proto, path)
    return path


# -- losses ---------------------------------------------------------------------------------------


LOSSES = {
    "auto": (["x", "labels"], "cross entropy", F.cross_entropy),
    "mse": (["x", "target"], "squared", F.mse_loss),
    "mean": (["x"], "mean", torch.mean),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_losses(loss: str) -> None:
    inputs, says, compute = LOSSES[loss]
    imported = import_onnx(perceptron(), {"batch": 4}, loss=loss)
    assert [i.name for i in imported.inputs] == inputs
    assert imported.inputs[0].shape == (4, 12)
    assert says in imported.notes[-1]
    args = imported.example(seed=1)
    logits = ran(load_onnx(_saved(perceptron()), {"batch": 4}), args[0])[0]
    torch.testing.assert_close(ran(imported.module, *args)[0], compute(logits, *args[1:]))
    captured = capture(imported.module, args)
    assert captured.graph.training
    assert {t.key for t in captured.graph.parameters} == {"layer.0.weight", "layer.0.bias", "head"}


def test_unknown_loss() -> None:
    with pytest.raises(OnnxError, match="use auto, cross_entropy, mean, mse"):
        import_onnx(perceptron(), {"batch": 4}, loss="huber")


# -- versions of operators ------------------------------------------------------------------------

INT = np.int64
HALF_PIXEL = {"mode": "linear", "coordinate_transformation_mode": "pytorch_half_pixel"}
VERSIONS: dict[str, tuple[list[onnx.NodeProto], dict[str, Any], int, Any]] = {
    "slice 9": (
        [node("Slice", "x", "y", axes=[2, 3], starts=[1, -3], ends=[5, 99])], {}, 9,
        lambda x: x[:, :, 1:5, -3:],
    ),
    "softmax 11 flattens": (
        [node("Softmax", "x", "y", axis=2)], {}, 11, lambda x: x.flatten(2).softmax(2).view_as(x),
    ),
    "dropout 7": ([node("Dropout", "x", "y", ratio=0.9)], {}, 7, lambda x: x),
    "upsample 9": (
        [node("Upsample", "x s", "y", mode="nearest")], {"s": np.float32([1, 1, 2, 2])}, 9,
        lambda x: F.interpolate(x, scale_factor=2),
    ),
    "resize 10": (
        [node("Resize", "x s", "y", mode="nearest")], {"s": np.float32([1, 1, 1.7, 0.6])}, 10,
        lambda x: F.interpolate(x, scale_factor=(1.7, 0.6)),
    ),
    "resize 11": (
        [node("Resize", "x - - sizes", "y", **HALF_PIXEL)], {"sizes": INT([2, 3, 13, 5])}, 11,
        lambda x: F.interpolate(x, size=(13, 5), mode="bilinear"),
    ),
    "topk 1": ([node("TopK", "x", "y i", axis=3, k=2)], {}, 9, lambda x: x.topk(2, 3)[0]),
    "shape arithmetic": (
        [
            node("Shape", "x", "s"), node("Gather", "s zero", "n"), node("Concat", "n rest", "t", axis=0),
            node("Reshape", "x t", "y"),
        ],
        {"zero": INT([0]), "rest": INT([-1])}, 13, lambda x: x.flatten(1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", VERSIONS)
def test_version(case: str) -> None:
    nodes, constants, opset, expected = VERSIONS[case]
    imported = import_onnx(model(nodes, {"x": [2, 3, 8, 8]}, ["y"], constants, opset=opset))
    torch.testing.assert_close(ran(imported.module, X)[0], expected(X))


def test_old_images_are_not_resized_in_another_way() -> None:
    nodes, scales = [node("Upsample", "x s", "y", mode="linear")], {"s": np.float32([1, 1, 2, 2])}
    with pytest.raises(OnnxError, match="linear, asymmetric"):
        import_onnx(model(nodes, {"x": [2, 3, 8, 8]}, ["y"], scales, opset=9))


def test_shape_arithmetic_leaves_no_node() -> None:
    nodes, constants, opset, _ = VERSIONS["shape arithmetic"]
    module = import_onnx(model(nodes, {"x": [2, 3, 8, 8]}, ["y"], constants, opset=opset)).module
    assert [n.op for n in module.graph.nodes] == ["placeholder", "call_function", "output"]
    assert not list(module.buffers())


# -- control flow and functions -------------------------------------------------------------------


def _graph(nodes: list[onnx.NodeProto], inputs: list[str], outputs: list[str]) -> onnx.GraphProto:
    info = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in inputs]
    return helper.make_graph(
        nodes, "body", info, [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in outputs]
    )


@pytest.mark.parametrize("taken", [True, False])
def test_a_known_branch_is_taken(taken: bool) -> None:
    then, other = _graph([node("Neg", "x", "p")], [], ["p"]), _graph([node("Abs", "x", "q")], [], ["q"])
    nodes = [node("If", "c", "y", then_branch=then, else_branch=other)]
    imported = import_onnx(model(nodes, {"x": [4]}, ["y"], {"c": np.bool_(taken)}))
    x = torch.randn(4)
    torch.testing.assert_close(ran(imported.module, x)[0], -x if taken else x.abs())


def test_a_loop_of_known_length_is_unrolled() -> None:
    body = _graph(
        [node("Identity", "c", "go"), node("Mul", "s x", "t"), node("Identity", "t", "u")],
        ["i", "c", "s"],
        ["go", "t", "u"],
    )
    nodes = [node("Loop", "n c x", "last all", body=body)]
    constants = {"n": INT(3), "c": np.bool_(True)}
    imported = import_onnx(model(nodes, {"x": [4]}, ["last", "all"], constants))
    x = torch.randn(4)
    last, every = ran(imported.module, x)
    torch.testing.assert_close(last, x**4)
    torch.testing.assert_close(every, torch.stack([x**2, x**3, x**4]))


def test_functions_of_the_file_are_inlined() -> None:
    function = helper.make_function(
        "here", "Twice", ["a"], ["b"], [node("Add", "a a", "b")], [helper.make_opsetid("", 17)]
    )
    call = helper.make_node("Twice", ["x"], ["y"], domain="here")
    proto = model([call], {"x": [4]}, ["y"], functions=[function])
    proto.opset_import.append(helper.make_opsetid("here", 1))
    x = torch.randn(4)
    torch.testing.assert_close(ran(import_onnx(proto).module, x)[0], 2 * x)
