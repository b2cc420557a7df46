"""Process memory: the GPU memory that a process takes besides its step's tensors, such as NCCL's buffers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import numpy as np

from tensoropt.cluster import Cluster
from tensoropt.cluster.catalog import process_memory_figures
from tensoropt.cluster.hardware import DeviceKind
from tensoropt.cluster.quantities import MEMORY
from tensoropt.graph import OperatorGraph
from tensoropt.types import Flags, Floats
from tensoropt.units import format_bytes

CONTEXT, CONSTANTS = "context", "constants"
TERMS = (CONTEXT, "workspaces", "segments", "communicators", "inputs", CONSTANTS)
"""Names of terms: CUDA's context, cuBLAS's workspaces, unused segments of the allocator, NCCL's buffers, the
step's inputs and buffers, constants of the graph."""


_OVER_RINGS = frozenset(("all_reduce", "all_gather", "reduce_scatter"))


def named_terms(terms: Sequence[float]) -> dict[str, float]:
    """Return name -> bytes of the nonzero terms of process memory, given in the order of :data:`TERMS`."""
    return {name: float(size) for name, size in zip(TERMS, terms, strict=True) if size}


class Communicator(NamedTuple):
    """The buffers that NCCL allocates when a communicator first runs a collective.

    Attributes:
        ring, tree: bytes of all channels to the neighbours in a ring, and in a tree, which all-reduces use.
        peer: bytes of the channels to one other rank, for all-to-alls and messages along a ring.
    """

    ring: float
    tree: float
    peer: float

    def bytes(self, kinds: Collection[str], ranks: int) -> float:
        """Return the bytes of a communicator of ``ranks`` ranks that runs these kinds of collectives."""
        if kinds and _OVER_RINGS.issuperset(kinds):
            return self.ring + self.tree * ("all_reduce" in kinds)
        # Here, as saved points are shown without PyTorch.
        from tensoropt.ops.calls import BY_VALUES, RING_SEND

        pairwise = {"all_to_all", BY_VALUES}
        found = self.ring if set(kinds) - pairwise - {RING_SEND} else 0.0
        found += self.tree if "all_reduce" in kinds else 0.0
        # A rank's messages in a ring go to one neighbour and come from another one.
        peers = min(ranks - 1, 2) if RING_SEND in kinds else 0
        return found + self.peer * (ranks - 1 if pairwise.intersection(kinds) else peers)


class Sending(NamedTuple):
    """The groups of ranks along some mesh axes, and which of many strategies communicate within them.

    Attributes:
        levels: the names of the link levels between these ranks.
        kinds: kind of collective -> (strategies,) mask of those that use it.
    """

    levels: tuple[str, ...]
    ranks: int
    kinds: Mapping[str, Flags]


@dataclass(frozen=True)
class ProcessMemory:
    """The terms of process memory for one cluster and model, in bytes of one rank.

    Attributes:
        context, workspaces, segments: CUDA's context, cuBLAS's workspaces, the allocator's unused segments.
        inputs, constants: the step's inputs and buffers, the graph's constants.
        communicator: link level -> NCCL's buffers, the only term that depends on the strategy.
    """

    context: float = 0.0
    workspaces: float = 0.0
    segments: float = 0.0
    inputs: float = 0.0
    communicator: Mapping[str, Communicator] = field(default_factory=dict)
    constants: float = 0.0

    @property
    def counts_communicators(self) -> bool:
        return bool(self.communicator)

    def communicator_bytes(self, levels: Sequence[str], kinds: Collection[str], ranks: int) -> float:
        """Return the bytes of a communicator across these link levels: the largest figure of any of them, or
        of all levels if none is known."""
        known = [self.communicator[level] for level in levels if level in self.communicator]
        return max((one.bytes(kinds, ranks) for one in known or self.communicator.values()), default=0.0)

    def constant(self, communicators: float = 0.0) -> tuple[float, ...]:
        """Return all terms in the order of :data:`TERMS`, with ``communicators`` bytes of NCCL buffers."""
        return (self.context, self.workspaces, self.segments, communicators, self.inputs, self.constants)

    def terms(self, count: int, sending: Sequence[Sending]) -> Floats:
        """Return (n, 6) the bytes of each of n strategies' terms, in the order of :data:`TERMS`."""
        found = np.tile(np.array(self.constant()), (count, 1))
        column = found[:, TERMS.index("communicators")]
        for one in sending:
            kinds = list(one.kinds)
            flags = np.stack([one.kinds[kind] for kind in kinds])
            # Strategies differ little in what they send over a set of axes.
            for pattern in np.unique(flags, axis=1).T:
                used = [kind for kind, sends in zip(kinds, pattern.tolist(), strict=True) if sends]
                same = (flags == pattern[:, None]).all(axis=0)
                column[same] += self.communicator_bytes(one.levels, used, one.ranks)
        return found


NO_PROCESS = ProcessMemory()
"""No process memory, as for CPU ranks, or if only tensors are counted."""


def process_memory(cluster: Cluster, graph: OperatorGraph, *, counted: bool = True) -> ProcessMemory:
    """Return the process memory on a GPU cluster; only constants on CPU ranks, or if not ``counted``."""
    inputs = sum(t.bytes for t in graph.tensors.values() if t.kind in ("input", "buffer"))
    return memory_of_process(cluster, inputs, graph.constant_bytes, counted=counted)


def memory_of_process(
    cluster: Cluster, inputs: float, constants: float = 0.0, *, counted: bool = True
) -> ProcessMemory:
    """Return :func:`process_memory` from the bytes of ``inputs`` (with buffers) and of ``constants``."""
    if cluster.device_type != "cuda" or not counted:
        return ProcessMemory(constants=constants)
    figures = process_memory_figures()
    of = figures["communicators"]
    each = int(MEMORY.read(of["connection"], "buffers of a channel's connection"))
    return ProcessMemory(
        context=int(MEMORY.read(figures["context"]["bytes"], "context")),
        workspaces=max(
            _workspaces(kind, figures["workspaces"]["by_capability"]) for kind in cluster.device_kinds
        ),
        segments=int(MEMORY.read(figures["segments"]["bytes"], "segments")),
        inputs=inputs,
        constants=constants,
        communicator={level.name: _communicator(level.link.name, each, of) for level in cluster.levels},
    )


def terms_of_collectives(
    process: ProcessMemory, sent: Iterable[tuple[str, tuple[int, ...]]], shape: Sequence[int]
) -> dict[str, float]:
    """Return name -> bytes of a strategy's terms of process memory, from its collectives alone.

    Links are unknown then, so each communicator counts with the largest buffers.

    Args:
        sent: (kind, mesh axes) of each collective.
    """
    # A job begins and ends with a barrier of all ranks, which is a sum.
    kinds: dict[tuple[int, ...], set[str]] = {tuple(range(len(shape))): {"all_reduce"}}
    for kind, axes in sent:
        kinds.setdefault(axes, set()).add(kind)
    ranks = {axes: prod(shape[axis] for axis in axes) for axes in kinds}
    buffers = sum(
        process.communicator_bytes((), used, ranks[axes]) for axes, used in kinds.items() if ranks[axes] > 1
    )
    return named_terms(process.constant(buffers))


def process_notes(cluster: Cluster, graph: OperatorGraph, *, counted: bool) -> tuple[str, ...]:
    """Return notes on process memory, and whether it is counted; empty for CPU ranks."""
    found = process_memory(cluster, graph)
    if not found.context:  # constants only
        return ()
    said = f"{format_bytes(sum(found.constant()) - found.constants)} of a GPU"
    if cluster.device_count > 1:
        rings = [one.ring for one in found.communicator.values()]
        sums = [one.ring + one.tree for one in found.communicator.values()]
        said += (
            f", and NCCL {format_bytes(min(rings))} to {format_bytes(max(sums))} for every set of mesh axes "
            "that a plan communicates over, more for all-to-alls"
        )
    if counted:
        return (
            "memory counts process memory beside tensors, an estimate never compared with a real GPU: "
            f"{said}",
        )
    return (
        "memory counts tensors only (--no-process-memory); beside them a process is estimated to take "
        f"{said}",
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
    return int(MEMORY.read(by_capability[max(m for m in by_capability if m <= major)], "workspaces"))
