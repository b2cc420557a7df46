"""The sizes that an ONNX file leaves open, read without PyTorch: those that its import asks for."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from tensoropt.capture.onnx import OnnxError, import_onnx
from tensoropt.question.onnx_dims import open_dims


def saved(path: Path, *shapes: list[str | int | None]) -> Path:
    """A file that adds its inputs."""
    named = {f"x{number}": shape for number, shape in enumerate(shapes)}
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, of) for name, of in named.items()]
    nodes = [helper.make_node("Sum", [value.name for value in inputs], ["y"])]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "net", inputs, [output])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


@pytest.mark.parametrize(
    ("shapes", "names"),
    [([["batch", 4], ["batch", "length"]], ["batch", "length"]), ([[None, 4]], ["x0[0]"]), ([[3, 4]], [])],
)
def test_open_dims_are_those_that_the_import_asks_for(tmp_path, shapes, names):
    file = saved(tmp_path / "a.onnx", *shapes)
    assert open_dims(file) == names
    if names:
        with pytest.raises(OnnxError, match="the sizes of") as refusal:
            import_onnx(file)
        assert f"not in the file: {', '.join(names)};" in str(refusal.value)


@pytest.mark.parametrize("content", [b"", b"something", bytes(range(256)) * 40])
def test_what_is_no_model_is_refused(tmp_path, content):
    (tmp_path / "a.onnx").write_bytes(content)
    with pytest.raises(ValueError, match=r"\w"):
        open_dims(tmp_path / "a.onnx")
