"""Placement and schedule as one integer program, solved by OR-tools' CP-SAT.

The variables are a device for every operator, a start for its forward and its backward, and for every tensor
and device the message that brings the tensor there and the one that brings its gradient back. The
constraints, each with the method that adds it:

- each operator, or unit of operators that must share a device, is on one device (:meth:`._place`);
- an operator takes its time on its device (:meth:`._run`);
- no operator starts before its inputs have arrived, over links of different speeds (:meth:`._send`);
- stored and saved bytes fit on each device, each tensor counted once (:meth:`._keep`);
- the step ends when the last task has ended (:meth:`._end`).

These are NetSplit's constraints, with a memory rule of ours. In NetSplit operators may overlap on a device;
``Rules.exclusive`` adds that a device, and a lane of a link, does one thing at a time, that a device's
backward follows its forward, and that the optimizer's step comes last. Without ``Rules.backward`` and with
unlimited capacity the constraints are Pesto's as NetSplit extends them, (6-2)–(6-7).

Times are whole ticks, rounded down, so that a proven bound holds for the real problem; see :class:`.Grid`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tensoropt.placement import Placement, PlacementProblem
from tensoropt.planners.placed.common.units import units_of
from tensoropt.planners.placed.exact.rules import Rules, kept_tensors, lasting_bytes, most_units, unit_bytes

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

ROUNDING = 1e-3
"""The largest share of a step that rounding may take off."""


@dataclass(frozen=True)
class Grid:
    """A grid of whole ticks for times in seconds.

    A step is a chain of at most ``4 n + 1`` tasks (every operator forward and backward, a message before
    each, and an optimizer step), each shortened by less than a tick.
    """

    tick_s: float

    @classmethod
    def of(cls, problem: PlacementProblem, bound_s: float) -> Grid:
        """Return the coarsest grid that shortens steps of ``bound_s`` or more by at most :data:`ROUNDING`."""
        return cls(ROUNDING * bound_s / (4 * problem.size + 1))

    def ticks(self, seconds: float) -> int:
        """Convert seconds to ticks, rounded down; infinite times, which no solution contains, to 0."""
        if not math.isfinite(seconds):
            return 0
        # For a whole number of ticks the division may be an ulp too small.
        return math.floor(seconds / self.tick_s + 1e-9)


class PlacementProgram:
    """The integer program of one placement problem, built with all constraints.

    Args:
        grid: the grid of ticks in which the program counts time.
        most_s: an upper bound on the step in seconds, such as that of a known placement.
        capacity_bytes: the right-hand side of the memory rule, (devices,).

    Attributes:
        on: for each operator and device, the literal that says that the operator is on the device.
        start, end: the start and end of each operator, for each direction (False: forward, True: backward).
        most: the latest time considered, in ticks.
    """

    def __init__(
        self,
        problem: PlacementProblem,
        rules: Rules,
        grid: Grid,
        most_s: float,
        capacity_bytes: Sequence[float],
    ):
        # OR-tools is an extra: importing this module must not need it.
        from ortools.sat.python import cp_model

        self.cp: Any = cp_model
        self.problem, self.grid = problem, grid
        self.devices = range(problem.devices.count)
        self.most = grid.ticks(most_s) + 1
        self.capacity_bytes = tuple(map(float, capacity_bytes))
        self.model: cp_model.CpModel = self.cp.CpModel()
        self.start: dict[bool, list[Any]] = {}
        self.end: dict[bool, list[Any]] = {}
        self.rules = rules
        self.backward = problem.training and rules.backward
        self.busy: dict[Any, list[Any]] = defaultdict(list)
        self._place()
        self._run()
        self._send()
        self._keep()
        self._end()

    def time(self) -> Any:
        """Return a new variable: a time in ticks, up to ``most``."""
        return self.model.new_int_var(0, self.most, "")

    def any_of(self, literals: list[Any]) -> Any:
        """Return a literal that is true exactly if at least one of the given literals is."""
        # A literal that is named twice would only add clauses; one alone needs no new variable.
        unique = list({literal.index: literal for literal in literals}.values())
        if len(unique) == 1:
            return unique[0]
        result = self.model.new_bool_var("")
        self.model.add_bool_or([*unique, result.negated()])
        for literal in unique:
            self.model.add_implication(literal, result)
        return result

    def both(self, first: Any, second: Any) -> Any:
        """Return a literal that is true exactly if both given literals are."""
        result = self.model.new_bool_var("")
        self.model.add_implication(result, first)
        self.model.add_implication(result, second)
        self.model.add_bool_or([result, first.negated(), second.negated()])
        return result

    def _occupy(self, name: Any, start: Any, ticks: int, end: Any, present: Any) -> None:
        """Constrain start + ticks == end if ``present`` is true. Under ``Rules.exclusive``, also forbid that
        intervals with the same ``name`` (of a device or lane) overlap.
        """
        if not self.rules.exclusive:  # nothing queues, and an interval would only burden the solver
            self.model.add(end == start + ticks).only_enforce_if(present)
            return
        interval = self.model.new_optional_interval_var(start, ticks, end, present, "")
        self.busy[name].append(interval)

    # -- constraints ------------------------------------------------------------------------------

    def _place(self) -> None:
        problem, units = self.problem, units_of(self.problem)
        self.unit = units.of
        literals = [
            [self.model.new_bool_var(f"{problem.names[group[0]]}@{d}") for d in self.devices]
            for group in units.members
        ]
        for allowed, row in zip(units.allowed, literals, strict=True):
            self.model.add_exactly_one(row)
            for device in np.flatnonzero(~allowed):
                self.model.add(row[device] == 0)
        self.on = [literals[unit] for unit in units.of]

    def _run(self) -> None:
        model, problem = self.model, self.problem
        for back, seconds in ((False, problem.forward_s), (True, problem.backward_s)):
            if back and not self.backward:
                break
            self.start[back] = [self.time() for _ in problem.names]
            self.end[back] = [self.time() for _ in problem.names]
            for o in range(problem.size):
                start, end = self.start[back][o], self.end[back][o]
                if not self.rules.exclusive and (seconds[o] == seconds[o, 0]).all():
                    model.add(end == start + self.grid.ticks(seconds[o, 0]))
                    continue
                for d in self.devices:
                    self._occupy(d, start, self.grid.ticks(seconds[o, d]), end, self.on[o][d])
                # Implied by the intervals, but those hold only under a literal: without it the relaxation
                # sees no durations.
                model.add(end >= start + self.grid.ticks(seconds[o].min()))
        if self.backward:
            for o in range(problem.size):
                model.add(self.start[True][o] >= self.end[False][o])
        self.turn = [self.time() for _ in self.devices]
        if self.backward and self.rules.exclusive:
            for o in range(problem.size):
                for d in self.devices:
                    model.add(self.end[False][o] <= self.turn[d]).only_enforce_if(self.on[o][d])
                    model.add(self.start[True][o] >= self.turn[d]).only_enforce_if(self.on[o][d])

    def _send(self) -> None:
        for number, tensor in enumerate(self.problem.tensors):
            units = {self.unit[o] for o in (tensor.producer, *tensor.readers)}
            for reader in tensor.readers:
                self.model.add(self.start[False][reader] >= self.end[False][tensor.producer])
                if tensor.gradient and self.backward:
                    self.model.add(self.start[True][tensor.producer] >= self.end[True][reader])
            if len(units) > 1:
                for device in self.devices:
                    self._send_to(number, device)

    def _send_to(self, number: int, device: int) -> None:
        problem, model = self.problem, self.model
        tensor = problem.tensors[number]
        read = self.any_of([self.on[r][device] for r in tensor.readers])
        begins, ends = self.time(), self.time()
        made = self.end[False][tensor.producer]
        model.add(begins >= made)
        model.add(ends >= begins)
        for reader in tensor.readers:
            model.add(self.start[False][reader] >= ends).only_enforce_if(self.on[reader][device])
        back = self.backward and tensor.gradient
        if back:
            returns, returned = self.time(), self.time()
            model.add(self.start[True][tensor.producer] >= returned)
            model.add(returned >= returns)
            for reader in tensor.readers:
                model.add(returns >= self.end[True][reader]).only_enforce_if(self.on[reader][device])
        for source in self.devices:
            if source == device:
                continue
            sent = self.both(self.on[tensor.producer][source], read)
            # The message takes the time of the link that its literals choose; the lanes queue in _end.
            self._transmit(tensor.bytes, source, device, begins, ends, sent)
            if back:
                self._transmit(tensor.bytes, device, source, returns, returned, sent)

    def _transmit(self, size: int, source: int, target: int, start: Any, end: Any, sent: Any) -> None:
        devices = self.problem.devices
        ticks = self.grid.ticks(devices.transfer_s(size, source, target))
        for lane in devices.lanes_of(source, target):
            self._occupy(lane, start, ticks, end, sent)

    def _keep(self) -> None:
        """Add the memory constraints: each device's stored and saved bytes fit, each tensor counted once.

        Between forward and backward a device holds all of these bytes, so the simulated peak is never less.
        Without ``Rules.balance`` the rule excludes nothing that fits.
        """
        problem, own = self.problem, lasting_bytes(self.problem)
        tensors = kept_tensors(problem)
        unit = unit_bytes(problem)
        units = [int(size // unit) for size in own]
        total = sum(units) + sum(int(tensor.bytes // unit) for tensor in tensors)
        for d, most in enumerate(most_units(problem, self.rules, self.capacity_bytes)):
            # A limit that cannot bind is left out of the program.
            if most >= total:
                continue
            terms = [size * self.on[o][d] for o, size in enumerate(units)]
            for tensor in tensors:
                kept = self.any_of([self.on[o][d] for o in tensor.kept_by])
                if tensor.stored:
                    # On its producer's device it is the parameter itself, which is already counted there.
                    kept = self.both(kept, self.on[tensor.producer][d].negated())
                terms.append(int(tensor.bytes // unit) * kept)
            self.model.add(sum(terms) <= most)

    def _end(self) -> None:
        model, problem = self.model, self.problem
        self.total = self.time()
        last = self.end[self.backward]
        for o in range(problem.size):
            model.add(self.total >= last[o])
        self.last = [self.time() for _ in self.devices]
        if self.rules.exclusive:
            # NetSplit as published lacks this: operators may share a device in time.
            for queue in self.busy.values():
                model.add_no_overlap(queue)
            for d in self.devices:
                self._work(d, last)
        model.minimize(self.total)

    def _work(self, device: int, last: list[Any]) -> None:
        problem, grid = self.problem, self.grid
        update = sum(grid.ticks(s) * self.on[o][device] for o, s in enumerate(problem.update_s[:, device]))
        for o in range(problem.size):
            self.model.add(self.last[device] >= last[o]).only_enforce_if(self.on[o][device])
        self.model.add(self.total >= self.last[device] + update)
        seconds = zip(problem.forward_s[:, device], problem.backward_s[:, device], strict=True)
        work = sum((grid.ticks(f) + grid.ticks(b)) * self.on[o][device] for o, (f, b) in enumerate(seconds))
        # Implied by the intervals as well, and a bound that the relaxation sees.
        self.model.add(self.last[device] >= work)

    def decode(self, value: Callable[[Any], int]) -> Placement:
        """Return the solution's placement, in order of starts, then of operators (in backward reversed)."""
        device = [next(d for d, literal in enumerate(literals) if value(literal)) for literals in self.on]
        return Placement.by_start(
            device, len(self.devices), *([*map(value, of)] for of in self.start.values())
        )
