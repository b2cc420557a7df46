"""The course of a step: what a rank does one after the other, the same list for every strategy.

Forward in execution order, backward in reverse, then the optimizer; before a region's backward its forward
``again``, for strategies that recompute it. A strategy fills each moment with work and bytes, or with none.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from tensoropt.costs.tables import leaves_model
from tensoropt.sharding.groups import Group, GroupGraph
from tensoropt.sharding.regions import Region

Phase = Literal["forward", "again", "backward", "reduction", "optimizer"]
Kind = Literal["read", "gather", "compute", "inner", "home", "output", "parameters", "waited", "step", "held"]


class Moment(NamedTuple):
    """One moment of a step.

    ``kind``: ``read`` a tensor is brought to a reader (its gradient back); ``gather`` parameters come to
    their use; ``compute`` the operators run; ``inner`` collectives inside the group; ``home`` a tensor with
    several readers is put where they find it; ``output`` a result is made whole; ``parameters`` gradients
    go to where parameters are stored; ``waited`` they go there once, having waited for the last micro-batch;
    ``step`` the optimizer; ``held`` copies of parameters are made for the whole next step.

    ``part``: forward, which part of the group's operators (:func:`parts_of`) runs or is read for.
    """

    phase: Phase
    kind: Kind
    group: str
    tensor: str = ""
    part: int = 0

    @property
    def words(self) -> str:
        forward = self.phase != "backward"
        words = self._words(forward)
        return f"again: {words}" if self.phase == "again" else words

    def _words(self, forward: bool) -> str:
        phase = "forward" if self.phase == "again" else self.phase
        match self.kind:
            case "read" if forward:
                return f"resharding {self.tensor} for {self.group}"
            case "read":
                return f"resharding the gradient of {self.tensor} from {self.group}"
            case "gather":
                return f"parameters for {phase} {self.group}"
            case "compute":
                return f"{phase} {self.group}"
            case "inner":
                return f"inside {phase} {self.group}"
            case "home":
                return f"home of {self.tensor}" if forward else f"gradient of the home of {self.tensor}"
            case "output":
                return f"result {self.tensor}" if forward else f"gradient of result {self.tensor}"
            case "parameters":
                return f"gradients of the parameters of {self.group}"
            case "waited":
                return f"gradients of {self.group} that waited"
            case "held":
                return f"copies of the parameters of {self.group}"
        return "optimizer"


@dataclass(frozen=True)
class Parts:
    """A group's operators, cut where a tensor that the group reads is needed first or last.

    Attributes:
        starts: position of the first operator of each part.
        first, last: per tensor the parts that read it first and last.
    """

    starts: tuple[int, ...]
    first: Mapping[str, int]
    last: Mapping[str, int]

    def of(self, position: int) -> int:
        """The part an operator belongs to."""
        return bisect_right(self.starts, position) - 1


def parts_of(group: Group) -> Parts:
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for position, op in enumerate(group.operators):
        for name in op.inputs():
            if name in group.reads:
                first.setdefault(name, position)
                last[name] = position
    ends = {position + 1 for position in last.values() if position + 1 < len(group.operators)}
    cut = Parts(tuple(sorted({0, *first.values(), *ends})), {}, {})
    return Parts(
        cut.starts, {n: cut.of(p) for n, p in first.items()}, {n: cut.of(p) for n, p in last.items()}
    )


@dataclass(frozen=True)
class Course:
    """All moments of a step in order; ``index`` finds them.

    Attributes:
        forward_end: how many belong to forward.
        last: the position after the last one of backward.
    """

    graph: GroupGraph
    moments: tuple[Moment, ...]
    forward_end: int
    last: int
    index: Mapping[Moment, int] = field(repr=False)

    @cached_property
    def parts(self) -> Mapping[str, Parts]:
        return {group.name: parts_of(group) for group in self.graph.groups}

    def slot(self, phase: Phase, kind: Kind, group: str, tensor: str = "", part: int = 0) -> int:
        """The place of a moment; -1 for one that this step does not have."""
        return self.index.get(Moment(phase, kind, group, tensor, part), -1)

    def computed(self, phase: Phase, group: str, read: str | None = None) -> int:
        """Where a group's operators are done, or those that read a tensor."""
        parts = self.parts[group]
        last = parts.last.get(read, 0) if read is not None else len(parts.starts) - 1
        return self.slot(phase, "compute", group, part=last)

    @cached_property
    def readers(self) -> Mapping[str, tuple[Group, ...]]:
        """Per activation the groups that read it, in execution order."""
        found: dict[str, list[Group]] = {}
        for group in self.graph.groups:
            for name in group.reads:
                found.setdefault(name, []).append(group)
        return {name: tuple(groups) for name, groups in found.items()}

    @cached_property
    def users(self) -> Mapping[str, tuple[str, str]]:
        """Per parameter the first and the last group that uses it; its gradient begins to come with the
        last one's backward and is complete after the first one's."""
        found: dict[str, tuple[str, str]] = {}
        for group in self.graph.groups:
            for name in (*group.parameters, *group.shared):
                found[name] = (found.get(name, (group.name,))[0], group.name)
        return found


def course_of(graph: GroupGraph, regions: Sequence[Region] = ()) -> Course:
    """The course of a step (in inference, of a call) of this graph.

    Args:
        regions: the blocks that some strategy recomputes.
    """
    training = graph.atoms.graph.training
    forward = [m for group in graph.groups for m in _forward(graph, group, "forward")]
    backward = list(_backwards(graph, regions)) if training else []
    end = list(_end(graph)) if training else []
    moments = (*forward, *backward, *end)
    last = len(forward) + len(backward)
    return Course(graph, moments, len(forward), last, {m: i for i, m in enumerate(moments)})


def _end(graph: GroupGraph) -> Iterator[Moment]:
    """What is done once per step, however many micro-batches there are."""
    owners = [group.name for group in graph.groups if group.parameters or group.shared]
    for name in owners:
        yield Moment("optimizer", "waited", name)
    yield Moment("optimizer", "step", "")
    for name in owners:
        yield Moment("optimizer", "held", name)


def _backwards(graph: GroupGraph, regions: Sequence[Region]) -> Iterator[Moment]:
    """Backward; a region runs again when the first of its kept tensors would be needed.

    Its last groups may need none (a residual sum's backward passes its gradient on).
    """
    due = {}
    for region in regions:
        needy = [name for name in region.groups if _needs_kept(graph, graph.group_of[name])]
        due[needy[-1] if needy else region.groups[0]] = region
    for group in reversed(graph.groups):
        for made, name in reversed(tuple(_made(graph, group))):  # needs nothing that is kept
            yield Moment("backward", made, group.name, name)
        if group.name in due:
            for name in due[group.name].groups:
                yield from _forward(graph, graph.group_of[name], "again")
        yield from _backward(group)


def _needs_kept(graph: GroupGraph, group: Group) -> bool:
    """Whether backward reads anything but the gradient: not of sums and moves."""
    linear = all(graph.atoms.spaces[op.name].linear for op in group.operators)
    return not linear or bool(group.parameters or group.shared)


def _made(graph: GroupGraph, group: Group) -> Iterator[tuple[Kind, str]]:
    for name in group.writes:
        if name in graph.hubs:
            yield "home", name
        if leaves_model(graph, name):
            yield "output", name


def _forward(graph: GroupGraph, group: Group, phase: Literal["forward", "again"]) -> Iterator[Moment]:
    parts = parts_of(group)
    for part in range(len(parts.starts)):
        for name in group.reads:
            if parts.first.get(name, 0) == part:
                yield Moment(phase, "read", group.name, name)
        if part == 0:
            yield Moment(phase, "gather", group.name)
        yield Moment(phase, "compute", group.name, part=part)
    yield Moment(phase, "inner", group.name)
    for made, name in _made(graph, group):
        if phase == "forward" or made != "output":
            yield Moment(phase, made, group.name, name)


def _backward(group: Group) -> Iterator[Moment]:
    for kind in ("gather", "compute", "inner"):
        yield Moment("backward", kind, group.name)
    # Autograd takes what was made last first, and an operator's parameters are brought after what it reads.
    yield Moment("backward", "parameters", group.name)
    for name in reversed(group.reads):
        yield Moment("backward", "read", group.name, name)
