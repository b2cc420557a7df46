"""A cluster in equal parts, and the meshes of jobs over them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensoropt.cluster import Cluster, Level, Link, device_kind, load_cluster
from tensoropt.errors import ClusterError
from tensoropt.pipeline.meshes import degrees_of, job_meshes, kinds_at


def levels(*sizes: int) -> Cluster:
    """A cluster of levels of these sizes, outermost first."""
    link = Link(name="wire", latency_s=1e-6, bandwidth_bytes_per_s=1e9)
    return Cluster(
        name="toy",
        devices=(device_kind("CPU-core"),) * math.prod(sizes),
        levels=tuple(Level(name=f"level{i}", size=size, link=link) for i, size in enumerate(sizes)),
    )


def test_the_pipeline_is_the_first_axis() -> None:
    assert [(m.shape, m.names) for m in job_meshes(levels(2, 4), 2, 2)] == [
        ((2, 4), ("stage", "level1")),
        ((2, 2, 2), ("stage", "level10", "level11")),
    ]
    assert [m.shape for m in job_meshes(levels(2, 4), 2, 1)] == [(2, 4)]


def test_kinds_of_places_follow_the_ranks() -> None:
    fast, slow = device_kind("H100-80GB"), device_kind("A100-80GB")
    pairs = replace(levels(2, 2), devices=(fast, fast, slow, slow))
    assert kinds_at(pairs, 2) == ((fast,), (slow,))
    assert kinds_at(pairs, 4) == ((fast,), (fast,), (slow,), (slow,))
    alternating = replace(pairs, devices=(fast, slow, fast, slow))
    assert kinds_at(alternating, 2) == ((fast, slow), (fast, slow))


def test_places_lie_within_nodes_or_cover_them() -> None:
    assert [m.shape for m in job_meshes(levels(4, 2), 2, 2)] == [(2, 4), (2, 2, 2)]
    assert [m.names for m in job_meshes(levels(4, 2), 2, 2)] == [
        ("stage", "level0_level1"), ("stage", "level0", "level1"),
    ]  # fmt: skip
    assert [(m.shape, m.names) for m in job_meshes(levels(4, 2), 4, 2)] == [((4, 2), ("stage", "level1"))]


def test_a_place_of_one_device_has_no_axis() -> None:
    assert [(m.shape, m.names) for m in job_meshes(levels(2, 4), 8, 2)] == [((8,), ("stage",))]
    assert job_meshes(load_cluster("cpu:2"), 2, 2)[0].shape == (2,)


@pytest.mark.parametrize(
    ("sizes", "degrees"),
    [
        ((1,), ()),
        ((2,), (2,)),
        ((6,), (2, 3, 6)),
        ((2, 4), (2, 4, 8)),
        # Halves are a node and a half. Quarters are three devices of four, the second of them in two nodes.
        ((3, 4), (3, 6, 12)),
        # Thirds are two nodes, where a rack has three.
        ((2, 3, 4), (2, 6, 12, 24)),
    ],
)
def test_degrees_are_those_of_equal_parts_of_whole_links(
    sizes: tuple[int, ...], degrees: tuple[int, ...]
) -> None:
    assert degrees_of(levels(*sizes)) == degrees


@pytest.mark.parametrize(
    ("places", "says"),
    [
        (1, "12 devices are not in 1 equal parts of a pipeline; give a divisor .* at least 2"),
        (0, "12 devices are not in 0 equal parts"),
        (5, "12 devices are not in 5 equal parts"),
        (24, "12 devices are not in 24 equal parts"),
        (2, "6 devices do not fill whole levels"),
        (4, "4 equal parts of cluster 'toy' would lie across its links: each has 3 of the 4 of a level"),
    ],
)  # fmt: skip
def test_other_numbers_of_places_are_refused(places: int, says: str) -> None:
    with pytest.raises(ClusterError, match=says):
        job_meshes(levels(3, 4), places, 2)


@given(st.lists(st.integers(2, 6), min_size=1, max_size=3), st.data())
def test_every_place_is_linked_as_the_first(sizes: list[int], data: st.DataObject) -> None:
    cluster = levels(*sizes)
    places = data.draw(st.sampled_from(degrees_of(cluster)))
    each = cluster.device_count // places
    for mesh in job_meshes(cluster, places, 3):
        assert mesh.size == cluster.device_count
        assert mesh.shape[0] == places
        assert min(mesh.shape) > 1
    for place in range(1, places):
        for a in range(each):
            for b in range(a):
                here = cluster.crossing_level(place * each + a, place * each + b)
                assert here is cluster.crossing_level(a, b)
