"""Detection of GPUs and their paths against recorded boxes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from fake_nvml import FakeNvml, dgx_a100, dgx_h100, dgx_v100, table, titan_box

from tensoropt.cluster import gpu_rank_cores, load_cluster, local
from tensoropt.cluster.nvml import gpu_cluster, gpu_cores, gpu_notes
from tensoropt.errors import ClusterError
from tensoropt.ranks import local_hardware
from tensoropt.ranks.pool import RankPool


@pytest.fixture(autouse=True)
def _all_visible(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(
    ("box", "kind", "link", "bandwidth"),
    [(dgx_a100, "A100-80GB", "NV12", 300e9), (dgx_h100, "H100-80GB", "NV18", 450e9)],
)
def test_switched_boxes_have_one_uniform_level(box, kind, link, bandwidth):
    cluster = gpu_cluster(box())
    assert cluster.device_count == 8
    assert cluster.device.name == kind
    assert cluster.memory_bytes == box().memory_bytes
    assert cluster.link(0, 7).name == link
    assert cluster.link(0, 7).bandwidth_bytes_per_s == bandwidth
    assert not cluster.pairs
    assert [mesh.label for mesh in cluster.meshes()] == ["8", "2x4", "2x2x2"]


def test_the_cube_mesh_keeps_its_single_wires():
    cluster = gpu_cluster(dgx_v100())
    assert cluster.device.name == "V100-32GB"
    assert cluster.link(0, 1).bandwidth_bytes_per_s == 25e9
    assert cluster.link(4, 0).bandwidth_bytes_per_s == 50e9
    assert cluster.link(0, 4).dedicated
    assert cluster.link(0, 7).name == "SYS"
    assert [level.link.bandwidth_bytes_per_s for level in cluster.levels] == [150e9]
    assert cluster.meshes()[0].label == "8"


def test_the_preset_agrees_with_the_recorded_box():
    detected, preset = gpu_cluster(dgx_v100()), load_cluster("dgx-v100")
    for low in range(8):
        for high in range(low + 1, 8):
            ours, theirs = detected.link(low, high), preset.link(low, high)
            assert ours.dedicated == theirs.dedicated
            assert ours.bandwidth_bytes_per_s == pytest.approx(theirs.bandwidth_bytes_per_s, rel=0.02)


def test_pix_and_node_paths():
    cluster = gpu_cluster(titan_box())
    assert cluster.device.name == "TITAN-RTX"
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
    cluster = gpu_cluster(
        FakeNvml(name="NVIDIA L40S", memory_bytes=48 * 2**30, topology=topology, pcie_generation=4)
    )
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


def test_no_driver_means_no_gpus():
    box = titan_box()
    box.usable = False
    assert gpu_cluster(box) is None


GIB = 2**30


def test_a_quiet_box_needs_no_words():
    assert gpu_notes(dgx_h100()) == ()
    box = titan_box()
    box.usable = False
    assert gpu_notes(box) == ()


def test_busy_cards_are_said_and_kept(monkeypatch):
    box = dgx_h100()
    box.used, box.processes = {3: 41 * GIB, 5: GIB}, {3: (1, 2), 6: (os.getpid(),)}
    assert gpu_cluster(box).device_count == 8
    (note,) = gpu_notes(box)
    assert note.startswith("GPU 3 (H100-80GB) is in use by 2 processes, which have 41 GiB of its 79.6 GiB")
    assert note.endswith("CUDA_VISIBLE_DEVICES leaves it out")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,4")
    assert gpu_notes(box) == ()
    assert gpu_cluster(box).device_count == 4


def test_hidden_cards_are_said(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpu_notes(dgx_h100()) == ("8 GPUs are here, but CUDA_VISIBLE_DEVICES='' shows none of them",)


def test_cards_with_mig_are_left_out_beside_whole_ones():
    box = dgx_h100()
    box.instances = {2: [(1, 10 * GIB)] * 7}
    assert gpu_cluster(box).device_count == 7
    (note,) = gpu_notes(box)
    assert note.startswith(
        "GPU 2 is cut into 7 MIG instances and is left out; CUDA_VISIBLE_DEVICES with the UUID"
    )


def test_one_instance_where_all_is_mig(monkeypatch):
    box = dgx_h100()
    box.instances = {index: [(1, 10 * GIB), (3, 40 * GIB)] for index in range(8)}
    cluster = gpu_cluster(box)
    assert (cluster.device_count, cluster.device.name) == (1, "H100-80GB-MIG-1g.10gb")
    whole = gpu_cluster(dgx_h100()).device
    assert cluster.device.flops["bfloat16"] == whole.flops["bfloat16"] / 8
    assert cluster.memory_bytes == 10 * GIB
    share = cluster.device.memory_bandwidth / whole.memory_bandwidth
    assert share == pytest.approx(10 * GIB / whole.memory_bytes)
    (note,) = gpu_notes(box)
    assert note.startswith("the GPUs are cut into 16 MIG instances, of which a process sees one")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-4-1")
    assert gpu_cluster(box).device.name == "H100-80GB-MIG-3g.40gb"
    box.instances = {index: [] for index in range(8)}
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert gpu_cluster(box) is None
    assert gpu_notes(box)[0].startswith("MIG is on for GPU 0, 1, 2, 3, 4, 5, 6, 7, without any instance")


def test_mixed_cards_are_said(monkeypatch):
    box = titan_box()
    box.names = {1: "Tesla V100-SXM2-32GB"}
    cluster = gpu_cluster(box)
    assert [device.name for device in cluster.devices] == ["TITAN-RTX", "V100-32GB", "TITAN-RTX"]
    (note,) = gpu_notes(box)
    assert note.startswith("the GPUs are of several kinds (2 x TITAN-RTX, 1 x V100-32GB): sharded plans go")
    assert "set CUDA_DEVICE_ORDER=PCI_BUS_ID" in note
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert "PCI_BUS_ID" not in gpu_notes(box)[0]


@pytest.mark.parametrize(
    ("text", "count", "kind"), [("local", 8, "cuda"), ("local:4", 4, "cuda"), ("cpu:4", 4, "cpu")]
)
def test_local_is_gpus_where_there_are_some(monkeypatch, text, count, kind):
    monkeypatch.setitem(sys.modules, "pynvml", dgx_h100())
    cluster = load_cluster(text)
    assert (cluster.device_count, cluster.device_type) == (count, kind)
    assert cluster.name == text
    with pytest.raises(
        ClusterError, match="local:9 asks for 9 GPUs, but 8 are available; use local:8, or cpu:9"
    ):
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


TWO_NODES = {0: (0, 1, 2, 3), 1: (0, 1, 2, 3), 2: (64, 65, 66, 67), 3: (64, 65, 66, 67)}


@pytest.fixture
def many_cpus(monkeypatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 128)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(128)))


@pytest.mark.usefixtures("many_cpus")
def test_ranks_run_on_the_node_of_their_gpu_and_share_it_evenly(monkeypatch):
    box = dgx_v100()
    box.topology = [row[:4] for row in box.topology[:4]]
    box.near = TWO_NODES
    near = gpu_cores(box)
    assert near == tuple(TWO_NODES.values())
    assert gpu_rank_cores(4, near) == ((0, 2), (1, 3), (64, 66), (65, 67))
    assert gpu_rank_cores(3, near) == ((0, 2), (1, 3), (64, 65, 66, 67))  # the third is alone there
    assert gpu_rank_cores(5, near) is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    assert gpu_cores(box) == (TWO_NODES[2], TWO_NODES[0])
    # A process that may use few of them keeps to these.
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 64})
    assert gpu_cores(box) == ((64,), (0, 1))
    assert gpu_rank_cores(2, gpu_cores(box)) is None  # one is too few for a rank's threads
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    assert gpu_cores(box) is None  # none of what is near the other


@pytest.mark.usefixtures("many_cpus")
def test_ranks_are_not_pinned_where_nothing_is_known(monkeypatch):
    assert gpu_cores(dgx_a100()) is None
    box = dgx_a100()
    box.usable = False
    assert gpu_cores(box) is None
    monkeypatch.delattr(os, "sched_getaffinity")
    box.usable = True
    assert gpu_cores(box) is None


@pytest.mark.usefixtures("many_cpus")
def test_gpus_are_pinned_alike_when_they_are_measured_and_when_they_run(monkeypatch):
    """The pool gives its ranks what torchrun's ranks take."""
    monkeypatch.setattr(local, "gpu_cores", lambda: tuple(TWO_NODES.values()))
    taken: list[tuple[int, ...]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: taken.append(tuple(cores)), raising=False)
    for rank in range(4):
        local_hardware.pin_gpu_rank(rank, 4)
    pool = RankPool(4, backend="nccl")
    assert [tuple(pool._setup(rank)["cores"]) for rank in range(4)] == taken
    pool.close()
    monkeypatch.setattr(local, "gpu_cores", lambda: None)
    taken.clear()
    local_hardware.pin_gpu_rank(0, 4)()
    assert taken == []
    pool = RankPool(4, backend="nccl")
    assert pool._setup(0)["cores"] is None
    pool.close()
