"""The schedule of a step: all moments of a rank's step in order, the same for every strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple, cast

from tensoropt.costs.effects import Phase, When
from tensoropt.costs.group_effects import Parts, parts_of
from tensoropt.costs.tables import leaves_model
from tensoropt.sharding.groups import Group, GroupGraph
from tensoropt.sharding.regions import Blocks, Region, find_blocks, needs_kept

_Kind = Literal[
    "begin", "read", "gather", "compute", "inner", "hub", "output", "parameters", "reduce", "step", "unshard"
]


class Moment(NamedTuple):
    """One moment of a step.

    Attributes:
        kind: ``begin`` (a block begins, or backward ends), ``read`` (a tensor is resharded for a reader),
            ``gather`` (parameters, or tensors that backward gathers again), ``compute``, ``inner``
            (collectives of kernels), ``hub`` (a tensor with several readers is materialised), ``output`` (a
            result is made whole), ``parameters`` (gradients are resharded to storage), ``reduce`` (the same,
            once after the last micro-batch), ``step`` (optimizer), ``unshard`` (gathering parameters for the
            next step).
        part: the index of the part of the group's forward (:func:`parts_of`).
    """

    phase: Phase
    kind: _Kind
    group: str
    tensor: str = ""
    part: int = 0

    @property
    def words(self) -> str:
        """A description of the moment in words."""
        again, back = self.phase == "again", self.phase == "backward"
        words = (_WORDS_BACK if back else _WORDS).get(self.kind, _WORDS[self.kind])
        if self.kind == "begin" and not self.group:
            words = "backward ends"
        phase = "forward" if again else self.phase
        return ("again: " if again else "") + words.format(phase=phase, group=self.group, tensor=self.tensor)


_WORDS: dict[_Kind, str] = {
    "begin": "the {phase} of the block of {group} begins",
    "read": "resharding {tensor} for {group}",
    "gather": "parameters for {phase} {group}",
    "compute": "{phase} {group}",
    "inner": "inside {phase} {group}",
    "hub": "materialising {tensor}",
    "output": "result {tensor}",
    "parameters": "gradients of the parameters of {group}",
    "reduce": "reducing the gradients of {group} once",
    "step": "optimizer",
    "unshard": "unsharding the parameters of {group}",
}
_WORDS_BACK: dict[_Kind, str] = {
    "read": "resharding the gradient of {tensor} from {group}",
    "hub": "gradient of materialised {tensor}",
    "output": "gradient of result {tensor}",
}


class Reader(NamedTuple):
    """A reader of a tensor or of its view: a group, or the resharding that ``materialises`` a view."""

    group: str
    tensor: str
    materialises: bool = False


Resolver = Callable[[When], int]
"""A function from the moment of an effect to its position in the schedule."""


@dataclass(frozen=True)
class StepSchedule:
    """All moments of a step in order.

    Attributes:
        forward_end: the number of forward moments.
        last: the number of forward and backward moments: the position after backward.
        index: moment -> its position.
        blocks: the blocks (repeated layers) whose parameters are prefetched together.
    """

    graph: GroupGraph
    moments: tuple[Moment, ...]
    forward_end: int
    last: int
    index: Mapping[Moment, int] = field(repr=False)
    blocks: Blocks = field(repr=False)

    @cached_property
    def parts(self) -> Mapping[str, Parts]:
        return {group.name: parts_of(group) for group in self.graph.groups}

    @cached_property
    def run_again_from(self) -> Mapping[str, int]:
        """Group -> the position in the schedule at which the recomputation of its block begins."""
        found: dict[str, int] = {}
        start = 0
        for at, moment in enumerate(self.moments):
            if moment.phase == "again":
                start = at if self.moments[at - 1].phase != "again" else start
                found[moment.group] = start
        return found

    def position(self, phase: Phase, kind: _Kind, group: str, tensor: str = "", part: int = 0) -> int:
        """Return the index in ``moments`` of the moment with these fields; -1 if the step has none."""
        return self.index.get(Moment(phase, kind, group, tensor, part), -1)

    def computed(self, phase: Phase, group: str, read: str | None = None) -> int:
        """Return the position at which a group, or its operators that read the tensor ``read``, are done."""
        if phase == "backward":
            return self.position(phase, "compute", group)
        parts = self.parts[group]
        last = parts.last.get(read, 0) if read is not None else len(parts.starts) - 1
        return self.position(phase, "compute", group, part=last)

    # -- where owners' effects take place -----------------------------------------------------------

    def of_group(self, group: str) -> Resolver:
        def resolve(when: When) -> int:
            if when.what in ("before", "begin", "next", "left"):
                return self._beginning(group, when)
            # A KeyError for a moment that does not exist, because a lost effect would make a figure too low.
            return self.index[Moment(when.phase, cast(_Kind, when.what), group, "", when.number)]

        return resolve

    def _beginning(self, group: str, when: When) -> int:
        blocks = self.blocks
        block = blocks.of[group]
        if when.phase in ("first", "forward"):
            first = blocks.first[block - (when.what == "before")]
            return self.index[Moment("forward", "begin", first)]
        match when.what:
            case "before":
                (block,) = (number for number, behind in blocks.behind.items() if behind == block)
            case "next":
                block = blocks.behind.get(block, -1)
            case "left":
                block = blocks.behind.get(blocks.behind.get(block, -1), -1)
        last = blocks.last[block] or "" if block >= 0 else ""
        return self.index[Moment("backward", "begin", last)]

    @cached_property
    def beginnings(self) -> tuple[int, ...]:
        """The positions at which blocks begin, and at which backward ends."""
        return tuple(at for at, moment in enumerate(self.moments) if moment.kind == "begin")

    def of_parameter(self, name: str) -> Resolver:
        (first, last), copied_for = self.users[name], self.first_users[name]

        def resolve(when: When) -> int:
            if when.what in ("before", "begin", "next", "left"):
                return self._beginning(copied_for, when)
            match when.what:
                # A parameter's gradient is complete, and may be cast, when the first user's backward is over.
                case "arrived" | "first arrived" | "parameters":
                    user = last if when.what == "first arrived" else first
                    return self.position("backward", "parameters", user)
                case "step":
                    return self.position("optimizer", "step", "")
                # Stands for all buckets of a parameter; simulate/collectives.py determines where each is
                # issued.
                case "bucket":
                    return self.last
            return self.position("optimizer", cast(_Kind, when.what), copied_for)

        return resolve

    def of_tensor(
        self, producer: str, name: str, readers: Sequence[Reader], replaced: int = -1, same: str = ""
    ) -> Resolver:
        """Return the function that maps a moment of a tensor's effects to its position in the schedule.

        Args:
            readers: the tensor's readers, then the readers of its views.
            replaced: the position at which a buffer's new value replaces the old one in backward.
            same: the group that makes another tensor with the same gradient, and whose backward comes first.
        """

        def resolve(when: When) -> int:
            match when.what:
                case "made":
                    return self.computed(when.phase, producer)
                case "end":
                    return self.forward_end
                case "over":
                    return replaced
                case "same":
                    return self.position("backward", "compute", same)
                case "read":
                    return self._read(when.phase, readers[when.number])
                case "used":
                    return self._used(when.phase, readers[when.number])
                case "anew" if when.phase == "again":
                    # An isomorphic tensor may be read in a recomputed block although this one is not.
                    return self.run_again_from.get(readers[when.number].group, -1)
                case "anew":
                    return self.position("backward", "gather", readers[when.number].group)
            return self.position(when.phase, cast(_Kind, when.what), producer, name)

        return resolve

    def _read(self, phase: Phase, reader: Reader) -> int:
        return self.position(phase, "hub" if reader.materialises else "read", reader.group, reader.tensor)

    def _used(self, phase: Phase, reader: Reader) -> int:
        if reader.materialises:  # a view that is being materialised, which nothing needs in backward
            return self._read(phase, reader)
        return self.computed(phase, reader.group, reader.tensor)

    @cached_property
    def readers(self) -> Mapping[str, tuple[Group, ...]]:
        """The groups that read each activation, in execution order."""
        readers: dict[str, list[Group]] = {}
        for group in self.graph.groups:
            for name in group.reads:
                readers.setdefault(name, []).append(group)
        return {name: tuple(groups) for name, groups in readers.items()}

    @cached_property
    def users(self) -> Mapping[str, tuple[str, str]]:
        """Parameter -> the (first, last) group that gives it a gradient, or reads it if none gives a
        gradient."""
        users: dict[str, tuple[str, str]] = {}
        for idle in (False, True):
            of_kind: dict[str, tuple[str, str]] = {}
            for group in self.graph.groups:
                for name in (*group.parameters, *group.shared):
                    if self.graph.learns(name, group.name) is not idle:
                        of_kind[name] = (of_kind.get(name, (group.name,))[0], group.name)
            users = of_kind | users
        return users

    @cached_property
    def first_users(self) -> Mapping[str, str]:
        """Parameter -> the first group that uses it; its unsharded copy is gathered for this use."""
        groups = reversed(self.graph.groups)
        return {name: group.name for group in groups for name in (*group.parameters, *group.shared)}


def step_schedule(graph: GroupGraph, regions: Sequence[Region] = ()) -> StepSchedule:
    """Return the schedule of a step or inference call; ``regions``: blocks that some strategy recomputes."""
    training = graph.atoms.graph.training
    blocks = find_blocks(graph)
    forward = list(_forwards(graph, blocks if training else None))
    backward = list(_backwards(graph, regions, blocks)) if training else []
    end = list(_end(graph)) if training else []
    moments = (*forward, *backward, *end)
    last = len(forward) + len(backward)
    return StepSchedule(graph, moments, len(forward), last, {m: i for i, m in enumerate(moments)}, blocks)


def _forwards(graph: GroupGraph, blocks: Blocks | None) -> Iterator[Moment]:
    begins = set(blocks.first) if blocks is not None else set()
    for group in graph.groups:
        if group.name in begins:
            yield Moment("forward", "begin", group.name)
        yield from _forward(graph, group, "forward")
    # New values of buffers are made whole one after another, when everything is computed.
    makers = {name: group.name for group in graph.groups for name in group.writes}
    for name in graph.atoms.graph.mutations.values():
        yield Moment("forward", "output", makers[name], name)


def _end(graph: GroupGraph) -> Iterator[Moment]:
    owners = [group.name for group in graph.groups if group.parameters or group.shared]
    for name in owners:
        yield Moment("optimizer", "reduce", name)
    yield Moment("optimizer", "step", "")
    for name in owners:
        yield Moment("optimizer", "unshard", name)


def _backwards(graph: GroupGraph, regions: Sequence[Region], blocks: Blocks) -> Iterator[Moment]:
    """Yield the moments of backward; a block is recomputed before its first saved tensor is needed."""
    due = {}
    for region in regions:
        needy = [name for name in region.groups if needs_kept(graph, graph.group_of[name])]
        due[needy[-1] if needy else region.groups[0]] = region
    for group in reversed(graph.groups):
        for made, name in reversed(tuple(_made(graph, group))):  # these moments need nothing that was saved
            yield Moment("backward", made, group.name, name)
        if group.name in blocks.last:
            yield Moment("backward", "begin", group.name)
        if group.name in due:
            # The whole block runs again, including groups whose backward has passed, because the executor
            # recomputes it as one.
            for name in due[group.name].groups:
                yield from _forward(graph, graph.group_of[name], "again")
        yield from _backward(group)
    yield Moment("backward", "begin", "")


def _made(graph: GroupGraph, group: Group) -> Iterator[tuple[_Kind, str]]:
    for name in group.writes:
        if name in graph.hubs:
            yield "hub", name
        if leaves_model(graph, name):
            yield "output", name


def _forward(graph: GroupGraph, group: Group, phase: Literal["forward", "again"]) -> Iterator[Moment]:
    parts = parts_of(group)
    for part in range(len(parts.starts)):
        for name in group.reads:
            # A tensor is resharded right before the first operator that reads it, so that its copy does not
            # live through earlier parts.
            if parts.first.get(name, 0) == part:
                yield Moment(phase, "read", group.name, name)
        if part == 0:
            yield Moment(phase, "gather", group.name)
        yield Moment(phase, "compute", group.name, part=part)
    yield Moment(phase, "inner", group.name)
    for made, name in _made(graph, group):
        # A result of the model has left it in the first forward, and is not gathered again.
        if made == "hub" or (phase == "forward" and name in graph.atoms.graph.outputs):
            yield Moment(phase, made, group.name, name)


def _backward(group: Group) -> Iterator[Moment]:
    for kind in ("gather", "compute", "inner"):
        yield Moment("backward", kind, group.name)
    # Autograd starts with what was made last, and an operator's parameters are brought after its inputs.
    yield Moment("backward", "parameters", group.name)
    for name in reversed(group.reads):
        yield Moment("backward", "read", group.name, name)
