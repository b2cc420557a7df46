"""Placement and schedule as one integer program, solved by OR-tools' CP-SAT.

The variables: a device for every operator, a start for its forward and its backward, and for every tensor and
device the message that brings it there and the one that brings its gradient back. The constraints, each with
the method that adds it: one device per operator and what must lie together (:meth:`._place`); an operator
takes its device's time (:meth:`._run`); no operator starts before its inputs are there, over links of
different speeds (:meth:`._send`); every variable counts once per device it is on (:meth:`._keep`); the step
ends when the last task has ended (:meth:`._end`). These are NetSplit's, in which operators may run on one
device at the same time, with a memory rule of ours; ``Rules.exclusive`` adds what is missing: a device, and a
lane of a link, does one thing at a time, a device's backward comes after its forward, and the optimizer's
step after that. Without ``Rules.backward`` and with unlimited capacity they are Pesto's as NetSplit extends
them, (6-2)–(6-7).

With several micro-batches the program schedules only one; a step is no shorter than that, nor than the work
of all of them on any device or lane. How they fill and drain the devices is left to the simulator.

Times are whole ticks, rounded down, so that a proven bound holds for the real problem; see :class:`.Grid`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensoropt.placement import Placement, PlacementProblem
from tensoropt.planners.placed.common.units import units_of
from tensoropt.planners.placed.exact.rules import (
    UNIT_BYTES,
    Rules,
    kept_tensors,
    lasting_bytes,
    most_units,
    unit_bytes,
)
from tensoropt.planners.placed.exact.variables import (
    Grid,
    MessageKey,
    OrderKey,
    Recipe,
    SendKey,
    Variables,
    limit_lifetimes,
)


class PlacementProgram(Variables):
    """The integer program of one placement problem; making it adds all constraints.

    Args:
        grid: see :class:`.Grid`.
        most_s: seconds of a step known to be possible; longer ones are not searched.
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
        super().__init__(problem, grid, most_s, capacity_bytes)
        self.rules = rules
        self.backward = problem.training and rules.backward
        self.busy: dict[Any, list[Any]] = defaultdict(list)
        self.sending: dict[str, list[tuple[int, Any]]] = defaultdict(list)
        self.firsts: dict[OrderKey, Any] = {}
        self._place()
        self._run()
        self._send()
        self._keep()
        if rules.lifetimes:
            limit_lifetimes(self)
        self._end()

    def _occupy(self, name: Any, start: Any, ticks: int, end: Any, present: Any) -> None:
        """Add that ``present`` implies start + ticks == end; the interval queues with others of this name."""
        if not self.rules.exclusive:  # nothing queues, and an interval would only burden the solver
            self.model.add(end == start + ticks).only_enforce_if(present)
            return
        interval = self.model.new_optional_interval_var(start, ticks, end, present, "")
        self.busy[name].append(interval)

    # -- constraints ------------------------------------------------------------------------------

    def _place(self) -> None:
        """Add one device for every operator, the same for what must lie together, and only where it may
        lie."""
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
        """Add that an operator takes its device's time, forward and backward, and follows what it depends
        on.
        """
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
        for d in self.devices:
            self.derive(self.turn[d], self._last_of(self.end[False], d))
        if self.backward and self.rules.exclusive:
            for o in range(problem.size):
                for d in self.devices:
                    model.add(self.end[False][o] <= self.turn[d]).only_enforce_if(self.on[o][d])
                    model.add(self.start[True][o] >= self.turn[d]).only_enforce_if(self.on[o][d])

    def _send(self) -> None:
        """Add that a tensor read elsewhere is sent there once, and its gradient back once, in that link's
        time."""
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
            if gradient and self.backward:
                self.model.add(self.start[True][producer] >= self.end[True][reader])

    def _send_to(self, number: int, device: int) -> None:
        problem, model = self.problem, self.model
        tensor = problem.tensors[number]
        read = self.any_of([self.on[r][device] for r in tensor.readers])
        begins, ends = self.message[MessageKey(number, device, False)] = (self.time(), self.time())
        made = self.end[False][tensor.producer]
        model.add(begins >= made)
        model.add(ends >= begins)
        self.derive(begins, lambda value: value(made))
        self.derive(ends, lambda value: value(begins))
        for reader in tensor.readers:
            model.add(self.start[False][reader] >= ends).only_enforce_if(self.on[reader][device])
        back = self.backward and tensor.gradient
        if back:
            returns, returned = self.message[MessageKey(number, device, True)] = (self.time(), self.time())
            model.add(self.start[True][tensor.producer] >= returned)
            model.add(returned >= returns)
            made_there = [(self.end[True][r], self.on[r][device]) for r in tensor.readers]
            self.derive(
                returns, lambda value: max((value(e) for e, on in made_there if value(on)), default=0)
            )
            self.derive(returned, lambda value: value(returns))
            for reader in tensor.readers:
                model.add(returns >= self.end[True][reader]).only_enforce_if(self.on[reader][device])
        for source in self.devices:
            if source == device:
                continue
            sent = self.sent[SendKey(number, source, device)] = self.both(
                self.on[tensor.producer][source], read
            )
            # The message takes the time of the link that its literals choose; the lanes queue in _end.
            self._transmit(tensor.bytes, source, device, begins, ends, sent)
            if back:
                self._transmit(tensor.bytes, device, source, returns, returned, sent)

    def _transmit(self, size: int, source: int, target: int, start: Any, end: Any, sent: Any) -> None:
        devices = self.problem.devices
        ticks = self.grid.ticks(devices.transfer_s(size, source, target))
        for lane in devices.lanes_of(source, target):
            self._occupy(lane, start, ticks, end, sent)
            self.sending[lane].append((ticks, sent))

    def _keep(self) -> None:
        """Add that the stored and kept bytes of a device fit it, every variable counted once per device.

        All of it is there at the moment between a device's forward and backward, so the simulated peak is
        never less: without ``Rules.balance`` and ``Rules.alpha`` the rule excludes nothing that fits.
        """
        problem, own = self.problem, lasting_bytes(self.problem, self.rules.alpha)
        tensors = kept_tensors(problem)
        unit = unit_bytes(problem, self.rules)
        units = [int(size // unit) for size in own]
        total = sum(units) + sum(int(tensor.bytes // unit) for tensor in tensors)
        for d, most in enumerate(most_units(problem, self.rules, self.capacity_bytes)):
            # It cannot bind, so the solver need not see it.
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
        if problem.training and problem.update_peak_bytes is not None:
            self._step(problem.stored_bytes + problem.update_peak_bytes)

    def _step(self, sizes: NDArray[np.float64]) -> None:
        """Add that the stored bytes of a device fit it together with the temporaries of the optimizer's step,
        for all its operators at once.
        """
        for d in self.devices:
            if self.capacity_bytes[d] < float(sizes.sum()):
                terms = [int(size // UNIT_BYTES) * self.on[o][d] for o, size in enumerate(sizes)]
                self.model.add(sum(terms) <= math.ceil(self.capacity_bytes[d] / UNIT_BYTES))

    def _end(self) -> None:
        """Add that the step ends with the last task, or with the optimizer of the last device; this end is
        minimized."""
        model, problem = self.model, self.problem
        self.total = self.time()
        last = self.end[self.backward]
        for o in range(problem.size):
            model.add(self.total >= last[o])
        self.last = [self.time() for _ in self.devices]
        for d in self.devices:
            self.derive(self.last[d], self._last_of(last, d))
        if self.rules.exclusive:
            # NetSplit as published lacks this: operators may share a device in time.
            for queue in self.busy.values():
                model.add_no_overlap(queue)
            for d in self.devices:
                self._work(d, last)
            if problem.micro_batches > 1:
                self._work_of_lanes()
        self.derive(self.total, self._total_of(last))
        model.minimize(self.total)

    def _work(self, device: int, last: list[Any]) -> None:
        """Add the optimizer after the device's last backward, and a bound by all its work one after
        another."""
        problem, grid = self.problem, self.grid
        update = sum(grid.ticks(s) * self.on[o][device] for o, s in enumerate(problem.update_s[:, device]))
        for o in range(problem.size):
            self.model.add(self.last[device] >= last[o]).only_enforce_if(self.on[o][device])
        self.model.add(self.total >= self.last[device] + update)
        seconds = zip(problem.forward_s[:, device], problem.backward_s[:, device], strict=True)
        work = sum((grid.ticks(f) + grid.ticks(b)) * self.on[o][device] for o, (f, b) in enumerate(seconds))
        # Implied by the intervals as well, and a bound that the relaxation sees.
        self.model.add(self.last[device] >= work)
        if problem.micro_batches > 1:
            self.model.add(self.total >= problem.micro_batches * work + update)

    def _work_of_lanes(self) -> None:
        """Add a bound by the messages of all micro-batches, one after another."""
        for sent in self.sending.values():
            work = sum(ticks * literal for ticks, literal in sent)
            self.model.add(self.total >= self.problem.micro_batches * work)

    def _last_of(self, times: Sequence[Any], device: int) -> Recipe:
        pairs = [(time, self.on[o][device]) for o, time in enumerate(times)]
        return lambda value: max((value(time) for time, on in pairs if value(on)), default=0)

    def _total_of(self, last: list[Any]) -> Recipe:
        count = self.problem.micro_batches

        def total(value: Callable[[Any], int]) -> int:
            ends = [value(end) for end in last]
            if self.rules.exclusive:
                for d in self.devices:
                    updates = self.problem.update_s[:, d]
                    update = sum(self.grid.ticks(s) for o, s in enumerate(updates) if value(self.on[o][d]))
                    ends.append(value(self.last[d]) + update)
                    if count > 1:
                        ends.append(count * self._ticks_on(d, value) + update)
                if count > 1:
                    sending = self.sending.values()
                    ends += [count * sum(t for t, on in sent if value(on)) for sent in sending]
            return max(ends)

        return total

    def _ticks_on(self, device: int, value: Callable[[Any], int]) -> int:
        """Return the ticks for which a device computes, forward and backward, for one micro-batch."""
        problem = self.problem
        seconds = zip(problem.forward_s[:, device], problem.backward_s[:, device], strict=True)
        return sum(
            self.grid.ticks(forward) + self.grid.ticks(backward)
            for on, (forward, backward) in zip(self.on, seconds, strict=True)
            if value(on[device])
        )

    # -- afterwards -------------------------------------------------------------------------------

    def forbid(self, placement: Placement) -> None:
        """Exclude one placement, its orders included, and nothing else."""
        # At least one operator lies elsewhere, or two neighbours in an order have changed places.
        clause = [self.on[o][d].negated() for o, d in enumerate(placement.device)]
        for back, orders in ((False, placement.forward), (True, placement.backward_orders)):
            if back in self.start:
                clause += [self._first(a, b, back).negated() for order in orders for a, b in pairwise(order)]
        self.model.add_bool_or(clause)

    def demand(self, less_than_s: float) -> None:
        """Restrict the search to steps shorter than ``less_than_s``."""
        self.model.add(self.total < self.grid.ticks(less_than_s))

    def _first(self, a: int, b: int, back: bool) -> Any:
        """Return the literal that a comes before b when operators are ordered by their start, ties as in
        :meth:`decode`.
        """
        key = OrderKey(a, b, back)
        if key not in self.firsts:
            literal = self.firsts[key] = self.model.new_bool_var("")
            start, tie = self.start[back], (a < b) != back
            self.model.add(start[a] + (not tie) <= start[b]).only_enforce_if(literal)
            self.model.add(start[a] >= start[b] + tie).only_enforce_if(literal.negated())
        return self.firsts[key]

    def decode(self, value: Callable[[Any], int]) -> Placement:
        """Return the devices and their operators ordered by start; ties in the order of the operators,
        reversed for backward."""
        device = tuple(
            next(d for d, literal in enumerate(literals) if value(literal)) for literals in self.on
        )

        def orders(back: bool) -> tuple[tuple[int, ...], ...]:
            starts = [value(start) for start in self.start[back]]
            ranked = sorted(range(len(device)), key=lambda o: (starts[o], -o if back else o))
            return tuple(tuple(o for o in ranked if device[o] == d) for d in self.devices)

        return Placement(device, orders(False), orders(True) if True in self.start else None)
