"""Which clusters are this machine."""

import sys

import pytest
import torch

from tensoropt import ClusterError, load_cluster
from tensoropt.cluster.nvml import gpu_cluster
from tensoropt.ranks import local_hardware
from tensoropt.ranks.local_hardware import has_local_links, local_backend, local_notes, local_pool
from tests.cluster.fake_nvml import dgx_h100

NAME = "NVIDIA H100 80GB HBM3"


@pytest.fixture
def box(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return gpu_cluster(dgx_h100())


def test_cpu_ranks_are_always_here():
    assert local_backend(load_cluster("local:3")) == "gloo"
    assert local_pool(load_cluster("local:3")).world_size == 3
    with pytest.raises(
        ClusterError, match=r"local:99999 would be timed on 99,999 processes, .*--measure never"
    ):
        local_pool(load_cluster("local:99999"))


def test_gpus_of_this_machine(box, monkeypatch):
    monkeypatch.setattr(local_hardware, "local_gpus", lambda: (NAME,) * 8)
    assert local_backend(box) == "nccl"
    assert local_backend(box.subset(2)) == "nccl"
    pool = local_pool(box)
    assert (pool.world_size, pool.backend) == (8, "nccl")


@pytest.mark.parametrize("names", [(), (NAME,) * 7, (NAME,) * 7 + ("NVIDIA A100-SXM4-80GB",)])
def test_gpus_that_are_not_or_others(box, names, monkeypatch):
    monkeypatch.setattr(local_hardware, "local_gpus", lambda: names)
    assert local_backend(box) is None
    assert local_pool(box) is None


def test_a_preset_stays_a_preset_beside_gpus_of_its_kind(monkeypatch):
    monkeypatch.setattr(local_hardware, "local_gpus", lambda: (NAME,) * 8)
    assert local_backend(load_cluster("dgx-h100")) is None


def test_a_file_of_cores_is_timed_here_but_its_links_are_the_files(tmp_path):
    file = tmp_path / "two.yaml"
    links = "links: {intra_node: {latency: 1ms, bandwidth: 1MB/s}}\n"
    file.write_text("devices: [{kind: CPU-core, count: 2}]\n" + links)
    found = load_cluster(file)
    assert (local_backend(found), has_local_links(found)) == ("gloo", False)
    assert has_local_links(load_cluster("local:2"))


def test_cpus_with_figures_of_their_own_are_not_this_machine(tmp_path):
    file = tmp_path / "two.yaml"
    slow = "{name: slow, base: CPU-core, flops: {float32: 1e9}}"
    for kinds in (f"[{{kind: {slow}, count: 2}}]", f"[CPU-core, {{kind: {slow}}}]"):
        file.write_text(f"devices: {kinds}\nlinks: {{intra_node: Ethernet-10G}}\n")
        assert local_backend(load_cluster(file)) is None


def notes_on_a_box(monkeypatch, cluster, seen, *, cuda=True, built=True, **devices):
    """What is said of a cluster on a machine with NVML's devices changed so, of which PyTorch sees some."""
    nvml = dgx_h100()
    vars(nvml).update(devices)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(local_hardware, "local_gpus", lambda: seen)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(seen))
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: built)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    return local_notes(load_cluster(cluster))


@pytest.mark.usefixtures("box")
@pytest.mark.parametrize("cluster", ["local:2", "dgx-h100", "cpu:2"])
def test_gpus_that_are_timed_need_no_words(monkeypatch, cluster):
    assert notes_on_a_box(monkeypatch, cluster, (NAME,) * 8) == ()


@pytest.mark.usefixtures("box")
@pytest.mark.parametrize(("cluster", "names", "more", "says"), [
    ("local:4", (), {"cuda": False, "built": False},
     "this machine's 4 x H100-80GB cannot be timed, so costs come from data sheets: PyTorch "
     f"{torch.__version__} is built without CUDA; install a build with CUDA, or explore with --cluster "
     "cpu:4 for CPU ranks"),
    ("local", ("NVIDIA A100-SXM4-80GB",) * 8, {}, "PyTorch sees other GPUs (NVIDIA A100-SXM4-80GB, "),
    ("local", (NAME,) * 8, {"names": {7: "NVIDIA L40S"}}, "7 x H100-80GB, 1 x L40S cannot be timed, "),
    ("local:2", (NAME,), {"usable": False},
     "PyTorch sees 1 GPUs, but NVML, which describes them, names none that can be used: plans are for CPU"),
])  # fmt: skip
def test_what_is_said_of_gpus_that_cannot_be_timed(monkeypatch, cluster, names, more, says):
    (note,) = notes_on_a_box(monkeypatch, cluster, names, **more)
    assert says in note


@pytest.mark.parametrize(("built", "notes"), [(True, 1), (False, 0)])
def test_hidden_gpus_are_not_passed_over_in_silence(monkeypatch, built, notes):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    said = notes_on_a_box(monkeypatch, "local:2", (), cuda=False, built=built)
    assert len(said) == notes
    assert all("CUDA_VISIBLE_DEVICES='' shows no GPU: plans are for CPU ranks" in note for note in said)
