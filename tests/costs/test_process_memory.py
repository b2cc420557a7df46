"""What a process takes beside tensors: terms by hand, none on CPU ranks; how the parts of memory add up."""

from __future__ import annotations

from functools import cache
from math import prod

import numpy as np
import pytest
import torch
from torch import nn

import tensoropt
from tensoropt.capture import capture
from tensoropt.cluster import load_cluster
from tensoropt.cluster.catalog import process_memory_figures
from tensoropt.costs.process_memory import (
    CONSTANTS,
    CONTEXT,
    NO_PROCESS,
    TERMS,
    Communicator,
    ProcessMemory,
    Sending,
    named_terms,
    process_memory,
    terms_of_collectives,
)
from tensoropt.plan.kinds import SHARDED
from tests.models import Call

MIB = 2**20
RECEIVING = 4 * MIB + 640 * 120 * 8 * 8 + 512 * 8 * 8 * 16
"""Bytes of one channel's buffers where data is received, as NCCL's source adds them up."""
CHANNEL = -(-RECEIVING // (2 * MIB)) * 2 * MIB + 2 * MIB
"""In multiples of 2 MiB, with those where it is sent."""


def test_terms_are_estimated_from_what_a_strategy_sends():
    of = ProcessMemory(context=7.0, communicator={"a": Communicator(1, 2, 10), "b": Communicator(3, 2, 1)})
    sent = [("all_gather", (1,)), ("reduce_scatter", (1,)), ("all_reduce", (0,)), ("all_reduce", (2,))]
    # All ranks (5), gathers with the larger figures (3), sums over the first axis (5), none over one rank.
    assert terms_of_collectives(of, sent, (2, 4, 1)) == {CONTEXT: 7.0, "communicators": 5 + 3 + 5}
    assert terms_of_collectives(of, (), (1,)) == {CONTEXT: 7.0}


def normed() -> nn.Module:
    layers = {"linear": nn.Linear(16, 8), "norm": nn.BatchNorm1d(8)}
    return Call(lambda m, x: m.norm(m.linear(x)).square().mean(), **layers)


def graph():
    return capture(normed(), (torch.randn(32, 16),)).graph


@pytest.mark.parametrize(
    ("cluster", "workspaces", "levels"),
    [
        ("dgx-v100", 2 * (4096 * 2 + 16 * 8) * 1024, {"gpu": (16, 32)}),
        ("dgx-a100x2", 2 * (4096 * 2 + 16 * 8) * 1024, {"node": (4, 4), "gpu": (16, 32)}),
        ("dgx-h100x2", 2 * 4096 * 8 * 1024, {"node": (4, 4), "gpu": (16, 32)}),
    ],
)
def test_terms_by_hand(cluster, workspaces, levels):
    found = process_memory(load_cluster(cluster), graph())
    assert found.context == 500 * MIB
    assert found.workspaces == workspaces
    assert found.segments == 22 * MIB
    # The batch, a mean and a variance of eight features, and the count of batches.
    assert found.inputs == 4 * (32 * 16 + 2 * 8) + 8
    assert CHANNEL == 12 * MIB
    assert found.communicator == {
        name: Communicator(channels * CHANNEL, 2 * channels * CHANNEL, of_peer * CHANNEL)
        for name, (channels, of_peer) in levels.items()
    }


def test_cpu_ranks_have_none():
    assert process_memory(load_cluster("local:2"), graph()) == NO_PROCESS
    assert named_terms(NO_PROCESS.constant()) == {}
    assert not NO_PROCESS.terms(3, [Sending(("gpu",), 2, {"all_reduce": np.ones(3, dtype=bool)})]).any()


def test_every_figure_has_its_source():
    for name, figures in process_memory_figures().items():
        assert figures["source"], name


def test_a_communicator_has_what_its_collectives_connect():
    one = Communicator(ring=16.0, tree=32.0, peer=5.0)
    assert one.bytes((), 8) == 0
    assert one.bytes(("all_gather", "reduce_scatter"), 8) == 16
    assert one.bytes(("all_gather", "all_reduce"), 8) == 48
    assert one.bytes(("all_to_all",), 8) == 35
    assert one.bytes(("all_to_all", "all_reduce"), 2) == 53


def test_a_communicator_counts_for_who_sends_and_by_the_dearest_level():
    near, far = Communicator(100.0, 200.0, 10.0), Communicator(10.0, 20.0, 1.0)
    process = ProcessMemory(1.0, 2.0, 3.0, 5.0, {"node": far, "gpu": near})
    first, second = np.array([True, False]), np.array([True, True])
    sending = [
        Sending(("node", "gpu"), 4, {"all_gather": first}),
        Sending(("node",), 2, {"all_gather": second, "all_reduce": first}),
        Sending(("unknown",), 3, {"all_to_all": first}),
    ]
    found = process.terms(2, sending)
    assert found.tolist() == [[1, 2, 3, 100 + 30 + 20, 5, 0], [1, 2, 3, 10, 5, 0]]
    named = dict(zip(TERMS, found[1].tolist(), strict=True))
    assert {name: size for name, size in named.items() if size} == named_terms(process.constant(10.0))


@cache
def explored(cluster: str, **more):
    how = {"cluster": cluster, "measure": "never", "micro_batches": (1,)}
    return tensoropt.explore(normed(), (torch.randn(32, 16),), **how, **more)


def test_what_is_reported_is_tensors_and_terms_everywhere(tmp_path):
    found = explored("dgx-h100x2[4]", epsilon=0.0, process_memory=True, placements="always")
    of = process_memory(load_cluster("dgx-h100x2[4]"), graph())
    assert {point.kind is SHARDED for point in found.points} == {True, False}
    for index, point in enumerate(found.points):
        assert set(point.terms) == set(TERMS) - {CONSTANTS}
        assert point.tensor_bytes == sum(point.memory)
        assert point.memory_bytes == pytest.approx(point.tensor_bytes + sum(point.terms.values()), rel=1e-12)
        predicted = found.plan(index).predicted
        assert predicted.memory_bytes == point.memory_bytes
        assert predicted.terms == point.terms
        assert predicted.tensor_bytes == pytest.approx(point.tensor_bytes, rel=1e-9)
        if point.kind is not SHARDED:
            # Its messages go between pairs of devices, through the communicator of all ranks.
            assert point.terms["communicators"] == of.communicator["gpu"].bytes(("all_reduce",), 4)
        else:
            # One of all ranks, which ends with a sum, and one for every other set of axes that is sent over.
            shape = found.spaces[point.space].mesh.shape
            kinds = {tuple(range(len(shape))): {"all_reduce"}}
            for kind, axes, _, _ in point.collectives:
                kinds.setdefault(tuple(axes), set()).add(kind)
            near = of.communicator["gpu"]
            sent = sum(near.bytes(k, prod(shape[a] for a in axes)) for axes, k in kinds.items())
            assert point.terms["communicators"] == sent
    memory = [point.memory_bytes for point in found.points]
    assert memory == sorted(memory)
    found.save(tmp_path)
    again = tensoropt.load(tmp_path)
    assert [p.terms for p in again.points] == [p.terms for p in found.points]


def test_one_device_has_no_communicator():
    (point, *_) = explored("dgx-h100[1]", process_memory=True).points
    assert set(point.terms) == set(TERMS) - {"communicators", CONSTANTS}
    assert point.changed(terms={}).tensor_bytes == point.tensor_bytes


def test_constants_are_counted_everywhere(tmp_path):
    """A table of 32 rows in each of two layers, which lies in memory once."""

    def added(m, x):
        for layer in m.layers:
            x = layer(x) + torch.arange(32.0)[:, None] * torch.arange(16.0)
        return x.square().mean()

    model = Call(added, layers=nn.ModuleList(nn.Linear(16, 16) for _ in range(2)))
    for cluster, counted in (("cpu:2", False), ("dgx-h100[2]", False), ("dgx-h100[2]", True)):
        settings = {"measure": "never", "process_memory": counted, "micro_batches": [1]}
        found = tensoropt.explore(model, (torch.randn(8, 32, 16),), cluster=cluster, **settings)
        assert {point.terms[CONSTANTS] for point in found.points} == {32 * 16 * 4}
        point = found.points[0]
        assert point.memory_bytes == pytest.approx(sum(point.memory) + sum(point.terms.values()))
    found.save(tmp_path)
    assert tensoropt.load(tmp_path).points[0].terms == point.terms
    assert tensoropt.recost(found)[1][0].memory_bytes == pytest.approx(point.memory_bytes)


SAYS = {
    ("local:1", True): (),
    ("dgx-h100[1]", False): (
        "memory counts tensors only (--no-process-memory); beside them a process is ",
        "estimated to take 586 MiB",
    ),
    ("dgx-h100[2]", True): ("NCCL 192 MiB to 576 MiB for every set of mesh axes",),
    ("dgx-h100[2]", False): ("memory counts tensors only",),
}


@pytest.mark.parametrize(("cluster", "counted"), SAYS)
def test_processes_are_counted_on_request_and_on_gpus_alone(cluster: str, counted: bool):
    found = explored(cluster, process_memory=counted)
    gpus = counted and cluster.startswith("dgx")
    for point in found.points:
        assert (point.terms.get(CONTEXT, 0.0) > 0, bool(point.terms)) == (gpus, gpus)
        assert point.memory_bytes == pytest.approx(point.tensor_bytes + sum(point.terms.values()), rel=1e-12)
    told = tensoropt.recost(found)[1]
    assert [one.memory_bytes for one in told] == pytest.approx([p.memory_bytes for p in found.points])
    notes = [note for note in found.report["notes"] if note.startswith("memory counts")]
    assert len(notes) == bool(SAYS[cluster, counted])
    assert all(words in note for note in notes for words in SAYS[cluster, counted])
    assert ("NCCL" in " ".join(notes)) == (cluster == "dgx-h100[2]")


def test_processes_on_gpus_are_counted_by_default():
    assert (
        explored("dgx-h100[2]").points[0].terms
        == explored("dgx-h100[2]", process_memory=True).points[0].terms
    )
