"""Which clusters are this machine."""

from __future__ import annotations

import pytest

from tensoropt.cluster import load_cluster
from tensoropt.cluster.nvml import gpu_cluster
from tensoropt.ranks import local_hardware
from tensoropt.ranks.local_hardware import has_local_links, local_backend, local_pool
from tests.cluster.fake_nvml import dgx_h100

NAME = "NVIDIA H100 80GB HBM3"


@pytest.fixture
def box(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return gpu_cluster(dgx_h100())


def test_cpu_ranks_are_always_here():
    assert local_backend(load_cluster("local:3")) == "gloo"
    assert local_pool(load_cluster("local:3")).world_size == 3


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
