"""The communication model against values worked out by hand, and its order of trust."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensoropt.cluster import Cluster, Link, Mesh, load_cluster
from tensoropt.cluster.catalog import device_kind
from tensoropt.cluster.hardware import Level
from tensoropt.costs.communication import CommunicationModel, _pair_ring_bandwidth, group_link
from tensoropt.errors import ClusterError, MeasurementError
from tensoropt.profiling.link_fits import LinkFit, Segment
from tensoropt.profiling.link_timing import COLLECTIVES
from tensoropt.profiling.links import LinkFits

MIB = 2**20


def make_cluster(nodes: int, per_node: int, cards: int = 1) -> Cluster:
    """CPU ranks, so that no launch time is added: 1 us and 100 GB/s inside, 10 us and 10 GB/s between."""
    levels = (
        Level(
            name="node",
            size=nodes,
            link=Link(name="net", latency_s=10e-6, bandwidth_bytes_per_s=10e9),
            link_count=cards,
        ),
        Level(name="cpu", size=per_node, link=Link(name="bus", latency_s=1e-6, bandwidth_bytes_per_s=100e9)),
    )
    return Cluster(name="toy", devices=(device_kind("CPU-core"),) * (nodes * per_node), levels=levels)


def make_fit(kind: str, group: tuple[int, ...], alpha: float, slope: float) -> LinkFit:
    segment = Segment(alpha_s=alpha, seconds_per_byte=slope)
    return LinkFit(kind=kind, group=group, segments=(segment,), residual=0.0)


def test_formulas_inside_a_node():
    model = CommunicationModel(make_cluster(1, 4), Mesh(shape=(4,)))
    n = 100e6  # 1 ms at full speed
    for kind, seconds in (
        ("all_gather", 3e-6 + 0.75e-3), ("reduce_scatter", 3e-6 + 0.75e-3), ("all_reduce", 6e-6 + 1.5e-3),
        ("all_to_all", 3e-6 + 0.75e-3), ("broadcast", 2e-6 + 1e-3),
    ):  # fmt: skip
        assert model.time_s(kind, [0], n) == pytest.approx(seconds)
        assert model.source(kind, [0]) == "data sheet"
    assert model.time_s("all_reduce", [0], 100) == pytest.approx(4e-6 + 2e-9)  # the tree
    assert model.source("ring_send", [0]) == "data sheet"


@pytest.mark.parametrize(
    ("cards", "shape", "axes", "bandwidth", "latency_s"),
    [
        (1, (2, 4), (1,), 100e9, 1e-6),  # inside a node
        (4, (2, 4), (0, 1), 10e9, 10e-6),  # one message leaves each node, by one card
        (1, (2, 4), (0,), 2.5e9, 10e-6),  # four do, by the same
        (4, (2, 4), (0,), 10e9, 10e-6),
    ],
)
def test_a_message_to_the_next_rank_takes_as_long_as_over_the_slowest_hop(
    cards, shape, axes, bandwidth, latency_s
):
    model = CommunicationModel(make_cluster(2, 4, cards), Mesh(shape=shape))
    assert model.time_s("ring_send", axes, 1e6) == pytest.approx(latency_s + 1e6 / bandwidth)
    # One step of a gathering that makes as many rings as there are cards.
    gathered = model.time_s("all_gather", axes, 1e6 * math.prod(shape[axis] for axis in axes))
    steps = math.prod(shape[axis] for axis in axes) - 1
    assert gathered < steps * model.time_s("ring_send", axes, 1e6) * (1 + 1e-9)


CARDS = {cards: make_cluster(2, 4, cards) for cards in (1, 2, 4, 8)}
V100X2, PAIRS = load_cluster("dgx-v100x2"), load_cluster("netsplit-paper")
"""With four cards of 12.5 GB/s per node; a rank with a fast link to one other alone."""


@pytest.mark.parametrize(
    ("cluster", "shape", "axes", "bandwidth"),
    [
        (CARDS[1], (2, 4), (1,), 100e9),  # inside a node
        (CARDS[1], (2, 4), (0, 1), 10e9),  # one ring through both nodes: it owns the card
        (CARDS[1], (2, 4), (0,), 2.5e9),  # four groups leave each node by one card
        (CARDS[2], (2, 4), (0,), 5e9),
        (CARDS[4], (2, 4), (0,), 10e9),
        (CARDS[8], (2, 4), (0,), 10e9),  # a rank drives one card
        (CARDS[4], (2, 4), (0, 1), 40e9),  # a ring per card
        (CARDS[8], (2, 4), (0, 1), 40e9),  # no more rings than ranks per node
        (CARDS[1], (2, 2, 2), (0, 1), 5e9),  # two groups, each with two ranks per node
        (CARDS[4], (2, 2, 2), (0, 2), 20e9),
        (V100X2, (2, 8), (1,), 150e9),  # pairs inside nodes, and cards between
        (V100X2, (2, 8), (0, 1), 50e9),
        (V100X2, (2, 8), (0,), 6.25e9),
        (PAIRS, (3,), (0,), 10e9),  # the slow pair decides the ring
    ],
)
def test_groups_share_the_cards_of_a_node(cluster, shape, axes, bandwidth):
    assert 1 / group_link(cluster, Mesh(shape=shape), axes).seconds_per_byte == pytest.approx(bandwidth)


@pytest.mark.parametrize(
    ("cluster", "shape", "axes", "of_link", "value"),
    [
        (CARDS[1], (2, 4), (0, 1), "hop_s", (6 * 1e-6 + 2 * 10e-6) / 8),  # the mean of the hops
        (CARDS[1], (2, 4), (0,), "hop_s", 10e-6),
        # Each of 4 ranks sends 4/8 of its input to the other node by one card of 10 GB/s.
        (CARDS[1], (2, 4), (0, 1), "exchange_seconds_per_byte", 4 * 0.5 / 10e9),
        (CARDS[4], (2, 4), (0,), "exchange_seconds_per_byte", 0.5 / 10e9),
        # A rank sends a third by each of two links, one after the other; ranks 0 and 1 have one fast link.
        (PAIRS, (3,), (0,), "exchange_seconds_per_byte", 2 / 10e9 / 3),
        # 0-1, 1-2, 2-3 and 3-0 of the cube mesh: one wire of 25 GB/s at least, and two between 0 and 3.
        (load_cluster("dgx-v100"), (2, 4), (1,), "hop_seconds_per_byte", 1 / 25e9),
    ],
)
def test_hops_and_exchanges(cluster, shape, axes, of_link, value):
    assert getattr(group_link(cluster, Mesh(shape=shape), axes), of_link) == pytest.approx(value)


@pytest.mark.parametrize(
    ("ranks", "bandwidth"),
    [
        (range(8), 150e9),  # all six wires of each GPU
        (range(4), 100e9),
        ((0, 3), 50e9),
        ((0, 1), 25e9),
        ((0, 5), 8e9),  # over the sockets
        ((0, 1, 2), 50e9),  # the wires 0-1, 0-2, 1-2: rank 0 has two single ones
    ],
)
def test_the_cube_mesh(ranks, bandwidth):
    assert _pair_ring_bandwidth(load_cluster("dgx-v100"), tuple(ranks)) == pytest.approx(bandwidth)


def test_measured_beats_fitted_beats_data_sheet():
    cluster, mesh = make_cluster(2, 2), Mesh(shape=(2, 2))
    assert CommunicationModel(cluster, mesh).source("all_reduce", [0]) == "data sheet"
    pairs = {
        (i, j): make_fit("send", (i, j), 5e-6, 1e-9 if j - i > 1 or (i, j) == (1, 2) else 1e-10)
        for i in range(4)
        for j in range(i + 1, 4)
    }
    fits = LinkFits(
        collectives={
            ("all_reduce", (0,)): (
                make_fit("all_reduce", (0, 2), 1e-3, 0.0),
                make_fit("all_reduce", (1, 3), 2e-3, 0.0),
            )
        },
        pairs=pairs,
    )
    model = CommunicationModel(cluster, mesh, fits)
    assert model.source("all_reduce", [0]) == "measured"
    assert model.time_s("all_reduce", [0], 8) == 2e-3  # the slower of the two groups
    assert model.source("all_gather", [1]) == "fitted"
    assert model.time_s("all_gather", [1], 1e6) == pytest.approx(5e-6 + 0.5 * 1e6 * 1e-10)
    assert model.time_s("all_gather", [0], 1e6) == pytest.approx(5e-6 + 0.5 * 1e6 * 2e-9)  # a card for two
    assert (model.pair_time_s(0, 3, 1e6), model.pair_source(3, 0)) == (pytest.approx(5e-6 + 1e-3), "measured")
    assert (
        CommunicationModel(cluster, mesh, replace(fits, pairs={})).source("all_gather", [1]) == "data sheet"
    )


def test_axes_of_size_one_find_the_measurement_of_the_same_groups():
    fits = LinkFits(collectives={("broadcast", (1,)): (make_fit("broadcast", (0, 1), 7e-3, 0.0),)})
    model = CommunicationModel(make_cluster(1, 2), Mesh(shape=(1, 2)), fits)
    assert model.time_s("broadcast", (0, 1), 8) == 7e-3
    assert model.source("broadcast", (1, 0)) == "measured"
    assert model.time_s("broadcast", (0,), 8) == 0.0


def test_messages_between_two_ranks():
    model = CommunicationModel(make_cluster(2, 2), Mesh(shape=(4,)))
    assert model.pair_time_s(0, 1, 1e6) == pytest.approx(1e-6 + 1e-5)
    assert model.pair_time_s(3, 1, 1e6) == pytest.approx(10e-6 + 1e-4)
    assert model.pair_time_s(1, 1, 1e6) == model.pair_time_s(0, 1, 0) == 0.0
    assert model.pair_source(0, 1) == "data sheet"


@given(
    st.sampled_from(["local:4", "dgx-h100x2", "tensoropt-paper", "netsplit-paper", "rtx-4090x2"]),
    st.sampled_from(COLLECTIVES),
    st.data(),
)
def test_times_rise_with_the_bytes_from_zero(name, kind, data):
    cluster = load_cluster(name)
    mesh = data.draw(st.sampled_from(cluster.meshes()))
    axes = data.draw(st.sampled_from(mesh.axis_subsets()))
    model = CommunicationModel(cluster, mesh)
    times = [model.time_s(kind, axes, size) for size in (0, 1, 1000, MIB, 64 * MIB)]
    assert times[0] == 0.0
    assert all(0 < a < b < math.inf for a, b in itertools.pairwise(times[1:]))
    assert model.time_s(kind, (), 1e9) == 0.0


def test_a_gpu_collective_has_a_launch():
    model = CommunicationModel(load_cluster("dgx-h100"), Mesh(shape=(8,)))
    assert model.time_s("all_gather", [0], 1e-9) == pytest.approx(8.4e-6 + 7 * 3.4e-6)
    # 2 x 7/8 of the tensor over 450 GB/s.
    assert 1e9 / model.time_s("all_reduce", [0], 1e9) == pytest.approx(257e9, rel=0.02)


def test_impossible_requests_are_refused():
    model = CommunicationModel(make_cluster(1, 4), Mesh(shape=(2, 2)))
    with pytest.raises(MeasurementError, match="valid: all_reduce"):
        model.time_s("allreduce", [0], 1.0)
    with pytest.raises(ClusterError, match="axes 0 to 1"):
        model.source("all_reduce", [2])
