"""Seconds of messages and collectives of a pipeline, worked out by hand on a small cluster.

A cluster in equal parts, and the meshes of jobs over them.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensoropt import ClusterError, Settings
from tensoropt.cluster import Cluster, DeviceKind, Link, Mesh, load_cluster
from tensoropt.cluster.catalog import device_kind
from tensoropt.cluster.hardware import Level
from tensoropt.costs.communication import CommunicationModel
from tensoropt.costs.source import CostSource
from tensoropt.pipeline.costs import (
    PipelinePrices,
    PlaceCommunication,
    degrees_of,
    job_meshes,
    kinds_at,
    sources_at,
)
from tensoropt.profiling.link_fits import LinkFit
from tensoropt.profiling.links import LinkFits
from tensoropt.profiling.overheads import Overheads
from tensoropt.profiling.store import ProfileStore
from tests.costs.models import ToyCompute, four, problem
from tests.costs.test_communication import make_cluster, make_fit


def levels(*sizes: int) -> Cluster:
    """A cluster of levels of these sizes, outermost first."""
    link = Link(name="wire", latency_s=1e-6, bandwidth_bytes_per_s=1e9)
    return Cluster(
        name="toy",
        devices=(device_kind("CPU-core"),) * math.prod(sizes),
        levels=tuple(Level(name=f"level{i}", size=size, link=link) for i, size in enumerate(sizes)),
    )


@pytest.mark.parametrize(("sizes", "places", "most", "meshes"), [
    ((2, 4), 2, 2, [((2, 4), ("level1",)), ((2, 2, 2), ("level10", "level11"))]),
    ((2, 4), 2, 1, [((2, 4), ("level1",))]),
    # Places lie within nodes or cover them, and one of a single device has no axis.
    ((4, 2), 2, 2, [((2, 4), ("level0_level1",)), ((2, 2, 2), ("level0", "level1"))]),
    ((4, 2), 4, 2, [((4, 2), ("level1",))]),
    ((2, 4), 8, 2, [((8,), ())]),
])  # fmt: skip
def test_the_pipeline_is_the_first_axis(sizes, places, most, meshes):
    found = job_meshes(levels(*sizes), places, most)
    assert [(m.shape, m.names) for m in found] == [(shape, ("stage", *names)) for shape, names in meshes]


def test_kinds_of_places_follow_the_ranks():
    fast, slow = device_kind("H100-80GB"), device_kind("A100-80GB")
    pairs = replace(levels(2, 2), devices=(fast, fast, slow, slow))
    assert kinds_at(pairs, 2) == ((fast,), (slow,))
    assert kinds_at(pairs, 4) == ((fast,), (fast,), (slow,), (slow,))
    alternating = replace(pairs, devices=(fast, slow, fast, slow))
    assert kinds_at(alternating, 2) == ((fast, slow), (fast, slow))


@pytest.mark.parametrize(("sizes", "degrees"), [
    ((1,), ()),
    ((2,), (2,)),
    ((6,), (2, 3, 6)),
    ((2, 4), (2, 4, 8)),
    # Halves are a node and a half. Quarters are three devices of four, the second of them in two nodes.
    ((3, 4), (3, 6, 12)),
    # Thirds are two nodes, where a rack has three.
    ((2, 3, 4), (2, 6, 12, 24)),
])  # fmt: skip
def test_degrees_are_those_of_equal_parts_of_whole_links(sizes, degrees):
    assert degrees_of(levels(*sizes)) == degrees


@pytest.mark.parametrize(("places", "says"), [
    (1, "12 devices cannot be divided into 1 equal parts of a pipeline; give a divisor .* at least 2"),
    (0, "12 devices cannot be divided into 0 equal parts"),
    (5, "12 devices cannot be divided into 5 equal parts"),
    (24, "12 devices cannot be divided into 24 equal parts"),
    (2, "6 devices do not fill whole levels"),
    (4, "4 equal parts of cluster 'toy' would cut across its links: each has 3 of the 4 members of a level"),
])  # fmt: skip
def test_other_numbers_of_places_are_refused(places, says):
    with pytest.raises(ClusterError, match=says):
        job_meshes(levels(3, 4), places, 2)


@given(st.lists(st.integers(2, 6), min_size=1, max_size=3), st.data())
def test_every_place_is_linked_as_the_first(sizes, data):
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


MB = 1e6
"""10 µs on the 100 GB/s inside a node of :func:`make_cluster`, 100 µs on the 10 GB/s between nodes."""


def prices(
    cluster: Cluster, shape: tuple[int, ...], measured: Mapping[tuple[int, int], LinkFit] | None = None, *,
    beside: bool = True,
) -> PipelinePrices:  # fmt: skip
    mesh = Mesh(shape=shape, names=("stage", *(f"axis{i}" for i in range(len(shape) - 1))))
    fits = None if measured is None else LinkFits(collectives={}, pairs=measured)
    model = CommunicationModel(cluster, mesh, fits)
    return PipelinePrices(cluster, mesh, ToyCompute(), model, Overheads(), "adam", beside=beside)


# -- messages -------------------------------------------------------------------------------------


NEAR_S, FAR_S = 1e-6 + 10e-6, 10e-6 + 100e-6


@pytest.mark.parametrize(("nodes", "per_node", "cards", "shape", "between", "seconds"), [
    # Four places of two ranks on two nodes of four: 0 and 1 share a node, 2 and 3 the other.
    (2, 4, 2, (4, 2), (0, 1), NEAR_S),
    (2, 4, 2, (4, 2), (2, 3), NEAR_S),
    (2, 4, 2, (4, 2), (1, 2), FAR_S),
    # Of the node's four ranks those of place 1 send over its one card, those of place 0 do not.
    (2, 4, 1, (4, 2), (1, 2), 10e-6 + 2 * 100e-6),
    (2, 4, 1, (2, 4), (0, 1), 10e-6 + 4 * 100e-6),  # all four ranks of a node through its one card
    (2, 4, 2, (2, 4), (0, 1), 10e-6 + 2 * 100e-6),
    (2, 4, 4, (2, 4), (0, 1), FAR_S),
    (2, 4, 8, (2, 4), (0, 1), FAR_S),  # a rank drives one card
    (2, 4, 1, (2, 2, 2), (0, 1), 10e-6 + 4 * 100e-6),  # however the place's mesh is folded
    (4, 2, 1, (2, 4), (0, 1), 10e-6 + 2 * 100e-6),  # a place of two nodes has two cards
    (2, 1, 1, (2,), (0, 1), FAR_S),
    (1, 8, 1, (2, 4), (0, 1), NEAR_S),  # a switch: every rank has its own link
])  # fmt: skip
def test_a_message_takes_the_link_and_its_part_of_the_cards(nodes, per_node, cards, shape, between, seconds):
    found, (one, other) = prices(make_cluster(nodes, per_node, cards), shape), between
    assert found.message_s(one, other, MB) == found.message_s(other, one, MB) == pytest.approx(seconds)
    # Nothing is sent within a place, and nothing takes nothing.
    assert found.message_s(one, one, MB) == found.message_s(one, other, 0) == 0.0


def test_a_measured_pair_is_believed_as_it_is():
    fit = make_fit("pair", (0, 4), 50e-6, 1e-9)
    found = prices(make_cluster(2, 4), (2, 4), {(0, 4): fit})
    assert found.message_s(0, 1, MB) == found.message_s(1, 0, MB) == pytest.approx(50e-6 + 1e-3)


def test_wires_of_a_pair_are_its_own():
    wire = Link(name="wire", latency_s=2e-6, bandwidth_bytes_per_s=50e9, dedicated=True)
    plain = make_cluster(1, 2)
    wired = Cluster(name="wired", devices=plain.devices, levels=plain.levels, pairs={(0, 1): wire})
    assert prices(wired, (2,)).message_s(0, 1, MB) == pytest.approx(2e-6 + 20e-6)


# -- collectives within a place -------------------------------------------------------------------


def test_axes_of_a_place_are_counted_without_the_pipeline():
    cluster, mesh = make_cluster(2, 4), Mesh(shape=(2, 2, 2))
    job = CommunicationModel(cluster, mesh)
    place = PlaceCommunication(job)
    for axes, of_job in (((0,), (1,)), ((1,), (2,)), ((0, 1), (1, 2))):
        assert place.time_s("all_reduce", axes, MB) == job.time_s("all_reduce", of_job, MB)
        assert place.source("all_reduce", axes) == "data sheet"
    # Four ranks of a node: three hops and three quarters of the bytes, there and back.
    assert place.time_s("all_reduce", (0, 1), MB) == pytest.approx(6e-6 + 1.5 * 10e-6)
    assert place.described == f"a place of {job.described}"


def test_other_places_have_their_collectives_meanwhile():
    # Two places of two nodes of two: each pair of ranks that are alike on their nodes has half of a card.
    place = PlaceCommunication(CommunicationModel(make_cluster(4, 2), Mesh(shape=(2, 2, 2))))
    assert place.time_s("all_gather", (0,), MB) == pytest.approx(10e-6 + 0.5 * 200e-6)
    # Inside a node they cost what they cost alone.
    assert place.time_s("all_gather", (1,), MB) == pytest.approx(1e-6 + 0.5 * 10e-6)


@pytest.mark.parametrize("beside", [True, False])
def test_links_of_a_place_are_those_of_its_axes(beside):
    found = prices(load_cluster("dgx-h100x4"), (2, 2, 8), beside=beside).overlap
    assert found.beside is beside
    # Of two nodes of eight: between them, inside them, and both.
    assert dict(found.by_axes) == {(0,): ("node",), (1,): ("gpu",), (0, 1): ("node", "gpu")}


def test_a_stage_is_priced_as_a_model_on_the_mesh_of_a_place():
    found = prices(make_cluster(2, 4), (4, 2))
    stage = found.of_stage(problem(four).graph, (2, 2), in_flight=3)
    assert stage.communication is found.of_place
    assert (stage.optimizer, stage.in_flight, stage.packs) == ("adam", 3, True)
    assert not prices(load_cluster("dgx-h100[4]"), (2, 2)).of_stage(problem(four).graph, (1, 2)).packs


def test_a_cost_source_gives_the_prices_of_the_job(tmp_path):
    cluster, mesh = load_cluster("dgx-h100x2"), Mesh(shape=(2, 8), names=("stage", "gpu"))
    with ProfileStore(tmp_path / "profiles.sqlite") as store:
        found = PipelinePrices.of(CostSource(cluster, store, Settings(optimizer="sgd")), mesh)
    assert (found.optimizer, found.beside, found.devices_per_place) == ("sgd", True, 8)
    # 8 cards of 400 Gbit/s for 8 ranks: each message has one.
    alone = found.communication.pair_time_s(0, 8, MB) + 2 * found.message_end.device_s
    assert found.message_s(0, 1, MB) == alone


# -- several kinds of devices ---------------------------------------------------------------------


def kind(name: str, speed: float, memory_bytes: int) -> DeviceKind:
    """A CPU core of so many TFLOP/s and TB/s."""
    peak = speed * 1e12
    return DeviceKind(
        name=name, type="cpu", memory_bytes=memory_bytes, flops={"float32": peak}, memory_bandwidth=peak
    )


FAST, SLOW = kind("fast", 4.0, 2**30), kind("slow", 1.0, 2**31)


def of_kinds(tmp_path: Path, *kinds: DeviceKind) -> tuple[CostSource, PipelinePrices]:
    """Two places of two devices each, on two nodes."""
    cluster = replace(make_cluster(2, 2), devices=kinds)
    with ProfileStore(tmp_path / "profiles.sqlite") as store:
        costs = CostSource(cluster, store, Settings(optimizer="sgd"))
        return costs, PipelinePrices.of(costs, Mesh(shape=(2, 2), names=("stage", "gpu")))


def test_each_place_has_the_prices_of_its_kind(tmp_path):
    costs, found = of_kinds(tmp_path, FAST, FAST, SLOW, SLOW)
    assert found.kinds == ("fast", "slow")
    assert [found.room(place) for place in (0, 1)] == [2**30, 2**31]
    # An optimizer moves bytes: four times as fast on four times the bandwidth.
    fast_s, slow_s = (found.at(place).compute.optimizer_s_per_element for place in (0, 1))
    assert slow_s == pytest.approx(4 * fast_s)
    assert found.compute.optimizer_s_per_element == slow_s
    # Links are those of the whole cluster.
    assert found.at(0).message_s(0, 1, MB) == found.message_s(0, 1, MB)
    assert [len(one.cluster.device_kinds) for one in sources_at(costs, 2)] == [1, 1]
    first, *_, last = sources_at(costs, 4)
    assert (first, last) == (costs.on((FAST,)), costs.on((SLOW,)))


def test_facts_are_of_each_kind(tmp_path):
    costs, _ = of_kinds(tmp_path, FAST, FAST, SLOW, SLOW)
    costs.facts.found["work"] = costs.timings.records["work"] = None  # type: ignore[assignment]
    fast, slow = costs.on((FAST,)), costs.on((SLOW,))
    assert not fast.facts.found
    assert not slow.timings.records
    assert fast.facts is not slow.facts


def test_a_place_of_several_kinds_goes_at_the_slowest_of_its_own(tmp_path):
    middle = kind("middle", 2.0, 2**32)
    _, found = of_kinds(tmp_path, FAST, middle, SLOW, SLOW)
    assert found.kinds == ("fast + middle", "slow")
    assert found.room(0) == 2**30
    seconds = [found.at(place).compute.optimizer_s_per_element for place in (0, 1)]
    assert seconds[1] == pytest.approx(2 * seconds[0])


def test_places_that_are_alike_share_the_prices_of_all(tmp_path):
    for kinds in ((FAST, FAST, FAST, FAST), (FAST, SLOW, FAST, SLOW)):
        costs, found = of_kinds(tmp_path, *kinds)
        assert sources_at(costs, 2) == [costs, costs]
        assert (found.kinds, found.of_places, found.at(1), found.room(0)) == ((), (), found, inf)
