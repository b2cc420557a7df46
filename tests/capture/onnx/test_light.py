"""Six of the real networks that the onnx package ships, against the outputs stored beside them."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch

from tensoropt.capture import capture
from tensoropt.capture.onnx import import_onnx
from tests.capture.onnx.models import LIGHT, model, node, ran

PARAMETERS = {
    "densenet121": 8_062_504,
    "inception_v2": 11_214_888,
    "resnet50": 25_557_032,
    "shufflenet": 1_393_320,
    "squeezenet": 1_235_496,
    "vgg19": 143_667_240,
}
"""Of the published networks: their weights train, the statistics of batch norms do not."""


ALIKE = ("inception_v2", "vgg19")
"""No operator of theirs is missing from the others."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in ALIKE else n for n in PARAMETERS]
)
def test_stored_output(name: str) -> None:
    imported = import_onnx(LIGHT / f"light_{name}.onnx")
    (given,) = imported.inputs
    count = int(np.prod(given.shape))
    image = torch.from_numpy((np.arange(count) / count).astype(np.float32).reshape(given.shape))
    stored = onnx.TensorProto.FromString((LIGHT / f"light_{name}_output_0.pb").read_bytes())
    (out,) = ran(imported.module, image)
    np.testing.assert_allclose(out.numpy(), onnx.numpy_helper.to_array(stored), rtol=1e-3, atol=1e-5)
    assert sum(p.numel() for p in imported.module.parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("name", ["squeezenet", "shufflenet"])
def test_a_fixed_batch_is_replaced(name: str) -> None:
    path = LIGHT / f"light_{name}.onnx"
    one = import_onnx(path)
    (given,) = one.inputs
    many = import_onnx(path, {f"{given.name}[0]": 3})
    image = torch.randn(3, *given.shape[1:])
    (together,) = ran(many.module, image)
    for i in range(3):
        (alone,) = ran(one.module, image[i : i + 1])
        torch.testing.assert_close(together[i : i + 1], alone)


def test_capture_on_the_meta_device_is_the_same_graph() -> None:
    """With a batch norm's statistics and a constant that does not train."""
    values = np.random.default_rng(0).random((4, 3, 3, 3), np.float32)
    constants = {"mean": values[0, :, :1, :1], "w": values, "c": values[0, 0, 0, :1] + np.ones(4, np.float32)}
    nodes = [
        node("Sub", "x mean", "a"),
        node("Conv", "a w", "b"),
        node("BatchNormalization", "b c c c c", "y"),
    ]
    graphs = []
    for device in ("cpu", "meta"):
        imported = import_onnx(
            model(nodes, {"x": [2, 3, 8, 8]}, ["y"], constants), loss="auto", device=device
        )
        assert {t.device.type for t in imported.module.state_dict().values()} == {device}
        graphs.append(capture(imported.module, imported.example(0, device)).graph)
    assert graphs[0].fingerprint == graphs[1].fingerprint
