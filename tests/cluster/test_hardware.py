"""Clusters: links by rank, the slowest device, saving, fingerprints, parts."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import subprocess
import sys

import pytest

from tensoropt.cluster import Cluster, DeviceKind, Level, Link, device_kind, link, load_cluster
from tensoropt.errors import ClusterError

CLUSTERS = ["local:2", "dgx-h100x4", "dgx-v100x2", "netsplit-paper", "tensoropt-paper", "baechi-paper"]


@pytest.mark.parametrize("name", CLUSTERS)
def test_saving_and_copying_keep_everything(name):
    cluster = load_cluster(name)
    saved = json.loads(json.dumps(cluster.to_dict()))
    for twin in (Cluster.from_dict(saved), pickle.loads(pickle.dumps(cluster)), copy.deepcopy(cluster)):
        assert twin == cluster
        assert hash(twin) == hash(cluster)
        assert twin.fingerprint == cluster.fingerprint
        assert twin.to_dict() == cluster.to_dict()


def test_a_broken_save_is_refused():
    saved = load_cluster("local:2").to_dict()
    del saved["levels"]
    with pytest.raises(ClusterError, match="not a saved cluster"):
        Cluster.from_dict(saved)


def test_the_fingerprint_follows_hardware_only():
    cluster = load_cluster("dgx-h100x2")
    assert dataclasses.replace(cluster, name="ours", source="x").fingerprint == cluster.fingerprint
    priced = tuple(dataclasses.replace(kind, price_per_hour=2.0) for kind in cluster.devices)
    unknown = tuple(dataclasses.replace(kind, capability="") for kind in cluster.devices)
    assert dataclasses.replace(cluster, devices=unknown).fingerprint == cluster.fingerprint
    assert dataclasses.replace(cluster, devices=priced).fingerprint == cluster.fingerprint
    slower = dataclasses.replace(cluster.levels[0], link=link("IB-100G"))
    assert dataclasses.replace(cluster, levels=(slower, cluster.levels[1])).fingerprint != cluster.fingerprint
    smaller = tuple(dataclasses.replace(kind, memory_bytes=1000) for kind in cluster.devices)
    assert dataclasses.replace(cluster, devices=smaller).fingerprint != cluster.fingerprint


def test_links_by_rank():
    cluster = load_cluster("dgx-v100x2")
    assert cluster.link(0, 3).name == cluster.link(11, 8).name == "NVLink2-x2"
    assert cluster.link(0, 7).name == "PCIe3-SYS"
    assert cluster.link(7, 8).name == "IB-100G"
    assert cluster.crossing_level(7, 8).link_count == 4
    for pair in ((0, 0), (0, 16), (-1, 2)):
        with pytest.raises(ClusterError, match="0 to 15"):
            cluster.link(*pair)


def test_a_sharded_plan_sees_the_slowest_and_the_smallest_device():
    fast, slow = device_kind("H100-80GB"), device_kind("V100-16GB")
    level = Level(name="gpu", size=2, link=link("PCIe3"))
    cluster = Cluster(name="mixed", devices=(fast, slow), levels=(level,))
    assert cluster.device == slow
    assert cluster.memory_bytes == 16 * 2**30
    assert cluster.device_kinds == (fast, slow)
    assert cluster.device_type == "cuda"
    assert cluster.price_per_hour is None
    assert "1 x H100-80GB, 1 x V100-16GB" in cluster.describe()


def test_prices_add_up():
    kind = dataclasses.replace(device_kind("L40S"), price_per_hour=1.5)
    cluster = Cluster(name="c", devices=(kind,) * 4, levels=(Level(name="gpu", size=4, link=link("PCIe4")),))
    assert cluster.price_per_hour == 6.0


def test_flops_by_dtype():
    kind = device_kind("A100-80GB")
    assert kind.flops_of("torch.bfloat16") == 312e12
    assert kind.flops_of("int64") == kind.flops["float32"] == 19.5e12


@pytest.mark.parametrize("count", [1, 2, 4, 8, 16])
def test_the_first_devices_are_a_cluster_too(count):
    part = load_cluster("dgx-v100x4").subset(count)
    assert part.device_count == count
    assert all(high < count for _, high in part.pairs)
    assert part.meshes()[0].shape == (count,)


def test_a_part_is_named_by_its_size():
    assert load_cluster("dgx-h100x2[4]").fingerprint == load_cluster("dgx-h100x2").subset(4).fingerprint
    assert load_cluster(load_cluster("dgx-h100").subset(2).name).device_count == 2
    assert load_cluster("local:4[2]").device_count == 2
    with pytest.raises(ClusterError, match="whole inner levels"):
        load_cluster("dgx-h100x2[12]")
    with pytest.raises(ClusterError, match="unknown cluster 'dgx'"):
        load_cluster("dgx[2]")


@pytest.mark.parametrize(
    ("name", "sizes"), [("dgx-h100", (1, 2, 4, 8)), ("dgx-h100x3", (1, 2, 4, 8, 16, 24)), ("local:1", (1,))]
)
def test_parts_double_up_to_the_whole(name, sizes):
    assert load_cluster(name).part_sizes == sizes


def test_parts_that_break_a_level_are_refused():
    with pytest.raises(ClusterError, match="whole inner levels"):
        load_cluster("dgx-h100x2").subset(12)
    with pytest.raises(ClusterError, match="whole inner levels"):
        load_cluster("dgx-h100x2").subset(32)


def _kind(**changes):
    values = {
        "name": "k",
        "type": "cpu",
        "memory_bytes": 1,
        "flops": {"float32": 1.0},
        "memory_bandwidth": 1.0,
    }
    return DeviceKind(**{**values, **changes})


@pytest.mark.parametrize(
    "make",
    [
        lambda: _kind(type="tpu"),
        lambda: _kind(memory_bytes=-1),
        lambda: _kind(flops={"float64": 1.0}),
        lambda: _kind(flops={"float32": float("nan")}),
        lambda: _kind(memory_bandwidth=0.0),
        lambda: _kind(price_per_hour=-2),
        lambda: Link(name="l", latency_s=-1.0, bandwidth_bytes_per_s=1.0),
        lambda: Link(name="l", latency_s=0.0, bandwidth_bytes_per_s=float("inf")),
        lambda: Level(name="l", size=0, link=link("PCIe3")),
        lambda: Level(name="l", size=2, link=link("PCIe3"), link_count=0),
        lambda: Cluster(name="c", devices=(), levels=()),
        lambda: Cluster(name="c", devices=(_kind(), _kind()), levels=()),
        lambda: Cluster(name="c", devices=(_kind(),), levels=(), pairs={(0, 1): link("PCIe3")}),
        lambda: Cluster(
            name="c",
            devices=(_kind(), device_kind("L40S")),
            levels=(Level(name="gpu", size=2, link=link("PCIe3")),),
        ),
    ],
)
def test_impossible_hardware_is_refused(make):
    with pytest.raises(ClusterError):
        make()


def test_importing_stays_light():
    code = "import sys, tensoropt.cluster; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
