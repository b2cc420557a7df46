"""Memory over time in a program, as the simulator follows it: every tensor from its first to its last use.

NetSplit's (5-18) sums what is there at once between forward and backward. The simulator also sees tensors
that only forward needs, gradients on their way, and what an operator needs while it runs. Each of these is an
interval on its device with its bytes as demand; the intervals of a device form one cumulative constraint.
Bytes are rounded down and capacity up, so that nothing that fits is excluded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from tensoropt.planners.placed.exact.rules import UNIT_BYTES
from tensoropt.planners.placed.exact.variables import MessageKey, SendKey, Variables


class _Demands(NamedTuple):
    """The demands for memory on one device: intervals in time, and how many units each takes."""

    intervals: list[Any]
    units: list[int]


def limit_lifetimes(program: Variables) -> None:
    """Add to a program the constraint that what is alive on a device at once fits."""
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
            self._add(d, problem.backward_peak_bytes[o], program.start[True][o], program.end[True][o], on)
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
                program.message[MessageKey(number, other, False)][1],
                program.sent[SendKey(number, device, other)],
            )
            for other in program.devices
            if SendKey(number, device, other) in program.sent
        ]
        if not tensor.stored:
            self._add(
                device, tensor.bytes, begins, self._until(made, made_there, [*users, *sends]), made_there
            )
        copied = program.copied(number, device)
        if copied is not None:
            arrives, arrived = program.message[MessageKey(number, device, False)]
            self._add(device, tensor.bytes, arrives, self._until(arrived, copied, users), copied)
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
        returned = [
            (*program.message[MessageKey(number, other, True)], program.sent[SendKey(number, device, other)])
            for other in program.devices
            if SendKey(number, device, other) in program.sent
        ]
        for begin, end, literal in returned:
            self._add(device, tensor.bytes, begin, end, literal)
        ends = [(end, literal) for _, end, literal in (*back, *returned)]
        used = program.end[True][tensor.producer]
        self._add(device, tensor.bytes, self._since(used, made_there, ends), used, made_there)
        if copied is not None:
            _, left = program.message[MessageKey(number, device, True)]
            ends = [(end, literal) for _, end, literal in back]
            self._add(device, tensor.bytes, self._since(left, copied, ends), left, copied)
