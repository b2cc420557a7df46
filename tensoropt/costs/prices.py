"""Prices: the predicted durations of computation, copies, casts, additions, messages and collectives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple, Protocol, Self

import numpy as np

from tensoropt.cluster import Cluster, DeviceKind, Mesh, slower_beside
from tensoropt.costs.process_memory import NO_PROCESS, ProcessMemory
from tensoropt.graph import OperatorGraph, Tensor
from tensoropt.profiling.facts import Facts
from tensoropt.profiling.overheads import NO_OVERHEADS, Overheads
from tensoropt.profiling.workload import Workload
from tensoropt.sharding.configurations import AxisSizes
from tensoropt.sharding.groups import GroupGraph
from tensoropt.sharding.reshard.steps import COLLECTIVES, ReshardingStep


class ComputeCosts(Protocol):
    """The interface to durations of workloads (a rank's share of an operator group) and of the optimizer."""

    @property
    def source(self) -> str:
        """The source of the optimizer's and overheads' durations: measured, fitted or data sheet."""

    def seconds(self, work: Workload, facts: Facts) -> tuple[float, float]:
        """Return the (forward, backward) seconds of a workload in one micro-batch."""

    def host_seconds(self, work: Workload) -> tuple[float, float]:
        """Return the (forward, backward) seconds of launching a workload's kernels; 0 on CPU ranks."""

    def weight_gradient_s(self, work: Workload, facts: Facts) -> float:
        """Return the seconds of computing a weight's gradient, for a workload whose first call is linear."""

    def source_of(self, work: Workload) -> str: ...

    @property
    def optimizer_s_per_element(self) -> float: ...


class _CommunicationCosts(Protocol):
    """The interface to the durations of collectives; axis 0 is the mesh's first axis, not micro-batches."""

    def time_s(self, kind: str, axes: Sequence[int], num_bytes: float) -> float: ...

    def source(self, kind: str, axes: Sequence[int]) -> str:
        """Return the source of :meth:`time_s`: measured, fitted or data sheet."""

    @property
    def described(self) -> str:
        """A text that is equal for two objects if all their durations are equal."""


class LinkCosts(_CommunicationCosts, Protocol):
    """The interface to the durations of collectives and of messages between two ranks."""

    def pair_time_s(self, first: int, second: int, num_bytes: float) -> float:
        """Return the seconds of one message between two ranks without other traffic; 0 within a rank."""

    def pair_source(self, first: int, second: int) -> str: ...


class _FactsSource(Protocol):
    def of(self, work: Workload) -> Facts: ...


class _TimingSource(Protocol):
    def measure(self, works: Mapping[str, Workload]) -> None: ...


class ClusterCosts(Protocol):
    """The interface to the cost model of a cluster, live or saved with an exploration."""

    @property
    def cluster(self) -> Cluster: ...

    @property
    def optimizer(self) -> str: ...

    @property
    def training(self) -> bool: ...

    @property
    def beside(self) -> bool:
        """Whether asynchronous communication overlaps with computation."""

    @property
    def facts(self) -> _FactsSource: ...

    @property
    def timings(self) -> _TimingSource: ...

    def on(self, kinds: Sequence[DeviceKind]) -> Self:
        """Return the cost model for some of the cluster's kinds of devices."""

    def compute(self) -> ComputeCosts:
        """Return the durations of workloads that all devices run in step, at the pace of the slowest kind."""

    def compute_on(self, kind: DeviceKind) -> ComputeCosts: ...

    def overheads(self) -> Overheads:
        """Return the overheads of a step on the slowest kind of devices."""

    def overheads_on(self, kind: DeviceKind) -> Overheads: ...

    def process_memory(self, graph: OperatorGraph) -> ProcessMemory: ...

    def communication(self, mesh: Mesh, *, pairs: bool = False) -> LinkCosts:
        """Return the durations of a mesh's collectives; with ``pairs``, also of messages between ranks."""


class Send(NamedTuple):
    """One collective with its size and duration; axis 0 is the mesh's first axis, not micro-batches."""

    kind: str
    axes: tuple[int, ...]
    bytes: int
    seconds: float
    source: str


class Queues(NamedTuple):
    """The seconds of work on the device, and the host's seconds to launch the work (0 on CPUs)."""

    device_s: float
    host_s: float

    def plus(self, other: Queues) -> Queues:
        """Return the sums of device seconds and of host seconds."""
        return Queues(self.device_s + other.device_s, self.host_s + other.host_s)


NO_WORK = Queues(0.0, 0.0)


class DevicePrices:
    """The durations of one rank's own work, in every kind of plan."""

    def __init__(self, compute: ComputeCosts, overheads: Overheads = NO_OVERHEADS):
        self.compute = compute
        self.overheads = overheads

    def _both(self, seconds: Callable[[Overheads], float]) -> Queues:
        return Queues(seconds(self.overheads), seconds(self.overheads.host))

    def work(self, work: Workload, facts: Facts) -> tuple[Queues, Queues]:
        forward, backward = map(Queues, self.compute.seconds(work, facts), self.compute.host_seconds(work))
        return forward, backward

    def copy(self, num_bytes: float, kernels: int = 1) -> Queues:
        """Return the seconds of copying ``num_bytes`` bytes with ``kernels`` kernels."""
        device_s, host_s = self._both(lambda overheads: overheads.arrive_s)
        return Queues(kernels * device_s + num_bytes * self.overheads.copy_s_per_byte, kernels * host_s)

    def addition(self, num_bytes: float, kernels: int = 1) -> Queues:
        """Return the seconds of adding ``num_bytes`` bytes to another tensor with ``kernels`` kernels."""
        device_s, host_s = self._both(lambda overheads: overheads.accumulate_s)
        return Queues(kernels * device_s + num_bytes * self.overheads.add_s_per_byte, kernels * host_s)

    def cast(self, tensor: Tensor, elements: int) -> Queues:
        """Return the seconds of casting a tensor between stored and read dtype; 0 if they are equal."""
        if tensor.master_dtype is None:
            return NO_WORK
        # Half of the bytes read and written: copy_s_per_byte is per byte copied, which stands for a read and
        # a write.
        return self.copy(elements * (tensor.element_bytes + tensor.stored_element_bytes) / 2)

    @property
    def passing(self) -> Queues:
        """Autograd's seconds to hand a tensor on in backward if only forward reshards it, or vice versa."""
        return self._both(lambda overheads: overheads.pass_s)

    @property
    def message_end(self) -> Queues:
        """The seconds of launching the sending, or the receiving, of one message."""
        return self._both(lambda overheads: overheads.call_s)

    def again(self, work: Workload, forward: Queues) -> Queues:
        """Return the seconds of recomputing a group: its second forward, and autograd's overhead per call."""
        return forward.plus(self._both(lambda overheads: len(work.calls) * overheads.again_s))

    def step(self, elements: int) -> Queues:
        """Return the seconds of an optimizer step on ``elements`` elements."""
        device_s, host_s = self._both(lambda overheads: overheads.step_s)
        return Queues(device_s + elements * self.compute.optimizer_s_per_element, host_s)

    def gradient_arrival(self, size: float, micro_batches: int, *, copied: bool) -> Queues:
        """Return the seconds per micro-batch of accumulating a gradient. ``copied``: the first micro-batch's
        gradient is copied to a bucket."""
        return self._both(lambda overheads: overheads.arrival_s(size, micro_batches, copied=copied))


@dataclass(eq=False, repr=False)
class Prices(DevicePrices):
    """The durations of computing and communication on one mesh.

    Args:
        optimizer: ``sgd``, ``momentum`` or ``adam``.
        overheads: the durations of copies, gradient accumulation and issuing steps of resharding.
        process: the process's memory besides tensors; by default none.
        beside: whether asynchronous collectives overlap with computation.
        slower_beside: the share by which such collectives slow computation down.
        in_flight: the most micro-batches whose saved tensors are in memory at once, as in pipeline stages.
        packs: whether gradients scattered together are packed into one tensor, as for gloo.
    """

    graph: GroupGraph
    mesh: AxisSizes
    compute: ComputeCosts
    communication: _CommunicationCosts
    optimizer: str
    overheads: Overheads = NO_OVERHEADS
    process: ProcessMemory = NO_PROCESS
    _: KW_ONLY
    beside: bool = False
    slower_beside: float = 0.0
    packs: bool = True
    in_flight: int = 1

    @classmethod
    def of(
        cls, costs: ClusterCosts, graph: GroupGraph, sizes: AxisSizes, communication: _CommunicationCosts
    ) -> Prices:
        """Return the prices of a graph on one mesh of a cluster, with that mesh's ``communication`` costs.

        Args:
            sizes: the number of micro-batches, then the sizes of mesh axes above 1.
        """
        return cls(
            graph,
            sizes,
            costs.compute(),
            communication,
            costs.optimizer,
            costs.overheads(),
            costs.process_memory(graph.atoms.graph),
            beside=costs.beside,
            slower_beside=slower_beside(costs.cluster),
            packs=costs.cluster.device_type == "cpu",
        )

    @property
    def described(self) -> str:
        compute_s = self.compute.optimizer_s_per_element
        others = self.communication.described, self.beside, self.slower_beside, self.packs, self.in_flight
        return repr((self.mesh, self.optimizer, self.overheads, compute_s, *others))

    @property
    def training(self) -> bool:
        """Whether a step has a backward pass and an optimizer."""
        return self.graph.atoms.graph.training

    def _real(self, axes: Sequence[int]) -> tuple[int, ...]:
        return tuple(a - 1 for a in axes if a > 0 and self.mesh[a] > 1)

    def hidden_s(self, seconds: Any, work_s: Any) -> Any:
        """Return the seconds saved if collectives of ``seconds`` and work of ``work_s`` seconds overlap.

        While collectives run, computation takes ``1 + slower_beside`` times as long. Arguments may be arrays.
        """
        return np.minimum(seconds / (1.0 + self.slower_beside), work_s) if self.beside else 0.0

    def send(self, kind: str, axes: Sequence[int], num_bytes: int) -> Send | None:
        """Return a collective with its duration; None if it needs no message. Axis 0 is micro-batches."""
        real = self._real(axes)
        if not real:
            return None
        seconds = self.communication.time_s(kind, real, num_bytes)
        return Send(kind, real, num_bytes, seconds, self.communication.source(kind, real))

    def steps(self, steps: Sequence[ReshardingStep], element_bytes: int) -> tuple[Queues, tuple[Send, ...]]:
        """Return a resharding's seconds of copies and launches, and its collectives with durations."""
        sends = []
        local, host_s = self._both(lambda overheads: overheads.issuing_s(len(steps)))
        for step in steps:
            payload = step.payload(self.mesh) * element_bytes
            if step.kind in COLLECTIVES and (send := self.send(step.kind, step.axes, payload)):
                sends.append(send)
            # Every step reads and writes its payload once around the collective, into or out of a contiguous
            # buffer.
            local += payload * self.overheads.copy_s_per_byte
        return Queues(local, host_s), tuple(sends)


def runs_beside(device_type: str, overlap: str) -> bool:
    """Return whether communication overlaps with computation: NCCL's does, gloo's takes the same CPU cores.

    Args:
        overlap: ``none`` to assume no overlap (:class:`~tensoropt.question.settings.Settings`).
    """
    return device_type != "cpu" and overlap != "none"


class _FreeCompute:
    source = "data sheet"
    optimizer_s_per_element = 0.0

    def seconds(self, work: Workload, facts: Facts) -> tuple[float, float]:
        return 0.0, 0.0

    def host_seconds(self, work: Workload) -> tuple[float, float]:
        return 0.0, 0.0

    def weight_gradient_s(self, work: Workload, facts: Facts) -> float:
        return 0.0

    def source_of(self, work: Workload) -> str:
        return self.source


class _FreeCommunication:
    def time_s(self, kind: str, axes: Sequence[int], num_bytes: float) -> float:
        return 0.0

    def source(self, kind: str, axes: Sequence[int]) -> str:
        return "data sheet"

    described = "free"


def free_prices(graph: GroupGraph, mesh: AxisSizes, optimizer: str) -> Prices:
    """Return prices of 0 seconds, for callers that need only memory and collectives."""
    return Prices(graph, mesh, _FreeCompute(), _FreeCommunication(), optimizer)
