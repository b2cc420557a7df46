"""The variables of a placement program, and the literals made of them.

A literal is a 0-1 variable of the solver or its negation. A variable that is derived from others has a
recipe, so that a known schedule can be completed to values of all variables, which the solver takes as a
hint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tensoropt.placement import PlacementProblem
from tensoropt.planners.placed.exact.grid import Grid

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

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
        sent: whether a tensor goes from a device to another.
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
