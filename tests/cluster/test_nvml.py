"""Detection of GPUs and their paths against recorded boxes."""

import sys

import pytest

from tensoropt import ClusterError, load_cluster
from tensoropt.cluster.nvml import gpu_cluster
from tests.cluster.fake_nvml import FakeNvml, dgx_a100, dgx_h100, dgx_v100, table, titan_box


@pytest.fixture(autouse=True)
def _all_visible(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(
    ("box", "kind", "link", "bandwidth"),
    [(dgx_a100, "A100-80GB", "NV12", 300e9), (dgx_h100, "H100-80GB", "NV18", 450e9)],
)
def test_switched_boxes_have_one_uniform_level(box, kind, link, bandwidth):
    cluster = gpu_cluster(box())
    assert (cluster.device_count, cluster.device.name) == (8, kind)
    assert (cluster.memory_bytes, cluster.link(0, 7).name) == (box().memory_bytes, link)
    assert cluster.link(0, 7).bandwidth_bytes_per_s == bandwidth
    assert not cluster.pairs
    assert [mesh.label for mesh in cluster.meshes()] == ["8", "2x4", "2x2x2"]


def test_the_cube_mesh_keeps_its_single_wires():
    cluster = gpu_cluster(dgx_v100())
    assert (cluster.device.name, cluster.link(0, 1).bandwidth_bytes_per_s) == ("V100-32GB", 25e9)
    assert cluster.link(4, 0).bandwidth_bytes_per_s == 50e9
    assert cluster.link(0, 4).dedicated
    assert cluster.link(0, 7).name == "SYS"
    assert [(level.size, level.link.name) for level in cluster.levels] == [(8, "SYS")]
    assert cluster.meshes()[0].label == "8"


def test_the_preset_agrees_with_the_recorded_box():
    detected, preset = gpu_cluster(dgx_v100()), load_cluster("dgx-v100")
    for low in range(8):
        for high in range(low + 1, 8):
            ours, theirs = detected.link(low, high), preset.link(low, high)
            assert ours.dedicated == theirs.dedicated
            assert ours.bandwidth_bytes_per_s == pytest.approx(theirs.bandwidth_bytes_per_s, rel=0.02)


def test_pix_and_node_paths_also_between_kinds():
    box = titan_box()
    box.names = {1: "Tesla V100-SXM2-32GB"}
    cluster = gpu_cluster(box)
    assert [device.name for device in cluster.devices] == ["TITAN-RTX", "V100-32GB", "TITAN-RTX"]
    assert [cluster.link(*pair).name for pair in ((0, 1), (0, 2), (1, 2))] == ["PIX", "NODE", "NODE"]
    assert cluster.link(0, 1).bandwidth_bytes_per_s > cluster.link(0, 2).bandwidth_bytes_per_s
    assert cluster.levels[0].link.name == "NODE"


def test_pairs_behind_one_switch_become_a_level():
    topology = table("""
        X   PIX SYS SYS
        PIX X   SYS SYS
        SYS SYS X   PIX
        SYS SYS PIX X
    """)
    box = FakeNvml(name="NVIDIA L40S", memory_bytes=2**35, topology=topology, pcie_generation=4)
    cluster = gpu_cluster(box)
    assert [(level.size, level.link.name) for level in cluster.levels] == [(2, "SYS"), (2, "PIX")]
    assert cluster.link(0, 1).bandwidth_bytes_per_s == pytest.approx(0.82 * 16 * 1.969e9)


def test_visible_devices_are_honoured(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    assert gpu_cluster(titan_box()).link(0, 1).name == "NODE"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1,9,0")
    assert gpu_cluster(titan_box()).device_count == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpu_cluster(titan_box()) is None


def test_a_device_outside_the_catalogue_gets_nvmls_figures():
    cluster = gpu_cluster(FakeNvml(name="NVIDIA Z900", memory_bytes=2**34, topology=[["X"]]))
    assert cluster.device.name == "NVIDIA-Z900"
    assert cluster.device.flops["float32"] == 2 * 1000 * 1.5e9
    assert cluster.device.memory_bandwidth == 2 * 7e9 * 48
    assert cluster.meshes()[0].shape == (1,)


def test_cards_with_mig_are_left_out(caplog):
    box = dgx_h100()
    box.partitioned = (2,)
    assert gpu_cluster(box).device_count == 7
    assert "1 GPU with MIG instances left out; describe an instance in a cluster file" in caplog.text
    box.partitioned = tuple(range(8))
    assert gpu_cluster(box) is None


@pytest.mark.parametrize(
    ("text", "count", "kind"), [("local", 8, "cuda"), ("local:4", 4, "cuda"), ("cpu:4", 4, "cpu")]
)
def test_local_is_gpus_where_there_are_some(monkeypatch, text, count, kind):
    monkeypatch.setitem(sys.modules, "pynvml", dgx_h100())
    cluster = load_cluster(text)
    assert (cluster.device_count, cluster.device_type) == (count, kind)
    assert cluster.name == text
    with pytest.raises(ClusterError, match="asks for 9 GPUs, but 8 are available; use local:8, or cpu:9"):
        load_cluster("local:9")


def test_local_is_cpu_ranks_where_there_are_no_gpus(monkeypatch):
    box = dgx_h100()
    box.usable = False
    monkeypatch.setitem(sys.modules, "pynvml", box)
    assert load_cluster("local:3").devices == load_cluster("cpu:3").devices
    assert load_cluster("local").devices == load_cluster("cpu").devices
    for text in ("cpu:", "cpu:0", "local:x"):
        with pytest.raises(ClusterError, match="must be followed by the number of ranks, at least 1"):
            load_cluster(text)
