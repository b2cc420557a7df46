"""Process memory: what a process takes of a GPU beside the tensors of its step, each term with its source.

The figures are data (``cluster/presets/memory.yaml``). A term is bytes of one rank, and the same for all
strategies of an exploration but for NCCL's: a communicator's buffers come once for all ranks, and once for
every further set of mesh axes over which a strategy sends, as many as the kinds of its collectives connect.
The memory that is reported is tensors plus these terms; the search, which only compares strategies by their
tensors, knows nothing of them. On CPU ranks there are none but constants, which every rank has whole (masks
of sliding windows, tables of positions) and which are always counted.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from tensoropt.cluster import Cluster
from tensoropt.cluster.catalog import process_memory_figures
from tensoropt.cluster.devices import DeviceKind
from tensoropt.cluster.quantities import size_bytes
from tensoropt.graph import OperatorGraph
from tensoropt.types import Flags, Floats
from tensoropt.units import format_bytes

CONSTANTS = "constants"
TERMS = ("context", "workspaces", "segments", "communicators", "inputs", CONSTANTS)
"""CUDA's context with the kernels loaded; cuBLAS's workspaces; what is unused at the end of the allocator's
last segments; NCCL's buffers; the step's inputs and the model's buffers; the graph's constants."""


def named_terms(terms: Sequence[float]) -> dict[str, float]:
    """The terms that there are, by name."""
    return {name: float(size) for name, size in zip(TERMS, terms, strict=True) if size}


class Communicator(NamedTuple):
    """What NCCL connects when a collective is first used on a communicator.

    Attributes:
        ring, tree: bytes of all channels of a ring's neighbours, and of a tree's, by which sums go as well.
        peer: of the channels to one other rank, to each of which an all-to-all sends.
    """

    ring: float
    tree: float
    peer: float

    def bytes(self, kinds: Collection[str], ranks: int) -> float:
        """Of a communicator of so many ranks over which collectives of these kinds go."""
        found = self.ring if set(kinds) - {"all_to_all"} else 0.0
        found += self.tree if "all_reduce" in kinds else 0.0
        return found + (self.peer * (ranks - 1) if "all_to_all" in kinds else 0.0)


class Sending(NamedTuple):
    """The ranks of some mesh axes, and which of many strategies send over them.

    Attributes:
        levels: of links that they cross.
        kinds: per kind of collective, which strategies.
    """

    levels: tuple[str, ...]
    ranks: int
    kinds: Mapping[str, Flags]


@dataclass(frozen=True)
class ProcessMemory:
    """The terms of one cluster and model, in bytes of one rank.

    Attributes:
        context, workspaces, segments, inputs, constants: the same for all strategies.
        communicator: by the name of the link level that it crosses.
    """

    context: float = 0.0
    workspaces: float = 0.0
    segments: float = 0.0
    inputs: float = 0.0
    communicator: Mapping[str, Communicator] = field(default_factory=dict)
    constants: float = 0.0

    @property
    def of_process(self) -> bool:
        """Whether it holds more than constants."""
        return self.context > 0

    @property
    def counts_communicators(self) -> bool:
        """Whether it matters over which axes is sent."""
        return bool(self.communicator)

    @property
    def blocks(self) -> tuple[int, ...]:
        """Bytes of what of it PyTorch's allocator serves, block by block."""
        # Autograd's thread has a workspace of its own.
        sizes = (self.workspaces / 2, self.workspaces / 2, self.inputs, self.constants)
        return tuple(int(size) for size in sizes if size)

    def communicator_bytes(self, levels: Sequence[str], kinds: Collection[str], ranks: int) -> float:
        """Bytes of a communicator that crosses these levels of links; of unknown ones the most."""
        known = [self.communicator[level] for level in levels if level in self.communicator]
        return max((one.bytes(kinds, ranks) for one in known or self.communicator.values()), default=0.0)

    def constant(self, communicators: float = 0.0) -> tuple[float, ...]:
        """The terms, in the order of :data:`TERMS`, with so many bytes of communicators."""
        return (self.context, self.workspaces, self.segments, communicators, self.inputs, self.constants)

    def terms(self, count: int, sending: Sequence[Sending]) -> Floats:
        """(n, 6) the terms of many strategies, in the order of :data:`TERMS`."""
        found = np.tile(np.array(self.constant()), (count, 1))
        column = found[:, TERMS.index("communicators")]
        for one in sending:
            kinds = list(one.kinds)
            flags = np.stack([one.kinds[kind] for kind in kinds])
            # Strategies differ in few ways in what they send over a set of axes.
            for pattern in np.unique(flags, axis=1).T:
                used = [kind for kind, sends in zip(kinds, pattern.tolist(), strict=True) if sends]
                same = (flags == pattern[:, None]).all(axis=0)
                column[same] += self.communicator_bytes(one.levels, used, one.ranks)
        return found


NO_PROCESS = ProcessMemory()
"""CPU ranks, or tensors only."""


def process_memory(cluster: Cluster, graph: OperatorGraph, *, counted: bool = True) -> ProcessMemory:
    """The terms on a cluster of GPUs; on CPU ranks, or where a process is not ``counted``, constants only."""
    if cluster.device_type != "cuda" or not counted:
        return ProcessMemory(constants=graph.constant_bytes)
    figures = process_memory_figures()
    of = figures["communicators"]
    each = size_bytes(of["connection"], "buffers of a channel's connection")
    return ProcessMemory(
        context=size_bytes(figures["context"]["bytes"], "context"),
        workspaces=max(_workspaces(kind, figures["workspaces"]["by_capability"]) for kind in cluster.devices),
        segments=size_bytes(figures["segments"]["bytes"], "segments"),
        inputs=sum(t.bytes for t in graph.tensors.values() if t.kind in ("input", "buffer")),
        constants=graph.constant_bytes,
        communicator={level.name: _communicator(level.link.name, each, of) for level in cluster.levels},
    )


def process_notes(cluster: Cluster, graph: OperatorGraph, *, counted: bool) -> tuple[str, ...]:
    """What a process takes beside tensors, and whether memory counts it, in words; nothing of CPU ranks."""
    found = process_memory(cluster, graph)
    if not found.of_process:
        return ()
    said = f"{format_bytes(sum(found.constant()) - found.constants)} of a GPU"
    if cluster.device_count > 1:
        rings = [one.ring for one in found.communicator.values()]
        sums = [one.ring + one.tree for one in found.communicator.values()]
        said += (
            f", and NCCL {format_bytes(min(rings))} to {format_bytes(max(sums))} for every set of mesh axes "
            "that a plan sends over, more for all-to-alls"
        )
    if counted:
        return (
            f"memory counts what a process is estimated to take beside tensors: {said}; no card was compared "
            "with it",
        )
    return (
        f"memory counts tensors only; beside them a process is estimated to take {said}: --process-memory "
        "counts that",
    )


def _communicator(link: str, connection: int, of: Mapping[str, Any]) -> Communicator:
    each = float(connection * _of_link(link, of["channels"]))
    connections = of["connections"]
    peer = float(connection * _of_link(link, of["peer_channels"]))
    return Communicator(each * connections["ring"], each * connections["tree"], peer)


def _of_link(link: str, figures: Mapping[str, int]) -> int:
    return next((n for name, n in figures.items() if link.startswith(name)), figures["other"])


def _workspaces(kind: DeviceKind, by_capability: Mapping[int, str]) -> int:
    major = int((kind.capability or "0").partition(".")[0])
    return size_bytes(by_capability[max(m for m in by_capability if m <= major)], "workspaces")
