"""The orders in which the places of a pipeline compute: GPipe, 1F1B, interleaved 1F1B, and two zero-bubble
schedules.

These are the schedules of ``torch.distributed.pipelining``, which runs them; here they are plain data, from
which times and peaks of memory follow without a job. GPipe: Huang et al., NeurIPS 2019. 1F1B: Narayanan et
al., SOSP 2019 (PipeDream), with a flush at the end of a step. Interleaved 1F1B: Narayanan et al., SC 2021,
section 2.2. Zero bubble: Qi et al., ICLR 2024 (arXiv 2401.10241), ZB-H1 interleaved; the V shape: Qi et al.,
NeurIPS 2024 (arXiv 2405.15362), ZB-V.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from tensoropt.errors import PlanError


class Action(NamedTuple):
    """One piece of work of a pipeline's place.

    Attributes:
        kind: ``F`` forward; ``B`` backward; if a schedule takes backward apart, ``I`` the part that the
            previous stage waits for and ``W`` the gradients of parameters.
    """

    kind: str
    stage: int
    micro_batch: int


@dataclass(frozen=True)
class Schedule:
    """A way to bring micro-batches through a pipeline.

    Attributes:
        words: a description for people.
        several: whether a place has several stages.
        apart: whether gradients of parameters are made apart from those of the stage's inputs.
        back_and_forth: whether the second half of the stages runs back from the last place to the first.
        waits: whether it waits for what it sends before it asks for the next forward or sends the next
            gradient; the other schedules wait at the end of a step.
        order: (place, places, stages of a place, micro-batches) -> the actions of the place, in order.
    """

    words: str
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
    """Rounds of micro-batches that pass a place's stages one after another (Narayanan et al., section
    2.2)."""

    def __init__(self, place: int, places: int, per_place: int, micro_batches: int, hops: int):
        self.place, self.places, self.per_place = place, places, per_place
        self.round = micro_batches // max(1, micro_batches // places)
        self.count = per_place * micro_batches
        # Forwards before the first backward: one round of all stages but the last, and some for every later
        # place.
        self.ahead = min((per_place - 1) * self.round + hops * (places - 1 - place), self.count)
        self._next: dict[tuple[str, int], int] = {}

    def action(self, kind: str, number: int) -> Action:
        """Return the ``number``-th forward or backward of the place."""
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
        # The last places have nothing to wait for, so they postpone no gradient.
        if i >= place:
            yield rounds.action("W", done)
            done += 1
    yield from (rounds.action("W", i) for i in range(done, rounds.count))


def _v_shaped(place: int, places: int, per_place: int, micro_batches: int) -> Iterator[Action]:
    return (action for action in _v(place, places, micro_batches) if action.micro_batch < micro_batches)


def _v(place: int, places: int, micro_batches: int) -> Iterator[Action]:
    """Yield the whole pattern, which takes at least 2 p - 1 micro-batches."""
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


SCHEDULES: dict[str, Schedule] = {
    "gpipe": Schedule("GPipe: all forwards, then all backwards", _gpipe),
    "1f1b": Schedule("1F1B: a backward as early as possible", _one_forward_one_backward, waits=True),
    "interleaved_1f1b": Schedule("1F1B with several stages to a place", _interleaved, several=True),
    "zero_bubble": Schedule(
        "gradients of parameters where places would wait", _zero_bubble, several=True, apart=True
    ),
    "zbv": Schedule(
        "the same with two stages to a place, back from the last place to the first",
        _v_shaped,
        several=True,
        apart=True,
        back_and_forth=True,
    ),
}
"""The schedules by the names that plans and constraints use."""


def schedule_named(name: str) -> Schedule:
    """Return the schedule of this name.

    Raises:
        PlanError: there is no such schedule.
    """
    if name not in SCHEDULES:
        raise PlanError(f"there is no pipeline schedule called {name}; there are {', '.join(SCHEDULES)}")
    return SCHEDULES[name]


def check_schedule(name: str, places: int, per_place: int, micro_batches: int) -> None:
    """Refuse a pipeline that PyTorch's schedule of this name does not run.

    Raises:
        PlanError: the message says what would be right.
    """
    schedule = schedule_named(name)
    if places < 2:
        raise PlanError(f"a pipeline has two places or more, not {places}")
    if schedule.several != (per_place > 1) and not (name == "interleaved_1f1b" or name == "zero_bubble"):
        right = (
            "two stages" if schedule.back_and_forth else "several stages" if schedule.several else "one stage"
        )
        raise PlanError(f"the schedule {name} has {right} to a place, not {per_place}")
    if schedule.back_and_forth and per_place != 2:
        raise PlanError(f"the schedule {name} has two stages to a place, not {per_place}")
    if name == "1f1b" and micro_batches < places:
        raise PlanError(
            f"1f1b keeps {places} places busy with as many micro-batches, but there are {micro_batches}; use "
            "gpipe, or more micro-batches"
        )
    rounds = max(1, micro_batches // places)
    if name in ("interleaved_1f1b", "zero_bubble") and micro_batches % rounds:
        raise PlanError(
            f"{name} runs {micro_batches} micro-batches on {places} places in {rounds} equal rounds; use a "
            f"multiple of {rounds}"
        )


def in_flight_of(actions: Sequence[Sequence[Action]], stage: int) -> int:
    """Return the most micro-batches from which a stage keeps something at once: those whose forward is over
    or running, and whose backward is not over."""
    own = next(of for of in actions if any(action.stage == stage for action in of))
    ends = "W" if any(action.kind == "W" for action in own) else "B"
    now = most = 0
    for action in own:
        if action.stage == stage and action.kind in ("F", ends):
            now += 1 if action.kind == "F" else -1
            most = max(most, now)
    return most


def stage_place(name: str, places: int, stage: int) -> int:
    """Return the place that has a stage."""
    if schedule_named(name).back_and_forth:
        return stage if stage < places else 2 * places - 1 - stage
    return stage % places


@lru_cache(maxsize=256)
def place_actions(
    name: str, places: int, per_place: int, micro_batches: int
) -> tuple[tuple[Action, ...], ...]:
    """Return the actions of each place in a step, in order.

    Raises:
        PlanError: such a pipeline cannot be run.
    """
    check_schedule(name, places, per_place, micro_batches)
    order = schedule_named(name).order
    return tuple(tuple(order(place, places, per_place, micro_batches)) for place in range(places))
