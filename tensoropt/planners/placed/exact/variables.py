"""The variables of a placement program, and the literals made of them.

A literal is a 0-1 variable of the solver or its negation. A variable that is derived from others has a
recipe, so that a known schedule can be completed to values of all variables, which the solver takes as a
hint.

Seconds are whole ticks, rounded down so that every proof for ticks holds for seconds.

A program can follow memory over time as the simulator does: every tensor from its first to its last use.

The memory rule sums the tensors alive at once between forward and backward. The simulator also sees tensors
that only forward needs, gradients on their way, and an operator's temporaries. Each of these is an interval
on its device with its bytes as demand; the intervals of a device form one cumulative constraint. Bytes are
rounded down and capacity up, so that nothing that fits is excluded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from tensoropt.placement import PlacementProblem
from tensoropt.planners.placed.exact.rules import UNIT_BYTES

if TYPE_CHECKING:
    from ortools.sat.python import cp_model


if TYPE_CHECKING:
    pass


ROUNDING = 1e-3
"""The largest share of a step that rounding may take off."""


@dataclass(frozen=True)
class Grid:
    """A grid of whole ticks for seconds.

    A step is a chain of at most ``4 n m + 1`` tasks (every operator forward and backward, a message before
    each of them, for m micro-batches, and an optimizer step), each shortened by less than a tick.
    """

    tick_s: float

    @classmethod
    def of(cls, problem: PlacementProblem, bound_s: float) -> Grid:
        """Return the coarsest grid that shortens no step by more than :data:`ROUNDING`, given a lower bound
        on a step."""
        return cls(ROUNDING * bound_s / (4 * problem.size * problem.micro_batches + 1))

    def ticks(self, seconds: float) -> int:
        """Return the ticks of ``seconds``, rounded down; 0 for impossible times, which no solution
        contains.
        """
        if not math.isfinite(seconds):
            return 0
        # For a whole number of ticks the division may be an ulp too small.
        return math.floor(seconds / self.tick_s + 1e-9)


def lower_bound_s(problem: PlacementProblem) -> float:
    """Return a lower bound on any placement's step: the longest chain of operators, or the work of all
    micro-batches spread evenly.
    """
    forward, backward = problem.forward_s.min(axis=1), problem.backward_s.min(axis=1)
    ahead, finish = forward.copy(), backward.copy()
    for reader in range(problem.size):
        before = (ahead[problem.tensors[t].producer] for t in problem.read[reader])
        ahead[reader] += max(before, default=0.0)
    # Backward of an operator waits for its own forward and for the gradients of its readers. Messages and the
    # optimizer count nothing, so that this stays below every placement's step.
    for producer in reversed(range(problem.size)):
        tensors = (problem.tensors[t] for t in problem.made[producer])
        gradients = [finish[r] for t in tensors if t.gradient for r in t.readers]
        finish[producer] += max([ahead[producer], *gradients])
    once = problem.micro_batches * (problem.forward_s + problem.backward_s)
    work = (once + problem.update_s).min(axis=1).sum()
    return float(max(finish.max(initial=0.0), work / problem.devices.count))


Recipe = Callable[[Callable[[Any], int]], int]
"""Computes the value of a variable, given a function that looks up the values of others."""


class MessageKey(NamedTuple):
    """A message's identity: a tensor on its way to a device, or with ``backward`` its gradient from there."""

    tensor: int
    device: int
    backward: bool


class SendKey(NamedTuple):
    """The identity of a literal: whether a tensor goes from one device, where it is made, to another."""

    tensor: int
    source: int
    target: int


class OrderKey(NamedTuple):
    """The identity of a literal: whether one operator starts before another, in forward or in backward."""

    first: int
    second: int
    backward: bool


class Variables:
    """The decisions of a placement program; all times are ticks of the grid.

    Attributes:
        model: the solver's model.
        on: for each operator and device, the literal that says it lies there.
        start, end: for each direction (False: forward, True: backward) and operator.
        message: the start and end of every message.
        sent: whether a tensor goes from one device to another.
        recipes: how each derived variable follows from those before it.
        most: the latest time considered.
    """

    def __init__(self, problem: PlacementProblem, grid: Grid, most_s: float, capacity_bytes: Sequence[float]):
        # OR-tools is an extra: importing this module must not need it.
        from ortools.sat.python import cp_model

        self.cp: Any = cp_model
        self.problem, self.grid = problem, grid
        self.devices = range(problem.devices.count)
        self.most = grid.ticks(most_s) + 1
        self.capacity_bytes = tuple(float(c) for c in capacity_bytes)
        self.model: cp_model.CpModel = self.cp.CpModel()
        self.on: list[list[Any]] = []
        self.start: dict[bool, list[Any]] = {}
        self.end: dict[bool, list[Any]] = {}
        self.message: dict[MessageKey, tuple[Any, Any]] = {}
        self.sent: dict[SendKey, Any] = {}
        self.recipes: list[tuple[Any, Recipe]] = []
        self.zero, self.horizon = self.model.new_constant(0), self.model.new_constant(self.most)

    def time(self) -> Any:
        """Return a new variable: a time between 0 and the horizon."""
        return self.model.new_int_var(0, self.most, "")

    def derive(self, variable: Any, recipe: Recipe) -> None:
        """Record how a variable follows from others; the recipe reads only what was derived before it."""
        self.recipes.append((variable, recipe))

    def copied(self, number: int, device: int) -> Any | None:
        """Return the literal that says whether a device receives a tensor; None if it cannot."""
        keys = (SendKey(number, source, device) for source in self.devices)
        sources = [self.sent[key] for key in keys if key in self.sent]
        return self.any_of(sources) if sources else None

    def any_of(self, literals: list[Any]) -> Any:
        """Return the literal that holds exactly if at least one of these does."""
        # A literal that is named twice would only add clauses; one alone needs no new variable.
        unique = list({literal.index: literal for literal in literals}.values())
        if len(unique) == 1:
            return unique[0]
        result = self.model.new_bool_var("")
        self.model.add_bool_or([*unique, result.negated()])
        for literal in unique:
            self.model.add_implication(literal, result)
        self.derive(result, lambda value: int(any(value(literal) for literal in unique)))
        return result

    def both(self, first: Any, second: Any) -> Any:
        """Return the literal that holds exactly if both of these do."""
        result = self.model.new_bool_var("")
        self.model.add_implication(result, first)
        self.model.add_implication(result, second)
        self.model.add_bool_or([result, first.negated(), second.negated()])
        self.derive(result, lambda value: int(value(first) and value(second)))
        return result


class _Demands(NamedTuple):
    """The demands for memory on one device: intervals in time, and the units that each takes."""

    intervals: list[Any]
    units: list[int]


def limit_lifetimes(program: Variables) -> None:
    """Add to a program the constraint that everything alive on a device at once fits."""
    demands = _Lifetimes(program).demands()
    for device, (intervals, units) in enumerate(demands):
        capacity = math.ceil(min(program.capacity_bytes[device], sum(units) * UNIT_BYTES) / UNIT_BYTES)
        program.model.add_cumulative(intervals, units, capacity)


class _Lifetimes:
    """The contents of each device, interval by interval."""

    def __init__(self, program: Variables):
        self.program, self.model, self.problem = program, program.model, program.problem
        self.alive = [_Demands([], []) for _ in program.devices]

    def demands(self) -> list[_Demands]:
        """Return everything that takes memory on each device."""
        for operator in range(self.problem.size):
            for device in self.program.devices:
                self._operator(operator, device)
        for number in range(len(self.problem.tensors)):
            for device in self.program.devices:
                self._tensor(number, device)
        return self.alive

    def _add(self, device: int, size: float, start: Any, end: Any, present: Any) -> None:
        # Rounded down; less than a unit would only burden the solver.
        demand = int(size // UNIT_BYTES)
        if demand:
            took = self.model.new_int_var(0, self.program.most, "")
            self.program.derive(
                took, lambda value: max(value(end) - value(start), 0) if value(present) else 0
            )
            interval = self.model.new_optional_interval_var(start, took, end, present, "")
            self.alive[device].intervals.append(interval)
            self.alive[device].units.append(demand)

    def _until(self, first: Any, present: Any, users: Iterable[tuple[Any, Any]]) -> Any:
        """Return a time at or after ``first``, and after each (end, literal) whose literal holds."""
        users = list(users)
        # Bounded only from below: a later end takes memory for longer and gains the solver nothing.
        last = self.program.time()
        self.model.add(last >= first).only_enforce_if(present)
        for end, literal in users:
            self.model.add(last >= end).only_enforce_if(literal)
        self.program.derive(
            last, lambda value: max([value(first), *(value(e) for e, used in users if value(used))])
        )
        return last

    def _since(self, last: Any, present: Any, makers: Iterable[tuple[Any, Any]]) -> Any:
        """Return a time at or before ``last``, and before each (time, literal) whose literal holds."""
        makers = list(makers)
        # Bounded only from above, for the same reason.
        first = self.program.time()
        self.model.add(first <= last).only_enforce_if(present)
        for moment, literal in makers:
            self.model.add(first <= moment).only_enforce_if(literal)
        self.program.derive(
            first, lambda value: min([value(last), *(value(m) for m, used in makers if value(used))])
        )
        return first

    def _operator(self, o: int, d: int) -> None:
        program, problem = self.program, self.problem
        on = program.on[o][d]
        # Stored from the start of the step to its end, whatever runs.
        self._add(d, problem.stored_bytes[o], program.zero, program.horizon, on)
        self._add(d, problem.forward_peak_bytes[o], program.start[False][o], program.end[False][o], on)
        if problem.training:
            # Below 0 if it releases the gradients of its results before it makes others: then these end when
            # it begins (:meth:`_gradient`).
            given = sum(problem.tensors[t].bytes for t in problem.made[o] if problem.tensors[t].gradient)
            peak = problem.backward_peak_bytes[o]
            need = peak if peak >= 0 else max(peak + given, 0.0)
            self._add(d, need, program.start[True][o], program.end[True][o], on)
            self._add(d, problem.kept_bytes[o], program.start[False][o], program.end[True][o], on)

    def _tensor(self, number: int, device: int) -> None:
        """Add the tensor itself on one device, made there or received, and its gradient."""
        program, tensor = self.program, self.problem.tensors[number]
        made_there, begins = program.on[tensor.producer][device], program.start[False][tensor.producer]
        made = program.end[False][tensor.producer]
        users = [(program.end[False][r], program.on[r][device]) for r in tensor.readers]
        if self.problem.training:
            users += [(program.end[True][o], program.on[o][device]) for o in tensor.kept_by]
        sends = [
            (
                program.message[MessageKey(number, target, False)][1],
                program.sent[SendKey(number, device, target)],
            )
            for target in program.devices
            if SendKey(number, device, target) in program.sent
        ]
        if not tensor.stored:
            self._add(
                device, tensor.bytes, begins, self._until(made, made_there, [*users, *sends]), made_there
            )
        copied = program.copied(number, device)
        if copied is not None:
            _, arrived = program.message[MessageKey(number, device, False)]
            # The simulator makes room for it before the operator that the device runs next in an order of all
            # devices, which is at the latest the first that reads it.
            last = self._until(arrived, copied, users)
            begins = [(program.start[False][r], program.on[r][device]) for r in tensor.readers]
            self._add(device, tensor.bytes, self._since(last, copied, begins), last, copied)
        if self.problem.training and tensor.gradient and tensor.readers:
            self._gradient(number, device, copied)

    def _gradient(self, number: int, device: int, copied: Any) -> None:
        """Add every contribution while it is made, and their sum from the first's end until it is used or
        sent."""
        program, tensor = self.program, self.problem.tensors[number]
        back = [(program.start[True][r], program.end[True][r], program.on[r][device]) for r in tensor.readers]
        for begin, end, literal in back:
            self._add(device, tensor.bytes, begin, end, literal)
        made_there = program.on[tensor.producer][device]
        # Gradients of other devices are added right before the backward that needs the sum.
        ends = [(end, literal) for _, end, literal in back]
        begins = used = program.start[True][tensor.producer]
        if self.problem.backward_peak_bytes[tensor.producer] >= 0:
            used = program.end[True][tensor.producer]
        self._add(device, tensor.bytes, self._since(begins, made_there, ends), used, made_there)
        if copied is not None:
            _, left = program.message[MessageKey(number, device, True)]
            self._add(device, tensor.bytes, self._since(left, copied, ends), left, copied)
