"""Meshes: ranks, groups, and which ones are aligned with the levels."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensoropt.cluster import Mesh, load_cluster
from tensoropt.cluster.mesh import _divisors, _factorisations, aligned_meshes
from tensoropt.errors import ClusterError
from tests import naive

shapes = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)


@given(shapes, st.data())
def test_groups_are_the_ranks_that_differ_only_along_the_axes(shape, data):
    mesh = Mesh(shape=shape)
    axes = data.draw(st.sets(st.integers(0, len(shape) - 1)))
    groups = mesh.groups(axes)
    assert sorted(itertools.chain(*groups)) == list(range(mesh.size))
    assert groups == tuple(sorted(groups))
    for group in groups:
        assert list(group) == sorted(group)
        assert len(group) == math.prod(shape[axis] for axis in axes)
        for rank in group:
            ours, first = mesh.coordinates(rank), mesh.coordinates(group[0])
            assert all(ours[a] == first[a] for a in range(len(shape)) if a not in axes)


def test_the_last_axis_is_the_innermost():
    mesh = Mesh(shape=(2, 4), names=("node", "gpu"))
    assert mesh.label == str(mesh) == "2x4"
    assert mesh.strides == (4, 1)
    assert mesh.groups([1]) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert mesh.groups([0]) == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert mesh.groups([]) == tuple((rank,) for rank in range(8))
    assert mesh.axis_subsets() == ((0,), (1,), (0, 1))
    assert Mesh.from_dict(mesh.to_dict()) == mesh


def test_impossible_meshes_and_axes_are_refused():
    for arguments in ({"shape": ()}, {"shape": (2, 0)}, {"shape": (2, 2), "names": ("a", "a")}):
        with pytest.raises(ClusterError):
            Mesh(**arguments)
    with pytest.raises(ClusterError, match="axes 0 to 1"):
        Mesh(shape=(2, 2)).groups([2])
    with pytest.raises(ClusterError, match="0 to 3"):
        Mesh(shape=(2, 2)).coordinates(4)


@given(st.lists(st.integers(2, 8), min_size=1, max_size=3), st.integers(1, 3), st.booleans())
def test_aligned_axes_lie_in_one_level_or_cover_whole_ones(sizes, max_axes, ordered):
    levels = tuple((f"level{i}", size) for i, size in enumerate(sizes))
    bounds = {math.prod(sizes[i:]) for i in range(len(sizes) + 1)}
    meshes = aligned_meshes(levels, max_axes, ordered=ordered)
    assert meshes[0].shape == (math.prod(sizes),)
    assert len({mesh.shape for mesh in meshes}) == len(meshes)
    for mesh in meshes:
        assert mesh.size == math.prod(sizes)
        assert mesh.axis_count <= max_axes
        for stride, size in zip(mesh.strides, mesh.shape, strict=True):
            inside = any(stride < bound < stride * size for bound in bounds)
            assert not inside or {stride, stride * size} <= bounds


def test_meshes_of_clusters():
    def labels(name, **kwargs):
        return [mesh.label for mesh in load_cluster(name).meshes(**kwargs)]

    assert labels("local:1") == ["1"]
    assert labels("local:2") == ["2"]
    assert labels("local:4") == ["4", "2x2"]
    assert labels("local:6") == ["6", "2x3"]
    assert labels("dgx-h100x2") == ["16", "2x8", "2x2x4"]
    assert labels("dgx-h100x2", max_axes=1) == ["16"]
    assert labels("dgx-h100x4") == ["32", "4x8", "2x2x8", "4x2x4"]
    # Its pairs differ, so the order of axes matters.
    assert labels("dgx-v100") == ["8", "2x4", "4x2", "2x2x2"]
    assert load_cluster("dgx-h100x2").meshes()[2].names == ("node", "gpu0", "gpu1")


@pytest.mark.parametrize("number", [*range(2, 31), 36, 48])
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_factorisations_are_those_that_trying_all_finds(number, parts):
    assert list(_factorisations(number, parts)) == naive.factorisations(number, parts)


@given(st.integers(1, 3000))
def test_divisors_are_all_of_them_ascending(number):
    assert _divisors(number) == tuple(n for n in range(1, number + 1) if number % n == 0)


@pytest.mark.parametrize("size", [16_384, 100_000, 13_125 * 8, 10_007, 2**31 - 1, 10**12])
def test_meshes_of_huge_levels_are_listed_by_divisors(size):
    """A number is divided by nothing above its square root: a level of 2**31 - 1 ranks would else take
    hours, and this test never end."""
    shapes = {mesh.shape for mesh in aligned_meshes((("level", size),), 2, ordered=True)}
    assert (size,) in shapes
    assert all(math.prod(shape) == size and min(shape) > 1 for shape in shapes)
    assert len(shapes) == max(1, len(_divisors(size)) - 1)
