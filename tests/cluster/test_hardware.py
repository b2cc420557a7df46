"""Clusters: links by rank, the slowest device, saving, fingerprints, parts.

Meshes: ranks, groups, and which ones are aligned with the levels.
"""

import copy
import dataclasses
import itertools
import json
import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensoropt.cluster import Cluster, DeviceKind, Link, Mesh, load_cluster
from tensoropt.cluster.catalog import device_kind, link
from tensoropt.cluster.hardware import Level, _aligned_meshes
from tensoropt.errors import ClusterError

shapes = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)


@given(shapes, st.data())
def test_groups_are_the_ranks_that_differ_only_along_the_axes(shape, data):
    mesh = Mesh(shape=shape)
    axes = data.draw(st.sets(st.integers(0, len(shape) - 1)))
    groups = mesh.groups(axes)
    assert sorted(itertools.chain(*groups)) == list(range(mesh.size))
    assert groups == tuple(sorted(groups))
    for group in groups:
        assert (list(group), len(group)) == (sorted(group), math.prod(shape[axis] for axis in axes))
        for rank in group:
            ours, first = (np.unravel_index(each, shape) for each in (rank, group[0]))
            assert all(ours[a] == first[a] for a in range(len(shape)) if a not in axes)


def test_the_last_axis_is_the_innermost():
    mesh = Mesh(shape=(2, 4), names=("node", "gpu"))
    assert mesh.label == str(mesh) == "2x4"
    assert mesh.groups([1]) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert mesh.groups([0]) == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert mesh.groups([]) == tuple((rank,) for rank in range(8))
    assert mesh.axis_subsets() == ((0,), (1,), (0, 1))


def test_impossible_meshes_and_axes_are_refused():
    for arguments in ({"shape": ()}, {"shape": (2, 0)}, {"shape": (2, 2), "names": ("a", "a")}):
        with pytest.raises(ClusterError):
            Mesh(**arguments)
    with pytest.raises(ClusterError, match="axes 0 to 1"):
        Mesh(shape=(2, 2)).groups([2])


@given(st.lists(st.integers(2, 8), min_size=1, max_size=3), st.integers(1, 3), st.booleans())
def test_aligned_axes_lie_in_one_level_or_cover_whole_ones(sizes, max_axes, ordered):
    levels = tuple((f"level{i}", size) for i, size in enumerate(sizes))
    bounds = {math.prod(sizes[i:]) for i in range(len(sizes) + 1)}
    meshes = _aligned_meshes(levels, max_axes, ordered=ordered)
    assert meshes[0].shape == (math.prod(sizes),)
    assert len({mesh.shape for mesh in meshes}) == len(meshes)
    for mesh in meshes:
        assert mesh.size == math.prod(sizes)
        assert mesh.axis_count <= max_axes
        for axis, size in enumerate(mesh.shape):
            stride = math.prod(mesh.shape[axis + 1 :])
            inside = any(stride < bound < stride * size for bound in bounds)
            assert not inside or {stride, stride * size} <= bounds


def test_meshes_of_clusters():
    def labels(name, **kwargs):
        return [mesh.label for mesh in load_cluster(name).meshes(**kwargs)]

    assert labels("dgx-h100x2", max_axes=1) == ["16"]
    for name, wanted in {
        "local:1": ["1"],
        "local:2": ["2"],
        "local:6": ["6", "2x3"],
        "dgx-h100x2": ["16", "2x8", "2x2x4"],
        "dgx-h100x4": ["32", "4x8", "2x2x8", "4x2x4"],
        "dgx-v100": ["8", "2x4", "4x2", "2x2x2"],  # whose pairs differ, so that the order of axes matters
    }.items():
        assert labels(name) == wanted
    assert load_cluster("dgx-h100x2").meshes()[2].names == ("node", "gpu0", "gpu1")


@pytest.mark.parametrize("size", [16_384, 100_000, 13_125 * 8, 10_007, 2**31 - 1, 10**12])
def test_meshes_of_huge_levels_are_listed_by_divisors(size):
    """A number is divided by nothing above its square root: a level of 2**31 - 1 ranks would else take
    hours, and this test never end."""
    shapes = {mesh.shape for mesh in _aligned_meshes((("level", size),), 2, ordered=True)}
    assert (size,) in shapes
    assert all(math.prod(shape) == size and min(shape) > 1 for shape in shapes)


CLUSTERS = ["local:2", "dgx-h100x4", "dgx-v100x2", "netsplit-paper", "tensoropt-paper", "baechi-paper"]


@pytest.mark.parametrize("name", CLUSTERS)
def test_saving_and_copying_keep_everything(name):
    cluster = load_cluster(name)
    saved = json.loads(json.dumps(cluster.to_dict()))
    for twin in (Cluster.from_dict(saved), pickle.loads(pickle.dumps(cluster)), copy.deepcopy(cluster)):
        assert twin == cluster
        assert hash(twin) == hash(cluster)
        assert (twin.fingerprint, twin.to_dict()) == (cluster.fingerprint, cluster.to_dict())


def test_a_broken_save_is_refused():
    saved = load_cluster("local:2").to_dict()
    del saved["levels"]
    with pytest.raises(ClusterError, match="not a saved cluster"):
        Cluster.from_dict(saved)


def test_the_fingerprint_follows_hardware_only():
    cluster = load_cluster("dgx-h100x2")

    def changed(**fields):
        return tuple(dataclasses.replace(kind, **fields) for kind in cluster.devices)

    slower = dataclasses.replace(cluster.levels[0], link=link("IB-100G"))
    for changes, same in (
        ({"name": "ours", "source": "x"}, True),
        ({"devices": changed(price_per_hour=2.0)}, True),
        ({"devices": changed(capability="")}, True),
        ({"devices": changed(memory_bytes=1000)}, False),
        ({"levels": (slower, cluster.levels[1])}, False),
    ):
        other = dataclasses.replace(cluster, **changes)
        assert (other.fingerprint == cluster.fingerprint) == same, changes


def test_links_by_rank():
    cluster = load_cluster("dgx-v100x2")
    assert cluster.link(0, 3).name == cluster.link(11, 8).name == "NVLink2-x2"
    assert (cluster.link(0, 7).name, cluster.link(7, 8).name) == ("PCIe3-SYS", "IB-100G")
    assert cluster.crossing_level(7, 8).link_count == 4
    for pair in ((0, 0), (0, 16), (-1, 2)):
        with pytest.raises(ClusterError, match="0 to 15"):
            cluster.link(*pair)


def test_a_sharded_plan_sees_the_slowest_and_the_smallest_device():
    fast, slow = device_kind("H100-80GB"), device_kind("V100-16GB")
    level = Level(name="gpu", size=2, link=link("PCIe3"))
    cluster = Cluster(name="mixed", devices=(fast, slow), levels=(level,))
    assert (cluster.device, cluster.memory_bytes) == (slow, 16 * 2**30)
    assert cluster.device_kinds == (fast, slow)
    assert cluster.device_type == "cuda"
    assert "1 x H100-80GB, 1 x V100-16GB" in cluster.describe()


def test_cpu_ranks_beside_gpus():
    fast, slow, core = device_kind("H100-80GB"), device_kind("V100-16GB"), device_kind("CPU-core")
    level = Level(name="gpu", size=4, link=link("PCIe3"))
    cluster = Cluster(name="mixed", devices=(core, fast, core, slow), levels=(level,))
    assert cluster.device_types == ("cuda", "cpu")
    assert cluster.device_type == "cuda"
    assert cluster.best_first == (1, 3, 0, 2)
    assert cluster.kinds_of_type == (fast, slow)
    assert cluster.device == slow
    assert Cluster.from_dict(cluster.to_dict()) == cluster
    assert cluster.subset(1).device_types == ("cpu",)
    assert cluster.subset(1).device == core


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
    with pytest.raises(ClusterError, match="inner levels can only be taken whole"):
        load_cluster("dgx-h100x2[12]")
    with pytest.raises(ClusterError, match="inner levels can only be taken whole"):
        load_cluster("dgx-h100x2").subset(32)
    with pytest.raises(ClusterError, match="unknown cluster 'dgx'"):
        load_cluster("dgx[2]")


@pytest.mark.parametrize(
    ("name", "sizes"), [("dgx-h100", (1, 2, 4, 8)), ("dgx-h100x3", (1, 2, 4, 8, 16, 24)), ("local:1", (1,))]
)
def test_parts_double_up_to_the_whole(name, sizes):
    assert load_cluster(name).part_sizes == sizes


def _kind(**changes):
    values = {
        "name": "k", "type": "cpu", "memory_bytes": 1, "flops": {"float32": 1.0}, "memory_bandwidth": 1.0,
    }  # fmt: skip
    return DeviceKind(**{**values, **changes})


@pytest.mark.parametrize("make", [
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
])  # fmt: skip
def test_impossible_hardware_is_refused(make):
    assert _kind().memory_bytes == 1  # what programs and saved files say is in base units, however little
    with pytest.raises(ClusterError) as caught:
        make()
    assert isinstance(caught.value, ValueError)
