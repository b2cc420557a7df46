"""Pipelined strategies: a sharded strategy for each stage, and the schedule of micro-batches."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from math import prod
from typing import Any, ClassVar, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tensoropt.errors import PlanError
from tensoropt.graph import Operator, map_refs
from tensoropt.ops.calls import OperatorShard
from tensoropt.ops.families.stages import ARRIVE, DEPART
from tensoropt.ops.kernels import SingleDevice
from tensoropt.ops.localise import localise
from tensoropt.ops.registry import bind
from tensoropt.pipeline.stages import Cutter, Stage, arriving_group, cutter_of, departing_group
from tensoropt.sharding.configurations import AxisSizes
from tensoropt.sharding.groups import GroupGraph
from tensoropt.sharding.strategy import Strategy


class Action(NamedTuple):
    """One action of a device group (a place) in a pipeline schedule.

    Attributes:
        kind: ``F`` forward, ``B`` backward; or ``I`` and ``W``, the gradients of inputs and of parameters.
    """

    kind: str
    stage: int
    micro_batch: int


@dataclass(frozen=True)
class _Schedule:
    """A pipeline schedule.

    Attributes:
        order: (device group, number of groups, stages per group, micro-batches) -> the group's actions.
        several: whether a device group has several stages.
        apart: whether backward is split into gradients of inputs and gradients of parameters.
        back_and_forth: whether the second half of the stages runs from the last device group to the first.
        waits: whether each send is waited for before the next message, not only at the end of a step.
    """

    order: Callable[[int, int, int, int], Iterator[Action]]
    several: bool = False
    apart: bool = False
    back_and_forth: bool = False
    waits: bool = False


def _gpipe(place: int, places: int, per_place: int, micro_batches: int) -> Iterator[Action]:
    for kind in "FB":
        yield from (Action(kind, place, i) for i in range(micro_batches))


def _one_forward_one_backward(
    place: int, places: int, per_place: int, micro_batches: int
) -> Iterator[Action]:
    ahead = min(micro_batches, places - place)
    yield from (Action("F", place, i) for i in range(ahead))
    for i in range(micro_batches):
        yield Action("B", place, i)
        if ahead + i < micro_batches:
            yield Action("F", place, ahead + i)


class _Rounds:
    """The order in which micro-batches pass a device group's stages in rounds (Narayanan et al., SC 2021)."""

    def __init__(self, place: int, places: int, per_place: int, micro_batches: int, hops: int):
        self.place, self.places, self.per_place = place, places, per_place
        self.round = micro_batches // max(1, micro_batches // places)
        self.count = per_place * micro_batches
        # Forwards before the first backward: one round of all stages but the last, and ``hops`` for every
        # later device group.
        self.ahead = min((per_place - 1) * self.round + hops * (places - 1 - place), self.count)
        self._next: dict[tuple[str, int], int] = {}

    def action(self, kind: str, number: int) -> Action:
        own = (number // self.round) % self.per_place
        stage = (own if kind == "F" else self.per_place - 1 - own) * self.places + self.place
        micro_batch = self._next.get((kind, stage), 0)
        self._next[kind, stage] = micro_batch + 1
        return Action(kind, stage, micro_batch)


def _interleaved(place: int, places: int, per_place: int, micro_batches: int) -> Iterator[Action]:
    rounds = _Rounds(place, places, per_place, micro_batches, hops=2)
    yield from (rounds.action("F", i) for i in range(rounds.ahead))
    for i in range(rounds.count):
        if rounds.ahead + i < rounds.count:
            yield rounds.action("F", rounds.ahead + i)
        yield rounds.action("B", i)


def _zero_bubble(place: int, places: int, per_place: int, micro_batches: int) -> Iterator[Action]:
    rounds = _Rounds(place, places, per_place, micro_batches, hops=1)
    yield from (rounds.action("F", i) for i in range(rounds.ahead))
    done = 0
    for i in range(rounds.count):
        if rounds.ahead + i < rounds.count:
            yield rounds.action("F", rounds.ahead + i)
        yield rounds.action("I", i)
        # Each device group postpones as many gradients of parameters as there are groups before it.
        if i >= place:
            yield rounds.action("W", done)
            done += 1
    yield from (rounds.action("W", i) for i in range(done, rounds.count))


def _v_shaped(place: int, places: int, per_place: int, micro_batches: int) -> Iterator[Action]:
    return (
        action for action in _v_pattern(place, places, micro_batches) if action.micro_batch < micro_batches
    )


def _v_pattern(place: int, places: int, micro_batches: int) -> Iterator[Action]:
    down, up = place, 2 * places - 1 - place
    count = max(2 * places - 1, micro_batches)
    done: dict[tuple[str, int], int] = {}

    def next_of(kinds: str, stage: int) -> Iterator[Action]:
        for kind in kinds:
            number = done.get((kind, stage), 0)
            done[kind, stage] = number + 1
            yield Action(kind, stage, number)

    for _ in range(2 * (places - place) - 1):
        yield from next_of("F", down)
    for _ in range(place):
        yield from next_of("F", up)
        yield from next_of("F", down)
    for _ in range(places - place):
        yield from next_of("FIW", up)
    while done.get(("F", up), 0) < done.get(("F", down), 0) or done.get(("F", down), 0) < count:
        if done.get(("F", down), 0) < count:
            yield from next_of("F", down)
        yield from next_of("IW", down)
        yield from next_of("FIW", up)
    for _ in range(place):
        yield from next_of("I", down)
        yield from next_of("I", up)
    for _ in range(places - place):
        yield from next_of("IW", down)
    for stage in (up, down):
        while done.get(("W", stage), 0) < done[("I", stage)]:
            yield from next_of("W", stage)


SCHEDULES: dict[str, _Schedule] = {
    # All forwards, then all backwards.
    "gpipe": _Schedule(_gpipe),
    # A backward as early as possible.
    "1f1b": _Schedule(_one_forward_one_backward, waits=True),
    "interleaved_1f1b": _Schedule(_interleaved, several=True),
    # Gradients of parameters where devices would wait.
    "zero_bubble": _Schedule(_zero_bubble, several=True, apart=True),
    # The same with two stages on the same devices, back from the last devices to the first.
    "zbv": _Schedule(_v_shaped, several=True, apart=True, back_and_forth=True),
}


def schedule_named(name: str) -> _Schedule:
    """Return the schedule of this name; PlanError if there is none."""
    if name not in SCHEDULES:
        raise PlanError(f"there is no pipeline schedule called {name}; there are {', '.join(SCHEDULES)}")
    return SCHEDULES[name]


def check_schedule(name: str, places: int, per_place: int, micro_batches: int) -> None:
    """Raise PlanError, with what is required, if PyTorch's schedule cannot run with these numbers."""
    schedule = schedule_named(name)
    if places < 2:
        raise PlanError(f"a pipeline needs at least two groups of devices, not {places}")
    if schedule.back_and_forth and per_place != 2:
        raise PlanError(f"the schedule {name} runs two stages on each group of devices, not {per_place}")
    if per_place > 1 and not schedule.several:
        raise PlanError(f"the schedule {name} runs one stage on each group of devices, not {per_place}")
    if name == "1f1b" and micro_batches < places:
        raise PlanError(
            f"1f1b on {places} groups of devices needs at least as many micro-batches, but there are "
            f"{micro_batches}; use gpipe, or more micro-batches"
        )
    rounds = max(1, micro_batches // places)
    if name in ("interleaved_1f1b", "zero_bubble") and micro_batches % rounds:
        raise PlanError(
            f"{name} runs {micro_batches} micro-batches on {places} groups of devices in {rounds} equal "
            f"rounds; use a multiple of {rounds}"
        )


def in_flight_of(actions: Sequence[Sequence[Action]], stage: int) -> int:
    """Return the largest number of micro-batches between a stage's forward and the end of its backward."""
    kinds = [action.kind for actions_at in actions for action in actions_at if action.stage == stage]
    ends = "W" if "W" in kinds else "B"
    in_flight = most = 0
    for kind in kinds:
        in_flight += (kind == "F") - (kind == ends)
        most = max(most, in_flight)
    return most


def stage_place(name: str, places: int, stage: int) -> int:
    if schedule_named(name).back_and_forth:
        return stage if stage < places else 2 * places - 1 - stage
    return stage % places


@lru_cache(maxsize=256)
def place_actions(
    name: str, places: int, per_place: int, micro_batches: int
) -> tuple[tuple[Action, ...], ...]:
    """Return the actions of each device group in a step, in order; PlanError if they cannot be run."""
    check_schedule(name, places, per_place, micro_batches)
    order = schedule_named(name).order
    return tuple(tuple(order(place, places, per_place, micro_batches)) for place in range(places))


_Unfit = tuple[str, str]
"""A parameter whose gradient a split backward gets wrong, and the reason."""


def check_apart(schedule: str, number: int, stage: Stage) -> None:
    """Raise PlanError if a parameter prevents the split backward of a stage that returns gradients."""
    if stage.returns_gradients and (unfit := _unfit_parameter(stage.graph)) is not None:
        raise PlanError(
            f"the schedule {schedule} splits backward, and then PyTorch finds the gradient of a parameter "
            "only if a single operator combines it with tensors from the previous stage; this is not so for "
            f"{unfit[0]} in stage {number}: {unfit[1]}; use 1f1b or interleaved_1f1b"
        )


def _unfit_parameter(graph: GroupGraph) -> _Unfit | None:
    """Return a parameter whose gradient a split backward gets wrong, with the reason; None without one."""
    number = id(graph)
    cached = _KNOWN.get(number)
    if cached is None or cached[0]() is not graph:
        # An id may be reused after the graph is gone.
        unfit = _GradientPaths(graph).unfit()
        cached = weakref.ref(graph, lambda _: _KNOWN.pop(number, None)), unfit
        _KNOWN[number] = cached
    return cached[1]


_KNOWN: dict[int, tuple[weakref.ref[GroupGraph], _Unfit | None]] = {}
_MEETINGS: dict[Hashable, int] = {}
"""Cached results of :meth:`_GradientPaths._meetings`, by the operator and the roles of its operands."""


class _GradientPaths:
    def __init__(self, graph: GroupGraph):
        self.graph, self.source = graph, graph.atoms.graph
        self.tensors = self.source.tensors
        self.readers: dict[str, list[Operator]] = {}
        # Tensors that depend on an arriving tensor and carry a gradient back to it.
        self.carried = set[str]()
        for op in self.source.operators:
            for name in dict.fromkeys(op.inputs()):
                self.readers.setdefault(name, []).append(op)
            grown = self._grown(op)
            if op.target == ARRIVE or not self.carried.isdisjoint(op.inputs()):
                self.carried.update(grown)

    def _grown(self, op: Operator) -> list[str]:
        return [name for name in op.outputs if self.tensors[name].requires_grad]

    def unfit(self) -> _Unfit | None:
        for tensor in self.source.parameters:
            if tensor.requires_grad and (why := self._why_not(tensor.name)):
                return tensor.name, why
        return None

    def _why_not(self, parameter: str) -> str:
        made, waiting, meeting = {parameter}, [parameter], dict[str, Operator]()
        while waiting:
            for op in self.readers.get(waiting.pop(), ()):
                grown = self._grown(op)
                if not grown:
                    continue
                if not self.carried.isdisjoint(grown):
                    meeting[op.name] = op
                    continue
                if op.target == DEPART:
                    return f"{op.inputs()[0]}, made from it without such tensors, is sent to the next stage"
                if not set(grown).isdisjoint(self.source.outputs):
                    return "the loss is made from it without such tensors"
                new = [name for name in grown if name not in made]
                made.update(new)
                waiting += new
        count = sum(self._meetings(op, made) for op in meeting.values())
        if count > 1:
            names = ", ".join(meeting)
            return f"it, or a tensor made from it, is read {count} times (by {names})"
        return ""

    def _meetings(self, op: Operator, made: Collection[str]) -> int:
        """Count the autograd nodes where tensors ``made`` from a parameter alone first meet received ones."""
        numbers = {name: number for number, name in enumerate(dict.fromkeys(op.inputs()))}
        looks = [(n in made, n in self.carried, self.tensors[n]) for n in numbers]
        # By number instead of name, so that equal operators of all layers share a result.
        operands = [repr(map_refs(each, numbers.__getitem__)) for each in (op.args, *op.kwargs.values())]
        of_operands = tuple((m, c, t.shape, t.dtype, t.requires_grad) for m, c, t in looks)
        key = op.target, *operands, *op.kwargs, of_operands
        if key not in _MEETINGS:
            _MEETINGS[key] = self._probed(op, made)
        return _MEETINGS[key]

    def _probed(self, op: Operator, made: Collection[str]) -> int:
        """Compute the result of :meth:`_meetings` by running the operator on fake tensors."""
        group = self.graph.group_of[op.name]
        choices = (group.unsplit.choices[op.name],)
        call = localise(OperatorShard(op, self.graph.atoms, choices, (1,)))
        with FakeTensorMode(), torch.enable_grad():
            leaves = {
                name: torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype)).requires_grad_(
                    tensor.requires_grad
                )
                for name in dict.fromkeys(op.inputs())
                for tensor in (self.tensors[name],)
            }
            # Each operand gets a node of its own, which comes before everything that reads it.
            entered = {name: leaf.view_as(leaf) for name, leaf in leaves.items()}
            args, kwargs = call.arguments(entered.__getitem__)
            result = bind(call, SingleDevice())(*args, **kwargs)
        results = [result] if isinstance(result, torch.Tensor) else list(result)
        roots = [r.grad_fn for r in results if isinstance(r, torch.Tensor) and r.grad_fn is not None]
        own = [entered[name].grad_fn for name in entered if name in made]
        carrying = [entered[name].grad_fn for name in entered if name in self.carried]
        return _first_to_meet(roots, own, carrying)


def _first_to_meet(roots: Sequence[object], own: Sequence[object], carrying: Sequence[object]) -> int:
    """Count the autograd nodes where paths from ``own`` to ``roots`` first meet paths from ``carrying``."""
    above: dict[object, list[object]] = {}
    waiting, seen = list(roots), set(roots)
    while waiting:
        node = waiting.pop()
        for below, _ in getattr(node, "next_functions", ()):
            if below is not None:
                above.setdefault(below, []).append(node)
                if below not in seen:
                    seen.add(below)
                    waiting.append(below)

    def upwards(starts: Sequence[object], stop: Collection[object]) -> tuple[set[object], set[object]]:
        reached, met, left = set(starts), set[object](), list(starts)
        while left:
            for node in above.get(left.pop(), ()):
                if node in stop:
                    met.add(node)
                elif node not in reached:
                    reached.add(node)
                    left.append(node)
        return reached, met

    closure, _ = upwards([node for node in carrying if node is not None], ())
    _, met = upwards([node for node in own if node is not None], closure)
    return len(met)


def _kernels_communicate(strategy: Strategy) -> bool:
    if prod(strategy.mesh[1:]) == 1:
        return False
    atoms = strategy.graph.atoms
    return any(
        not inner.count
        for configuration in strategy.configurations.values()
        for op in configuration.group.operators
        for inner in localise(configuration.placed(op.name, atoms, strategy.mesh, None)).collectives
    )


@dataclass(frozen=True)
class PipelinedStrategy:
    """The sharded strategies of a model's stages, on equal groups of devices (places), and their schedule.

    Rank ``r`` is in device group ``r // k`` if each has ``k`` devices. The schedule assigns stages to groups.

    Attributes:
        graph: the grouped operator graph of the whole model.
        cuts: the index of the first operator group of each stage but the first.
        duplicated: the activations that stages recompute instead of receiving them.
        stages: the sharded strategy of each stage, all on equal meshes.
        schedule: the name of a schedule in :data:`tensoropt.pipeline.strategy.SCHEDULES`.
        places: the number of device groups, which divides the number of stages.
        cutter: the graph's cutter, whose cached stages are reused; by default that of :func:`.cutter_of`.

    Raises:
        PlanError: the stages do not fit each other or the schedule; the message says where.
    """

    kind: ClassVar[str] = "pipelined"

    graph: GroupGraph
    cuts: tuple[int, ...]
    duplicated: frozenset[str]
    stages: tuple[Strategy, ...]
    schedule: str
    places: int
    cutter: Cutter | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        meshes = {strategy.mesh for strategy in self.stages}
        if len(meshes) != 1:
            raise PlanError(f"the stages of a pipeline need equal meshes, but these have {sorted(meshes)}")
        # A file may contain fewer than one device group, which is refused below.
        per_place, over = divmod(len(self.stages), max(self.places, 1))
        if over:
            raise PlanError(
                f"{len(self.stages)} stages do not divide evenly over {self.places} groups of devices"
            )
        check_schedule(self.schedule, self.places, per_place, self.micro_batches)
        if schedule_named(self.schedule).apart:
            self._check_apart()
        for number, (stage, left, right) in enumerate(
            zip(self.parts, self.stages, self.stages[1:], strict=False)
        ):
            for name in stage.departing:
                leaves = left.configurations[departing_group(name)].layout(name)
                enters = right.configurations[arriving_group(name)].layout(name)
                if leaves != enters:
                    raise PlanError(
                        f"{name} leaves stage {number} as {leaves} but enters stage {number + 1} as "
                        f"{enters}; both stages must have it in the same placement"
                    )
        for name in self.tied:
            layouts = {strategy.stored[name] for strategy in self.stages if name in strategy.stored}
            if len(layouts) > 1:
                raise PlanError(f"{name} is used in several stages, which must store it in one layout")
            holding = [s for s, strategy in enumerate(self.stages) if name in strategy.stored]
            if len({self.place_of(stage) for stage in holding}) < len(holding):
                raise PlanError(
                    f"{name} is used in stages {holding}, two of which the schedule {self.schedule} puts on "
                    "the same devices; use a schedule with these stages on different devices, such as 1f1b"
                )
        # Both stages must agree on the elements of the shards that cross between them.
        if any(strategy.zigzag for strategy in self.stages):
            stages = tuple(replace(strategy, zigzag_beside=True) for strategy in self.stages)
            object.__setattr__(self, "stages", stages)

    def _check_apart(self) -> None:
        for number, strategy in enumerate(self.stages):
            if number < self.forward_only:
                continue
            moves = any(any(strategy.steps(edge)) for edge in strategy.edges() if edge.kind != "output")
            if moves or strategy.recomputed or _kernels_communicate(strategy):
                operation = (
                    "recomputes a block"
                    if strategy.recomputed
                    else "issues collectives in forward or backward"
                )
                raise PlanError(
                    f"the schedule {self.schedule} splits backward, so stages must issue no collectives "
                    f"within a micro-batch and recompute nothing, but stage {number} {operation}; use 1f1b "
                    "or interleaved_1f1b"
                )
            # Results are cached for the stages' graphs, which plans with the same cuts share.
            check_apart(self.schedule, number, self.parts[number])

    @cached_property
    def parts(self) -> tuple[Stage, ...]:
        return (self.cutter or cutter_of(self.graph)).stages(self.cuts, self.duplicated)

    @cached_property
    def forward_only(self) -> int:
        """The number of leading stages without backward: neither they nor earlier stages train anything."""
        return next((n for n, part in enumerate(self.parts) if part.has_backward), len(self.parts))

    def shares_arriving(self, stage: int) -> bool:
        """Return whether a stage and the previous one hold the same arriving tensors, on the same devices.

        A previous stage without backward does not hold them.
        """
        return stage > self.forward_only and self.place_of(stage - 1) == self.place_of(stage)

    @property
    def mesh(self) -> AxisSizes:
        """The sizes of the job's mesh: micro-batches, device groups, then the axes of a stage's mesh."""
        micro_batches, *axes = self.stages[0].mesh
        return micro_batches, self.places, *axes

    @property
    def micro_batches(self) -> int:
        return self.stages[0].mesh[0]

    @property
    def actions(self) -> tuple[tuple[Action, ...], ...]:
        """The actions of each device group in a step, in order."""
        return place_actions(self.schedule, self.places, len(self.stages) // self.places, self.micro_batches)

    @property
    def devices_per_place(self) -> int:
        return prod(self.stages[0].mesh[1:])

    @property
    def devices(self) -> int:
        return self.places * self.devices_per_place

    @property
    def mesh_text(self) -> str:
        """The number of device groups and the sizes above 1 of a stage's mesh axes, such as ``pp4x2``."""
        axes = [str(size) for size in self.mesh[2:] if size > 1]
        return "x".join([f"pp{self.places}", *axes])

    def place_of(self, stage: int) -> int:
        return stage_place(self.schedule, self.places, stage)

    def maker(self, name: str) -> int:
        producing = (s for s, part in enumerate(self.parts) if name in part.graph.atoms.graph.producer)
        return next(producing, len(self.parts) - 1)

    def stages_at(self, place: int) -> tuple[int, ...]:
        return tuple(s for s in range(len(self.stages)) if self.place_of(s) == place)

    @cached_property
    def tied(self) -> tuple[str, ...]:
        """Names of the parameters that several stages use."""
        names = [name for strategy in self.stages for name in strategy.stored]
        return tuple(name for name in dict.fromkeys(names) if names.count(name) > 1)

    @cached_property
    def sent_buffers(self) -> Mapping[str, int]:
        makers = {}
        for name, new in self.graph.atoms.graph.mutations.items():
            consumers = (part.graph.atoms.graph.consumers for part in self.parts)
            readers = {self.place_of(s) for s, read in enumerate(consumers) if name in read}
            maker = self.place_of(self.maker(new))
            if readers - {maker}:
                makers[name] = maker
        return makers

    def holders(self, name: str) -> tuple[int, ...]:
        return tuple(s for s, strategy in enumerate(self.stages) if name in strategy.stored)

    def to_data(self) -> dict[str, Any]:
        """Return the schedule, and each stage's first operator group and strategy, as plain data."""
        return {
            "kind": self.kind,
            "schedule": self.schedule,
            "places": self.places,
            "begins": [self.graph.groups[cut].name for cut in self.cuts],
            "again": sorted(self.duplicated),
            "stages": [stage.to_data() for stage in self.stages],
        }

    @classmethod
    def from_data(cls, data: Mapping[str, Any], graph: GroupGraph) -> PipelinedStrategy:
        """Return the strategy that :meth:`to_data` wrote.

        Raises:
            PlanError: the data do not fit this graph; the message names the first difference.
        """
        cutter = cutter_of(graph)
        begins, stages = data.get("begins"), data.get("stages")
        if (
            not isinstance(begins, Sequence)
            or not isinstance(stages, Sequence)
            or len(stages) != len(begins) + 1
        ):
            raise PlanError("the plan's pipeline does not say with which operators its stages begin")
        cuts, duplicated = tuple(map(cutter.beginning, begins)), frozenset(data.get("again", ()))
        parts = cutter.stages(cuts, duplicated)
        return cls(
            graph,
            cuts,
            duplicated,
            tuple(Strategy.from_data(stage, part.graph) for stage, part in zip(stages, parts, strict=True)),
            str(data.get("schedule")),
            int(data.get("places", len(stages))),
            cutter,
        )

    @property
    def representatives(self) -> tuple[int, ...]:
        return tuple(range(self.devices))
