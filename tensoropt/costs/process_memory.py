"""Process memory: what a process takes of a GPU beside the tensors of its step, each term with its source.

The figures are data (``cluster/presets/memory.yaml``). A term is bytes of one rank, and the same for all
strategies of an exploration but for NCCL's: a communicator's buffers come once for all ranks, and once for
every further set of mesh axes over which a strategy sends. The memory that is reported is tensors plus these
terms; the search, which only compares strategies by their tensors, knows nothing of them. On CPU ranks there
are none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tensoropt.cluster import Cluster
from tensoropt.cluster.catalog import process_memory_figures
from tensoropt.cluster.devices import DeviceKind
from tensoropt.cluster.quantities import size_bytes
from tensoropt.graph import OperatorGraph
from tensoropt.types import Flags, Floats

TERMS = ("context", "workspaces", "segments", "communicators", "inputs")
"""CUDA's context with the kernels loaded; cuBLAS's workspaces; what is unused at the end of the allocator's
last segments; NCCL's buffers; the step's inputs and the model's buffers."""


def named_terms(terms: Sequence[float]) -> dict[str, float]:
    """The terms that there are, by name; empty on CPU ranks."""
    return {name: float(size) for name, size in zip(TERMS, terms, strict=True) if size}


@dataclass(frozen=True)
class ProcessMemory:
    """The terms of one cluster and model, in bytes of one rank.

    Attributes:
        context, workspaces, segments, inputs: the same for all strategies.
        communicator: of one communicator, by the name of the link level that it crosses.
    """

    context: float = 0.0
    workspaces: float = 0.0
    segments: float = 0.0
    inputs: float = 0.0
    communicator: Mapping[str, float] = field(default_factory=dict)

    @property
    def counts_communicators(self) -> bool:
        """Whether it matters over which axes is sent."""
        return bool(self.communicator)

    def communicator_bytes(self, levels: Sequence[str]) -> float:
        """Bytes of a communicator that crosses these levels of links; of unknown ones the most."""
        known = [self.communicator[level] for level in levels if level in self.communicator]
        return max(known or self.communicator.values(), default=0.0)

    def constant(self, communicators: float = 0.0) -> tuple[float, ...]:
        """The terms, in the order of :data:`TERMS`, with so many bytes of communicators."""
        return (self.context, self.workspaces, self.segments, communicators, self.inputs)

    def terms(self, count: int, sending: Mapping[tuple[str, ...], Sequence[Flags]]) -> Floats:
        """(n, 5) the terms of many strategies, in the order of :data:`TERMS`.

        Args:
            count: how many strategies.
            sending: per levels of links, for every set of axes that crosses them, which strategies send.
        """
        found = np.tile(np.array(self.constant()), (count, 1))
        for levels, sets in sending.items():
            for flags in sets:
                found[:, TERMS.index("communicators")] += self.communicator_bytes(levels) * flags
        return found


NO_PROCESS = ProcessMemory()
"""CPU ranks, or tensors only."""


def process_memory(cluster: Cluster, graph: OperatorGraph) -> ProcessMemory:
    """The terms on a cluster of GPUs; none on CPU ranks."""
    if cluster.device_type != "cuda":
        return NO_PROCESS
    figures = process_memory_figures()
    of = figures["communicators"]
    each = size_bytes(of["buffer"], "buffer of a channel") * int(of["connections"])
    channels = {level.name: _channels(level.link.name, of["channels"]) for level in cluster.levels}
    return ProcessMemory(
        context=size_bytes(figures["context"]["bytes"], "context"),
        workspaces=max(_workspaces(kind, figures["workspaces"]["by_capability"]) for kind in cluster.devices),
        segments=size_bytes(figures["segments"]["bytes"], "segments"),
        # Without constants: they are kept smaller than their shapes, and saved graphs do not say how small.
        inputs=sum(t.bytes for t in graph.tensors.values() if t.kind in ("input", "buffer")),
        communicator={name: float(each * number) for name, number in channels.items()},
    )


def _channels(link: str, channels: Mapping[str, int]) -> int:
    return next((n for name, n in channels.items() if link.startswith(name)), channels["other"])


def _workspaces(kind: DeviceKind, by_capability: Mapping[int, str]) -> int:
    major = int((kind.capability or "0").partition(".")[0])
    return size_bytes(by_capability[max(m for m in by_capability if m <= major)], "workspaces")
