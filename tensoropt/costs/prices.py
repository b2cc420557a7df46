"""Prices: seconds and bytes of edges and parameters on one mesh.

Everything is per step of one rank: what happens in every micro-batch counts as often.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple, Protocol

from tensoropt.costs.parameters import stored_bytes
from tensoropt.profiling.facts import Facts
from tensoropt.profiling.overheads import Upkeep
from tensoropt.profiling.workload import Workload
from tensoropt.sharding.buckets import BUCKET_BYTES, copies_gradient
from tensoropt.sharding.configurations import Mesh
from tensoropt.sharding.groups import GroupGraph
from tensoropt.sharding.local import Placed, localise
from tensoropt.sharding.placement import PARTIAL_GRAD, WAITING, Layout, local_shape
from tensoropt.sharding.reshard.steps import COLLECTIVES, Step, edge_steps
from tensoropt.sharding.storage import Both, Way, way
from tensoropt.sharding.strategy import Strategy, made_again


class ComputeCosts(Protocol):
    """Seconds of workloads and of the optimizer."""

    @property
    def source(self) -> str:
        """Where the optimizer's and the upkeep's figures come from: measured, fitted or data sheet."""
        ...

    def seconds(self, work: Workload, facts: Facts) -> tuple[float, float]:
        """(forward, backward) of one micro-batch."""
        ...

    def source_of(self, work: Workload) -> str:
        """Where :meth:`seconds` of this workload come from."""
        ...

    @property
    def optimizer_s_per_element(self) -> float: ...


class CommunicationCosts(Protocol):
    """Seconds of collectives; axes are the mesh's own (without the micro-batch axis)."""

    def time_s(self, kind: str, axes: Sequence[int], num_bytes: float) -> float: ...

    def source(self, kind: str, axes: Sequence[int]) -> str:
        """Where :meth:`time_s` comes from: measured, fitted or data sheet."""
        ...

    def arriving_s(self, axes: Sequence[int], work_s: Any, num_bytes: Any) -> Any:
        """Seconds longer when ranks come from ``work_s`` of work; numbers or arrays."""
        ...

    def leaving_s(self, axes: Sequence[int], work_s: Any, num_bytes: Any) -> Any:
        """Seconds that ``work_s`` of work afterwards takes longer; likewise."""
        ...


class Send(NamedTuple):
    """One collective with its price for ranks in step; ``axes`` are the mesh's own, counted from 0."""

    kind: str
    axes: tuple[int, ...]
    bytes: int
    seconds: float
    source: str


_FREE = Upkeep()
_WORK_BETWEEN_S = 1e-3
"""Taken for the work between two collectives while a plan is searched for. What turns add is measured of CPU
ranks only, and has nearly come to its end by then (:class:`~tensoropt.profiling.link_fits.Transition`)."""


class Prices:
    """Prices of one mesh.

    Args:
        compute, communication: where seconds come from.
        optimizer: ``sgd``, ``momentum`` or ``adam``.
        upkeep: copies around collectives, gradient accumulation, issuing an edge.
    """

    def __init__(
        self,
        graph: GroupGraph,
        mesh: Mesh,
        compute: ComputeCosts,
        communication: CommunicationCosts,
        optimizer: str,
        upkeep: Upkeep = _FREE,
    ):
        self.graph = graph
        self.mesh = mesh
        self.compute = compute
        self.communication = communication
        self.optimizer = optimizer
        self.upkeep = upkeep
        self.tensors = graph.atoms.graph.tensors
        self.training = graph.atoms.graph.training
        self._known: dict[object, tuple[float, float]] = {}
        self._again: dict[object, bool] = {}

    def collective_s(self, kind: str, axes: Sequence[int], num_bytes: float) -> float:
        """Seconds of a collective amid work."""
        real = tuple(a - 1 for a in axes if a > 0 and self.mesh[a] > 1)
        if not real or not num_bytes:
            return 0.0
        return self.communication.time_s(kind, real, num_bytes) + self._amid_work_s([(real, num_bytes)])

    def _amid_work_s(self, sends: Sequence[tuple[Sequence[int], float]]) -> float:
        """What work before and after adds to collectives, (axes, bytes) each, that follow one another. The
        judge knows how long the work is."""
        costs = self.communication
        arriving = costs.arriving_s(sends[0][0], _WORK_BETWEEN_S, sends[0][1])
        return float(arriving) + max(float(costs.leaving_s(a, _WORK_BETWEEN_S, b)) for a, b in sends)

    def send(self, kind: str, axes: Sequence[int], num_bytes: int) -> Send | None:
        """A collective with its price; None where its group has one member."""
        real = tuple(a - 1 for a in axes if a > 0 and self.mesh[a] > 1)
        if not real:
            return None
        seconds = self.communication.time_s(kind, real, num_bytes)
        return Send(kind, real, num_bytes, seconds, self.communication.source(kind, real))

    def steps(self, steps: Sequence[Step], element_bytes: int) -> tuple[float, tuple[Send, ...]]:
        """A resharding: seconds of the copies around its collectives and of issuing it; its collectives."""
        local, sends = self.upkeep.issuing_s([step.kind for step in steps]), []
        for step in steps:
            payload = step.payload(self.mesh) * element_bytes
            if step.kind in COLLECTIVES and (send := self.send(step.kind, step.axes, payload)):
                sends.append(send)
            local += payload * self.upkeep.copy_s_per_byte
        return local, tuple(sends)

    def steps_s(self, steps: Sequence[Step], element_bytes: int) -> float:
        """Seconds of a resharding: its collectives, the copies around them, and issuing it."""
        local, sends = self.steps(steps, element_bytes)
        amid_work = self._amid_work_s([(send.axes, send.bytes) for send in sends]) if sends else 0.0
        return local + amid_work + sum(send.seconds for send in sends)

    def passed_s(self, steps: Sequence[Step], other: Sequence[Step], *, learns: bool) -> float:
        """Seconds that an edge with ``steps`` takes the ``other`` way, if nothing moves there."""
        return self.upkeep.pass_s if learns and steps and not other else 0.0

    def again_s(self, work: Workload, forward_s: float) -> float:
        """Seconds that recomputing adds to a group: its second forward, and what autograd asks for of each
        of its calls."""
        return forward_s + len(work.calls) * self.upkeep.again_s

    def edge_s(self, name: str, source: Layout, target: Layout) -> tuple[float, float]:
        """(forward, backward) seconds of an edge, one micro-batch."""
        if source == target:
            return 0.0, 0.0
        tensor, atoms = self.tensors[name], self.graph.atoms.atom_sizes(name)
        key = (atoms, tensor.element_bytes, tensor.requires_grad, source, target)
        if key not in self._known:
            forward, backward = edge_steps(atoms, self.mesh, source, target)
            size, learns = tensor.element_bytes, tensor.requires_grad
            back = self.steps_s(backward, size) if learns else 0.0
            self._known[key] = (
                self.steps_s(forward, size) + self.passed_s(forward, backward, learns=learns),
                back + self.passed_s(backward, forward, learns=learns),
            )
        return self._known[key]

    def local_bytes(self, name: str, layout: Layout) -> int:
        shape = local_shape(self.graph.atoms.atoms[name], layout, self.mesh)
        return prod(shape) * self.tensors[name].element_bytes

    def parameter(self, name: str, stored: Layout) -> tuple[float, float, float]:
        """(memory, compute, communication) of a parameter stored so, whoever uses it."""
        tensor = self.tensors[name]
        elements = prod(local_shape(self.graph.atoms.atoms[name], stored, self.mesh))
        memory = (
            stored_bytes(tensor, elements, self.optimizer)
            if self.training
            else elements * tensor.stored_element_bytes
        )
        compute = communication = 0.0
        if tensor.requires_grad:
            arrival = self.gradient_arrival_s(elements * tensor.stored_element_bytes, stored)
            compute = self.step_s(elements) + arrival * self.arrivals(stored)
        axes = [a for a, code in enumerate(stored) if a > 0 and code == PARTIAL_GRAD]
        if axes and tensor.requires_grad:
            share = elements * tensor.stored_element_bytes / BUCKET_BYTES
            communication += share * self.collective_s("all_reduce", axes, BUCKET_BYTES)
        return memory, compute, communication

    def step_s(self, elements: int) -> float:
        """Seconds of the optimizer's step of a parameter with so many elements here."""
        return self.upkeep.step_s + elements * self.compute.optimizer_s_per_element

    def arrivals(self, stored: Layout) -> int:
        """How often in a step a gradient comes to where its parameter lives."""
        return 1 if stored[0] == WAITING else self.mesh[0]

    def gradient_arrival_s(self, size: float, stored: Layout) -> float:
        """Seconds of one of these :meth:`arrivals`, of ``size`` bytes; see :func:`copies_gradient`."""
        copied = copies_gradient(stored, self.mesh)
        return self.upkeep.arrival_s(size, self.arrivals(stored), copied=copied)

    def way(self, name: str, stored: Layout, use: Layout) -> Way:
        """From where a parameter lives to a use of it."""
        return way(self.tensors[name], stored, use, self.mesh, shared=name in self.graph.shared)

    def held(self, name: str, stored: Layout, use: Layout) -> tuple[float, float, float]:
        """(memory, compute, communication) of the copy that is held of a parameter stored so, for the whole
        step: its bytes and those of a gradient that waits beside it, what it takes to make it and to give
        that gradient back."""
        way = self.way(name, stored, use)
        if not way.held:
            return 0.0, 0.0, 0.0
        tensor, size = self.tensors[name], self.local_bytes(name, way.source)
        forward, backward = self.upkeep_steps(name, way)
        communication = self.steps_s(forward, tensor.element_bytes) + self.cast_s(name, stored)
        if stored[0] != WAITING:
            return size, 0.0, communication
        communication += self.steps_s(backward, tensor.element_bytes)
        return 2 * size, size * self.upkeep.add_s_per_byte * self.mesh[0], communication

    def upkeep_steps(self, name: str, way: Way) -> Both:
        """What a held copy takes once per step, forward and backward."""
        learns = self.tensors[name].requires_grad
        return way.upkeep(self.graph.atoms.atom_sizes(name), self.mesh, learns=learns)

    def use(
        self, name: str, stored: Layout, use: Layout, kept: int, forwards: int = 1
    ) -> tuple[float, float, float]:
        """(memory, compute, communication) of a use of a parameter, all micro-batches; see :meth:`use_s`."""
        # A recomputed region makes its copy again.
        memory = self.copy_bytes(name, stored, use, kept if forwards == 1 else 0)
        return float(memory), 0.0, self.use_s(name, stored, use, kept, forwards) * self.mesh[0]

    def copy_bytes(self, name: str, stored: Layout, use: Layout, kept: int) -> int:
        """Bytes that backward keeps of a copy made for a use."""
        if not kept or not self.training:
            return 0
        way = self.way(name, stored, use)
        steps = self._use_steps(name, way)[0]
        again = made_again(self.tensors[name], steps, held=way.held)
        return self.local_bytes(name, use) if steps and not again else 0

    def _use_steps(self, name: str, way: Way) -> Both:
        learns = self.tensors[name].requires_grad
        return way.steps(self.graph.atoms.atom_sizes(name), self.mesh, learns=learns)

    def use_s(self, name: str, stored: Layout, use: Layout, kept: int, forwards: int = 1) -> float:
        """Seconds of bringing a stored parameter to its use and its gradient back, per micro-batch.

        Args:
            kept: how often backward needs the gathered parameter, and gathers it again.
            forwards: 2 in a recomputed region, whose second forward leaves the parameter for backward.
        """
        tensor, key = self.tensors[name], ("use", name, stored, use)
        if key not in self._known:
            way = self.way(name, stored, use)
            steps = self._use_steps(name, way)
            cast = self.cast_s(name, stored)
            seconds = [self.steps_s(s, tensor.element_bytes) for s in steps]
            self._again[key] = made_again(tensor, steps[0], held=way.held)
            self._known[key] = (seconds[0] + (0.0 if way.held else cast), seconds[1] + cast)
        forward, backward = self._known[key]
        again = kept if self.training and forwards == 1 and self._again[key] else 0
        return forward * (forwards + again) + (backward if tensor.requires_grad else 0.0)

    def cast_s(self, name: str, stored: Layout) -> float:
        """Seconds of a cast between a stored shard's dtype and the one its readers see, either way."""
        tensor = self.tensors[name]
        if tensor.master_dtype is None:
            return 0.0
        elements = prod(local_shape(self.graph.atoms.atoms[name], stored, self.mesh))
        moved = elements * (tensor.element_bytes + tensor.stored_element_bytes) / 2
        return self.upkeep.call_s + moved * self.upkeep.copy_s_per_byte

    def move_s(self, name: str, source: Layout, target: Layout, forwards: int = 1) -> float:
        """Seconds of an edge, forward (``forwards`` times) and backward, all micro-batches."""
        forward, backward = self.edge_s(name, source, target)
        return (forward * forwards + backward) * self.mesh[0]

    def inside_s(self, placed: Placed, forwards: int = 1) -> float:
        """Seconds of what an operator's own kernel sends, all micro-batches."""
        return self.mesh[0] * sum(
            self.collective_s(c.kind, c.axes, c.bytes) * (1 if c.backward else forwards)
            for c in localise(placed).collectives
            if self.training or not c.backward
        )

    def strategy_s(
        self, strategy: Strategy, works: Mapping[str, Workload], facts: Mapping[str, Facts]
    ) -> tuple[float, float]:
        """(compute, communication) seconds of one step of a strategy that need not be in any table.

        Args:
            works, facts: per group name the workload and facts of its configuration.
        """
        micro, compute, communication = self.mesh[0], 0.0, 0.0
        for group in strategy.graph.groups:
            forwards = strategy.forwards(group.name)
            forward, backward = self.compute.seconds(works[group.name], facts[group.name])
            again = self.again_s(works[group.name], forward) if forwards > 1 else 0.0
            compute += (forward + again + backward) * micro
            for op in group.operators:
                placed = strategy.configurations[group.name].placed(
                    op.name, strategy.graph.atoms, self.mesh, None
                )
                communication += self.inside_s(placed, forwards)
        for name, stored in strategy.stored.items():
            _, kept_up, reduced = self.parameter(name, stored)
            compute, communication = compute + kept_up, communication + reduced
        for edge in strategy.edges():
            forwards, stored = strategy.forwards_of(edge), strategy.stored.get(edge.tensor, ())
            if edge.kind == "parameter":
                short = strategy.graph.group_of[edge.reader].short_names[edge.tensor]
                kept = facts[edge.reader].parameters_kept.get(short, 0)
                communication += self.use(edge.tensor, stored, edge.target, kept, forwards)[2]
            elif edge.kind == "held":
                _, added, moved = self.held(edge.tensor, stored, edge.target)
                compute, communication = compute + added, communication + moved
            else:
                communication += self.move_s(edge.tensor, edge.source, edge.target, forwards)
        return compute, communication
