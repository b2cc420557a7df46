"""Placement and schedule as one integer program, solved by OR-tools' CP-SAT.

The variables: a device for every operator, a start for its forward and its backward, and for every tensor
and device the message that brings it there and the one that brings its gradient back. The constraints, each
where it is added: one device per operator and what must lie together (:meth:`Program._place`); an operator
takes its device's time (:meth:`Program._run`); nobody starts before its inputs are there, over links of
different speed (:meth:`Program._send`); every variable counts once per device it is on
(:meth:`Program._keep`); the step ends when the last has ended (:meth:`Program._end`). That is what NetSplit's
(5-11)–(5-18) say. In them operators may run on one device at the same time; ``Rules.exclusive`` adds what is
missing: a device, and a lane of a link, does one thing at a time, a device's backward comes after its
forward, and the optimizer's step after that.

Times are whole ticks, rounded down, so that a proven bound is one of the real problem; see :class:`Grid`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tensoropt.placement import Placement, PlacementProblem
from tensoropt.planners.placed.exact.lifetimes import UNIT_BYTES, Lifetimes
from tensoropt.planners.placed.exact.rules import Rules, kept_tensors, lasting_bytes, most_units, unit_bytes
from tensoropt.planners.placed.placing import units_of

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

ROUNDING = 1e-3
"""Most that rounding may take off a step, as a share of it."""


Recipe = Callable[[Callable[[Any], int]], int]
"""The value of a variable, given what looks up the values of others."""


@dataclass(frozen=True)
class Grid:
    """Seconds as whole ticks.

    A step is a chain of at most ``4 n + 1`` tasks (every operator forward and backward, a message before each
    of them, an optimizer step), each shortened by less than a tick.
    """

    tick_s: float

    @classmethod
    def of(cls, problem: PlacementProblem, bound_s: float) -> Grid:
        """The coarsest that shortens no step by more than :data:`ROUNDING`, given what one takes at least."""
        return cls(ROUNDING * bound_s / (4 * problem.size + 1))

    def ticks(self, seconds: float) -> int:
        """Rounded down; 0 for what is impossible anyway, which no solution contains."""
        if not math.isfinite(seconds):
            return 0
        return math.floor(seconds / self.tick_s + 1e-9)


def lower_bound_s(problem: PlacementProblem) -> float:
    """Seconds that no placement beats: the longest chain of operators, or all work spread evenly."""
    forward, backward = problem.forward_s.min(axis=1), problem.backward_s.min(axis=1)
    ahead, finish = forward.copy(), backward.copy()
    for reader in range(problem.size):
        before = (ahead[problem.tensors[t].producer] for t in problem.read[reader])
        ahead[reader] += max(before, default=0.0)
    for producer in reversed(range(problem.size)):
        tensors = (problem.tensors[t] for t in problem.made[producer])
        gradients = [finish[r] for t in tensors if t.gradient for r in t.readers]
        finish[producer] += max([ahead[producer], *gradients])
    work = (problem.forward_s + problem.backward_s + problem.update_s).min(axis=1).sum()
    return float(max(finish.max(initial=0.0), work / problem.devices.count))


class Program:
    """The program of one problem.

    Args:
        grid: see :class:`Grid`.
        most_s: a step known to be possible; nothing longer is looked for.
        capacity_bytes: (d,) the memory rule's right-hand side.
    """

    def __init__(
        self,
        problem: PlacementProblem,
        rules: Rules,
        grid: Grid,
        most_s: float,
        capacity_bytes: Sequence[float],
    ):
        from ortools.sat.python import cp_model

        self.cp: Any = cp_model
        self.problem, self.rules, self.grid = problem, rules, grid
        self.devices = range(problem.devices.count)
        self.most = grid.ticks(most_s) + 1
        self.capacity_bytes = tuple(float(c) for c in capacity_bytes)
        self.model: cp_model.CpModel = self.cp.CpModel()
        self.busy: dict[Any, list[Any]] = defaultdict(list)
        self.firsts: dict[tuple[int, int, bool], Any] = {}
        self.recipes: list[tuple[Any, Recipe]] = []
        self.zero, self.horizon = self.model.new_constant(0), self.model.new_constant(self.most)
        self._place()
        self._run()
        self._send()
        self._keep()
        if rules.lifetimes:
            Lifetimes(self)
        self._end()

    def time(self) -> Any:
        return self.model.new_int_var(0, self.most, "")

    def derive(self, variable: Any, recipe: Recipe) -> None:
        """How to complete a schedule by this variable; the recipe reads only what was derived before it."""
        self.recipes.append((variable, recipe))

    def _occupy(self, name: Any, start: Any, ticks: int, end: Any, present: Any) -> Any:
        """``present`` implies start + ticks == end; the interval queues with others of this name."""
        interval = self.model.new_optional_interval_var(start, ticks, end, present, "")
        self.busy[name].append(interval)
        return interval

    # -- constraints ------------------------------------------------------------------------------

    def _place(self) -> None:
        """One device for every operator, the same for what must lie together, and only where it may lie."""
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
        self.on: list[list[Any]] = [literals[unit] for unit in units.of]

    def _run(self) -> None:
        """An operator takes its device's time, forward and backward; what it starts after."""
        model, problem = self.model, self.problem
        self.start: dict[bool, list[Any]] = {}
        self.end: dict[bool, list[Any]] = {}
        for back, seconds in ((False, problem.forward_s), (True, problem.backward_s)):
            if back and not problem.training:
                break
            self.start[back] = [self.time() for _ in problem.names]
            self.end[back] = [self.time() for _ in problem.names]
            for o in range(problem.size):
                start, end = self.start[back][o], self.end[back][o]
                for d in self.devices:
                    self._occupy(d, start, self.grid.ticks(seconds[o, d]), end, self.on[o][d])
                model.add(end >= start + self.grid.ticks(seconds[o].min()))
        if problem.training:
            for o in range(problem.size):
                model.add(self.start[True][o] >= self.end[False][o])
        self.turn = [self.time() for _ in self.devices]
        for d in self.devices:
            self.derive(self.turn[d], self._last_of(self.end[False], d))
        if problem.training and self.rules.exclusive:
            for o in range(problem.size):
                for d in self.devices:
                    model.add(self.end[False][o] <= self.turn[d]).only_enforce_if(self.on[o][d])
                    model.add(self.start[True][o] >= self.turn[d]).only_enforce_if(self.on[o][d])

    def _send(self) -> None:
        """A tensor read elsewhere is sent there once, and its gradient back once, by that link's time."""
        self.message: dict[tuple[int, int, bool], tuple[Any, Any]] = {}
        self.sent: dict[tuple[int, int, int], Any] = {}
        for number, tensor in enumerate(self.problem.tensors):
            units = {self.unit[o] for o in (tensor.producer, *tensor.readers)}
            if not tensor.readers:
                continue
            self._precede(tensor.producer, tensor.readers, tensor.gradient)
            if len(units) > 1:
                for device in self.devices:
                    self._send_to(number, device)

    def _precede(self, producer: int, readers: Iterable[int], gradient: bool) -> None:
        for reader in readers:
            self.model.add(self.start[False][reader] >= self.end[False][producer])
            if gradient and self.problem.training:
                self.model.add(self.start[True][producer] >= self.end[True][reader])

    def _send_to(self, number: int, device: int) -> None:
        problem, model = self.problem, self.model
        tensor = problem.tensors[number]
        read = self._any([self.on[r][device] for r in tensor.readers])
        begins, ends = self.message[number, device, False] = (self.time(), self.time())
        made = self.end[False][tensor.producer]
        model.add(begins >= made)
        model.add(ends >= begins)
        self.derive(begins, lambda value: value(made))
        self.derive(ends, lambda value: value(begins))
        for reader in tensor.readers:
            model.add(self.start[False][reader] >= ends).only_enforce_if(self.on[reader][device])
        back = problem.training and tensor.gradient
        if back:
            returns, returned = self.message[number, device, True] = (self.time(), self.time())
            model.add(self.start[True][tensor.producer] >= returned)
            model.add(returned >= returns)
            here = [(self.end[True][r], self.on[r][device]) for r in tensor.readers]
            self.derive(returns, lambda value: max((value(e) for e, on in here if value(on)), default=0))
            self.derive(returned, lambda value: value(returns))
            for reader in tensor.readers:
                model.add(returns >= self.end[True][reader]).only_enforce_if(self.on[reader][device])
        for home in self.devices:
            if home == device:
                continue
            sent = self.sent[number, home, device] = self._both(self.on[tensor.producer][home], read)
            self._transmit(tensor.bytes, home, device, begins, ends, sent)
            if back:
                self._transmit(tensor.bytes, device, home, returns, returned, sent)

    def _transmit(self, size: int, source: int, target: int, start: Any, end: Any, sent: Any) -> None:
        devices = self.problem.devices
        ticks = self.grid.ticks(devices.transfer_s(size, source, target))
        for lane in devices.lanes_of(source, target):
            self._occupy(lane, start, ticks, end, sent)

    def _keep(self) -> None:
        """What is stored and kept on a device fits it, every variable counted once per device; (5-18).

        All of it is there at the moment between a device's forward and backward, so the judge's peak is
        never less: without ``Rules.balance`` and ``Rules.alpha`` the rule excludes nothing that fits.
        """
        problem, own = self.problem, lasting_bytes(self.problem, self.rules.alpha)
        tensors = kept_tensors(problem)
        unit = unit_bytes(problem, self.rules)
        units = [int(size // unit) for size in own]
        total = sum(units) + sum(int(tensor.bytes // unit) for tensor in tensors)
        for d, most in enumerate(most_units(problem, self.rules, self.capacity_bytes)):
            if most >= total:
                continue
            terms = [size * self.on[o][d] for o, size in enumerate(units)]
            for tensor in tensors:
                here = self._any([self.on[o][d] for o in tensor.kept_by])
                if tensor.stored:
                    here = self._both(here, self.on[tensor.producer][d].negated())
                terms.append(int(tensor.bytes // unit) * here)
            self.model.add(sum(terms) <= most)
        if problem.training and problem.update_peak_bytes is not None:
            self._step(problem.stored_bytes + problem.update_peak_bytes)

    def _step(self, sizes: NDArray[np.float64]) -> None:
        """What is stored fits a device beside what the optimizer's step takes, all its operators at once."""
        for d in self.devices:
            if self.capacity_bytes[d] < float(sizes.sum()):
                terms = [int(size // UNIT_BYTES) * self.on[o][d] for o, size in enumerate(sizes)]
                self.model.add(sum(terms) <= math.ceil(self.capacity_bytes[d] / UNIT_BYTES))

    def _end(self) -> None:
        """The step ends with the last task, or with the optimizer of the device that is last; minimized."""
        model, problem = self.model, self.problem
        self.total = self.time()
        last = self.end[problem.training]
        for o in range(problem.size):
            model.add(self.total >= last[o])
        self.last = [self.time() for _ in self.devices]
        for d in self.devices:
            self.derive(self.last[d], self._last_of(last, d))
        if self.rules.exclusive:
            for queue in self.busy.values():
                model.add_no_overlap(queue)
            for d in self.devices:
                self._work(d, last)
        self.derive(self.total, self._total_of(last))
        model.minimize(self.total)

    def _work(self, device: int, last: list[Any]) -> None:
        """The optimizer after the device's last backward; and all its work one after the other at least."""
        problem, grid = self.problem, self.grid
        update = sum(grid.ticks(s) * self.on[o][device] for o, s in enumerate(problem.update_s[:, device]))
        for o in range(problem.size):
            self.model.add(self.last[device] >= last[o]).only_enforce_if(self.on[o][device])
        self.model.add(self.total >= self.last[device] + update)
        seconds = zip(problem.forward_s[:, device], problem.backward_s[:, device], strict=True)
        work = sum((grid.ticks(f) + grid.ticks(b)) * self.on[o][device] for o, (f, b) in enumerate(seconds))
        self.model.add(self.last[device] >= work)

    def _last_of(self, times: Sequence[Any], device: int) -> Recipe:
        here = [(time, self.on[o][device]) for o, time in enumerate(times)]
        return lambda value: max((value(time) for time, on in here if value(on)), default=0)

    def _total_of(self, last: list[Any]) -> Recipe:
        def total(value: Callable[[Any], int]) -> int:
            ends = [value(end) for end in last]
            if self.rules.exclusive:
                for d in self.devices:
                    updates = self.problem.update_s[:, d]
                    update = sum(self.grid.ticks(s) for o, s in enumerate(updates) if value(self.on[o][d]))
                    ends.append(value(self.last[d]) + update)
            return max(ends)

        return total

    # -- afterwards -------------------------------------------------------------------------------

    def forbid(self, placement: Placement) -> None:
        """Exclude one placement, its orders included, and nothing else."""
        clause = [self.on[o][d].negated() for o, d in enumerate(placement.device)]
        for back, orders in ((False, placement.forward), (True, placement.backward_orders)):
            if back in self.start:
                clause += [self._first(a, b, back).negated() for order in orders for a, b in pairwise(order)]
        self.model.add_bool_or(clause)

    def demand(self, less_than_s: float) -> None:
        """Look for nothing slower than this."""
        self.model.add(self.total < self.grid.ticks(less_than_s))

    def _first(self, a: int, b: int, back: bool) -> Any:
        """Whether a comes before b when operators are ordered by their start, ties as in :meth:`decode`."""
        if (a, b, back) not in self.firsts:
            literal = self.firsts[a, b, back] = self.model.new_bool_var("")
            start, tie = self.start[back], (a < b) != back
            self.model.add(start[a] + (not tie) <= start[b]).only_enforce_if(literal)
            self.model.add(start[a] >= start[b] + tie).only_enforce_if(literal.negated())
        return self.firsts[a, b, back]

    def decode(self, value: Callable[[Any], int]) -> Placement:
        """Devices, and their operators by their start; ties as operators are listed, backward reversed."""
        device = tuple(
            next(d for d, literal in enumerate(literals) if value(literal)) for literals in self.on
        )

        def orders(back: bool) -> tuple[tuple[int, ...], ...]:
            starts = [value(start) for start in self.start[back]]
            ranked = sorted(range(len(device)), key=lambda o: (starts[o], -o if back else o))
            return tuple(tuple(o for o in ranked if device[o] == d) for d in self.devices)

        return Placement(device, orders(False), orders(True) if True in self.start else None)

    def copied(self, number: int, device: int) -> Any | None:
        """Whether a device receives a tensor; None where it cannot."""
        sources = [self.sent[key] for home in self.devices if (key := (number, home, device)) in self.sent]
        return self._any(sources) if sources else None

    # -- literals ---------------------------------------------------------------------------------

    def _any(self, literals: list[Any]) -> Any:
        unique = list({literal.index: literal for literal in literals}.values())
        if len(unique) == 1:
            return unique[0]
        result = self.model.new_bool_var("")
        self.model.add_bool_or([*unique, result.negated()])
        for literal in unique:
            self.model.add_implication(literal, result)
        self.derive(result, lambda value: int(any(value(literal) for literal in unique)))
        return result

    def _both(self, first: Any, second: Any) -> Any:
        result = self.model.new_bool_var("")
        self.model.add_implication(result, first)
        self.model.add_implication(result, second)
        self.model.add_bool_or([result, first.negated(), second.negated()])
        self.derive(result, lambda value: int(value(first) and value(second)))
        return result
