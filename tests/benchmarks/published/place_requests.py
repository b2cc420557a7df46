"""What a rank of a pipeline asks PyTorch's allocator for in a step, action by action.

The requests of an action are those of its stage's step (:mod:`tensoropt.simulate.step`), in the direction of
the action, for the allocations of its micro-batch. How many bytes an action needs, its micro-batch keeps, and
messages take is said by :mod:`tensoropt.pipeline.memory`; what these are more than the allocations of the
step is one block each.

Where a message's buffer becomes a tensor of the step, it is freed and the tensor allocated. A backward that
is taken apart runs no step: it needs one block beside what its micro-batch keeps.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Protocol

from tensoropt.evaluation.evaluate import Evaluation
from tensoropt.ops.families.stages import ARRIVE
from tensoropt.pipeline.memory import KEPT, MESSAGE, NEEDED, TRAILING, Alive, alive_at
from tensoropt.pipeline.strategy import Action, PipelinedStrategy
from tensoropt.profiling.cuda_kernels import Capability
from tensoropt.simulate.step import Instruction, lower
from tests.benchmarks.published.requests import (
    WORKSPACE,
    RankRequests,
    Request,
    requests_of,
    stored_blocks,
)


def place_requests(
    strategy: PipelinedStrategy,
    stages: Sequence[Evaluation],
    place: int,
    actions: Sequence[Action],
    capability: Capability | None = None,
) -> RankRequests:
    """Return the requests of a rank of a place.

    Args:
        actions: all actions of the place, in order.
        capability: the compute capability whose attention kernels are asked what they keep.
    """
    numbers = strategy.stages_at(place)
    of_stages = {n: _StageRequests(stages[n], given=strategy.shares_arriving(n)) for n in numbers}
    made = _PlaceRequests(of_stages, strategy.forward_only)
    record(made, alive_at(strategy, stages, place, actions, capability), actions)
    stored = [stored_blocks(stages[n].batch, 0) for n in numbers]
    lasting, state = ([*chain(*blocks)] for blocks in zip(*stored, strict=True))
    return RankRequests(lasting, state, made.step, made.end)


class Recorder(Protocol):
    """Records what a place has alive, action by action."""

    def keep(self, action: Action, change: float) -> None: ...

    def add(self, action: Action, needed: float, on_the_way: float, trailing: float) -> None: ...

    def finish(self, needed: Mapping[int, float]) -> None: ...


def record(recorder: Recorder, alive: Sequence[Alive], actions: Sequence[Action]) -> None:
    """Hand a recorder what begins and ends with each action."""
    begun, over = (Counter[int](), Counter[int]())
    totals = {what: [0.0] * (len(actions) + 1) for what in (NEEDED, MESSAGE, TRAILING)}
    ends: dict[int, float] = {}
    for one in alive:
        if one.action is None:
            ends[one.stage] = one.bytes
        elif one.what == KEPT:
            begun[one.first] += round(one.bytes)
            over[one.end] += round(one.bytes)
        else:
            for point in range(one.first, one.end):
                totals[one.what][point] += one.bytes
    for number, action in enumerate(actions):
        recorder.keep(action, -over[number])
        recorder.add(action, *(totals[what][number] for what in (NEEDED, MESSAGE, TRAILING)))
        recorder.keep(action, begun[number + 1])
    recorder.finish(ends)


@dataclass(frozen=True)
class _Part:
    """The requests of one part of a stage's step.

    Attributes:
        fullest: the number of requests after which most is alive.
        most: the bytes that are alive then, including those from before this part.
    """

    requests: list[Request]
    fullest: int
    most: int

    def needing(self, size: int) -> list[Request]:
        """Return the requests, with one more block where most is alive if they need less than ``size``
        bytes."""
        if size <= self.most:
            return self.requests
        rest = [Request(WORKSPACE, size - self.most), Request(WORKSPACE, 0)]
        return [*self.requests[: self.fullest], *rest, *self.requests[self.fullest :]]


class _StageRequests:
    """The requests of one micro-batch of a stage, and of its step's end.

    Args:
        evaluation: that of the stage, or of an equal one, alone.
        given: whether the tensors that arrive are those of a stage at the same place, which has them anyway.

    Attributes:
        between: the blocks that are alive between forward and backward.
    """

    def __init__(self, evaluation: Evaluation, *, given: bool):
        step, forward_end = lower(evaluation.batch), evaluation.batch.schedule.forward_end
        groups = evaluation.batch.graph.groups if given else ()
        elsewhere = frozenset(g.anchor.outputs[0] for g in groups if g.anchor.target == ARRIVE)
        instructions = [_without(now, elsewhere) for now in step.instructions]
        alive: dict[Hashable, list[int]] = defaultdict(list)
        # What ends as backward begins is gone between the two.
        turn = instructions[forward_end]
        over = replace(turn, workspace=[], leaves=[], releases=[])
        self.forward = _part([*instructions[:forward_end], over], alive)
        self.between = [Request(name, size) for name, sizes in alive.items() for size in sizes]
        behind = replace(turn, begins=[], ends=[])
        self.backward = _part([behind, *instructions[forward_end + 1 : step.last]], alive)
        self.end = _part(instructions[step.last :], alive)


def _part(instructions: Iterable[Instruction], alive: dict[Hashable, list[int]]) -> _Part:
    """Return the requests of some instructions; ``alive`` is updated."""
    requests = requests_of(instructions)
    fullest, now = 0, sum(map(sum, alive.values()))
    most = now
    for count, (name, size) in enumerate(requests, 1):
        if size:
            alive[name].append(size)
        now += size or -alive[name].pop(0)
        if now > most:
            fullest, most = count, now
    return _Part(requests, fullest, most)


def _without(now: Instruction, tensors: frozenset[str]) -> Instruction:
    """Return an instruction without the allocations of some tensors."""
    begins, ends, leaves, releases = (
        [named for named in of if named.tensor not in tensors]
        for of in (now.begins, now.ends, now.leaves, now.releases)
    )
    return replace(now, begins=begins, ends=ends, leaves=leaves, releases=releases)


class _Blocks:
    """Blocks whose bytes follow a total.

    Args:
        requests: receives the requests.
        name: the name of all blocks that are allocated here.
    """

    def __init__(self, requests: list[Request], name: Hashable):
        self._requests, self._name = requests, name
        self._blocks: list[Request] = []
        self.bytes = 0

    def adopt(self, blocks: Iterable[Request]) -> None:
        """Take over blocks that are allocated already."""
        self._blocks += blocks
        self.bytes = sum(block.bytes for block in self._blocks)

    def hold(self, total: int) -> None:
        """Free, or allocate, until there are ``total`` bytes."""
        while self._blocks and self.bytes > total:
            # A block of just the difference, or the oldest one.
            sizes, more = [block.bytes for block in self._blocks], self.bytes - total
            freed = self._blocks.pop(sizes.index(more) if more in sizes else 0)
            self._requests.append(Request(freed.name, 0))
            self.bytes -= freed.bytes
        if self.bytes < total:
            block = Request((self._name, len(self._requests)), total - self.bytes)
            self._requests.append(block)
            self.adopt([block])


_MicroBatch = tuple[int, int]
"""A stage and one of its micro-batches."""


class _PlaceRequests:
    """The requests of a place, recorded action by action.

    Args:
        stages: the requests of the place's stages, by number.
        first: the first stage of the pipeline that has a backward.

    Attributes:
        step, end: the requests of all actions, and of the step's end.
    """

    def __init__(self, stages: Mapping[int, _StageRequests], first: int):
        self.step: list[Request] = []
        self.end: list[Request] = []
        self._stages, self._first = stages, first
        self._messages, self._gradients = (_Blocks(self.step, name) for name in ("messages", "gradients"))
        # For each micro-batch the bytes that it keeps; the blocks of its stage's step among them; the rest.
        self._kept: Counter[_MicroBatch] = Counter()
        self._between: dict[_MicroBatch, list[Request]] = {}
        self._rest: dict[_MicroBatch, _Blocks] = {}
        self._acting: _MicroBatch | None = None

    def keep(self, action: Action, change: float) -> None:
        """Record by how much an action's micro-batch keeps more: as it begins, and when it is over."""
        key = action.stage, action.micro_batch
        self._kept[key] += round(change)
        if self._acting is not None:
            between = sum(block.bytes for block in self._between.get(key, ()))
            self._rest[key].hold(self._kept[key] - between)
            self._acting = None

    def add(self, action: Action, needed: float, on_the_way: float, trailing: float) -> None:
        """Record what an action has alive."""
        self._hold(on_the_way, trailing)
        kind, stage, micro_batch = action
        key, of_stage = (stage, micro_batch), self._stages[stage]
        rest = self._rest.setdefault(key, _Blocks(self.step, key))
        self._acting = key
        if kind == "F":
            self._between[key] = list(_named(key, of_stage.between))
            self.step += _named(key, of_stage.forward.needing(round(needed)))
        elif kind == "B" or (kind == "W" and stage == self._first):
            rest.hold(0)
            del self._between[key]
            self.step += _named(key, of_stage.backward.needing(round(needed)))
        else:
            if stage > self._first:
                rest.adopt(self._between.pop(key, ()))
            if (size := round(needed) - rest.bytes) > 0:
                self.step += [Request(WORKSPACE, size), Request(WORKSPACE, 0)]

    def finish(self, needed: Mapping[int, float]) -> None:
        """Record the step's end, at which each stage needs so many bytes."""
        self._hold(0.0, 0.0)
        # The optimizer's temporaries of all stages are alive at once.
        for number, stage in self._stages.items():
            self.end += _named(number, stage.end.needing(round(sum(needed.values()))))

    def _hold(self, on_the_way: float, trailing: float) -> None:
        """Have so many bytes of messages, and of gradients on their way to their shards."""
        totals = (self._messages, round(on_the_way)), (self._gradients, round(trailing))
        # First what becomes less.
        for blocks, total in sorted(totals, key=lambda each: each[1] - each[0].bytes):
            blocks.hold(total)


def _named(key: Hashable, requests: Iterable[Request]) -> Iterator[Request]:
    """Yield requests under names of their own."""
    return (Request((key, name), size) for name, size in requests)
