"""What a process takes beside tensors: terms by hand, none on CPU ranks; how the parts of memory add up."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import tensoropt
from tensoropt.capture import capture
from tensoropt.cluster import load_cluster
from tensoropt.cluster.catalog import process_memory_figures
from tensoropt.costs.process_memory import NO_PROCESS, TERMS, ProcessMemory, named_terms, process_memory

MIB = 2**20
CHANNEL = 4 * MIB + 640 * 120 * 8 * 8 + 512 * 8 * 8 * 16
"""Bytes of one channel's buffers of one connection, as NCCL's source adds them up."""


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 8), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x)).square().mean()


def graph():
    return capture(Normed(), (torch.randn(32, 16),)).graph


@pytest.mark.parametrize(
    ("cluster", "workspaces", "levels"),
    [
        ("dgx-v100", 2 * (4096 * 2 + 16 * 8) * 1024, {"gpu": 16}),
        ("dgx-a100x2", 2 * (4096 * 2 + 16 * 8) * 1024, {"node": 4, "gpu": 16}),
        ("dgx-h100x2", 2 * 4096 * 8 * 1024, {"node": 4, "gpu": 16}),
    ],
)
def test_terms_by_hand(cluster, workspaces, levels):
    found = process_memory(load_cluster(cluster), graph())
    assert found.context == 500 * MIB
    assert found.workspaces == workspaces
    assert found.segments == 22 * MIB
    # The batch, a mean and a variance of eight features, and the count of batches.
    assert found.inputs == 4 * (32 * 16 + 2 * 8) + 8
    assert found.communicator == {name: 3 * number * CHANNEL for name, number in levels.items()}


def test_cpu_ranks_have_none():
    assert process_memory(load_cluster("local:2"), graph()) is NO_PROCESS
    assert named_terms(NO_PROCESS.constant()) == {}
    assert not NO_PROCESS.terms(3, {("gpu",): [np.ones(3, dtype=bool)]}).any()


def test_every_figure_has_its_source():
    for name, figures in process_memory_figures().items():
        assert figures["source"], name


def test_a_communicator_counts_for_who_sends_and_by_the_dearest_level():
    process = ProcessMemory(1.0, 2.0, 3.0, 5.0, {"node": 10.0, "gpu": 100.0})
    first, second = np.array([True, False]), np.array([True, True])
    found = process.terms(2, {("node", "gpu"): [first], ("node",): [second], ("unknown",): [first]})
    assert found.tolist() == [[1, 2, 3, 100 + 10 + 100, 5], [1, 2, 3, 10, 5]]
    assert dict(zip(TERMS, found[1].tolist(), strict=True)) == named_terms(process.constant(10.0))


def explored(cluster: str, **more):
    return tensoropt.explore(
        Normed(), (torch.randn(32, 16),), cluster=cluster, measure="never", micro_batches=(1,), **more
    )


def test_what_is_reported_is_tensors_and_terms_everywhere(tmp_path):
    found = explored("dgx-h100x2[4]", epsilon=0.0, process_memory=True)
    of = process_memory(load_cluster("dgx-h100x2[4]"), graph())
    assert len(found.points) > 1
    for index, point in enumerate(found.points):
        assert set(point.terms) == set(TERMS)
        assert point.tensor_bytes == sum(point.memory)
        assert point.memory_bytes == pytest.approx(point.tensor_bytes + sum(point.terms.values()), rel=1e-12)
        predicted = found.plan(index).predicted
        assert predicted.memory_bytes == point.memory_bytes
        assert predicted.terms == point.terms
        assert predicted.tensor_bytes == pytest.approx(point.tensor_bytes, rel=1e-9)
        # One of all ranks, and one for every other set of axes that is sent over.
        axes = tuple(range(len(found.spaces[point.space].mesh.shape)))
        sets = {axes, *(tuple(a) for _, a, _, _ in point.collectives)}
        assert point.terms["communicators"] == len(sets) * of.communicator["gpu"]
    memory = [point.memory_bytes for point in found.points]
    assert memory == sorted(memory)
    found.save(tmp_path)
    again = tensoropt.load(tmp_path)
    assert [p.terms for p in again.points] == [p.terms for p in found.points]


def test_cpu_results_name_no_terms_and_one_device_has_no_communicator():
    (cpu, *_), (gpu, *_) = (explored(name, process_memory=True).points for name in ("local:1", "dgx-h100[1]"))
    assert cpu.terms == {}
    assert cpu.memory_bytes == cpu.tensor_bytes
    assert set(gpu.terms) == set(TERMS) - {"communicators"}
    assert replace(gpu, terms={}).tensor_bytes == gpu.tensor_bytes


def test_unless_asked_for_tensors_alone_are_counted():
    for point in explored("dgx-h100[2]").points:
        assert point.terms == {}
        assert point.memory_bytes == point.tensor_bytes


def test_a_point_is_told_with_what_its_exploration_counts():
    for counted in (False, True):
        found = explored("dgx-h100[2]", process_memory=counted)
        told = tensoropt.recost(found)[1]
        assert [one.memory_bytes for one in told] == pytest.approx([p.memory_bytes for p in found.points])
