"""Which clusters are this machine."""

from __future__ import annotations

import pytest

from tensoropt.cluster import load_cluster
from tensoropt.cluster.nvml import gpu_cluster
from tensoropt.costs import here
from tensoropt.costs.here import backend_here, ranks_here
from tests.cluster.fake_nvml import dgx_h100

NAME = "NVIDIA H100 80GB HBM3"


@pytest.fixture
def box(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return gpu_cluster(dgx_h100())


def test_cpu_ranks_are_always_here():
    assert backend_here(load_cluster("local:3")) == "gloo"
    assert ranks_here(load_cluster("local:3")).world_size == 3


def test_gpus_of_this_machine(box, monkeypatch):
    monkeypatch.setattr(here, "gpus_here", lambda: (NAME,) * 8)
    assert backend_here(box) == "nccl"
    assert backend_here(box.subset(2)) == "nccl"
    pool = ranks_here(box)
    assert (pool.world_size, pool.backend) == (8, "nccl")


@pytest.mark.parametrize("names", [(), (NAME,) * 7, (NAME,) * 7 + ("NVIDIA A100-SXM4-80GB",)])
def test_gpus_that_are_not_or_others(box, names, monkeypatch):
    monkeypatch.setattr(here, "gpus_here", lambda: names)
    assert backend_here(box) is None
    assert ranks_here(box) is None


def test_a_preset_stays_a_preset_beside_gpus_of_its_kind(monkeypatch):
    monkeypatch.setattr(here, "gpus_here", lambda: (NAME,) * 8)
    assert backend_here(load_cluster("dgx-h100")) is None
