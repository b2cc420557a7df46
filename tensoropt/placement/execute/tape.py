"""Backward, one placed operator at a time.

Every operator runs under autograd on its own: what it reads passes through :class:`_Entry`, whose backward
hands the gradient to the tape instead of to the maker of the value. An operator's backward is then a separate
call, made when the plan says. In between, only what autograd saved and the gradients that wait on the tape
are alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from tensoropt.engine.deferred import DeferredStep
from tensoropt.placement.graph import Value

Place = tuple[Value, int]
"""A value as it is on a device."""


class _Entry(torch.autograd.Function):
    """The function through which a value enters an operator; it keeps nothing."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, value: torch.Tensor, tape: Any, place: Place) -> torch.Tensor:
        ctx.tape, ctx.place = tape, place
        # A function that returns its input as it is would hand out the input itself. A view costs no memory.
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        tape = ctx.tape()  # a tape holds its operators' graphs, so they must not hold it
        if tape is not None:
            tape.add(ctx.place, gradient)
        return None, None, None, None


class _Made(torch.autograd.Function):
    """The function that joins what an operator made under one root, whose backward takes the gradients off
    the tape and releases them: autograd then frees each as soon as it is used up."""

    @staticmethod
    def forward(ctx: Any, tape: Any, places: tuple[Place, ...], *made: torch.Tensor) -> torch.Tensor:
        ctx.tape, ctx.places = tape, places
        # An empty root: the gradients come from the tape, not from above.
        return made[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:  # type: ignore[override]
        tape = ctx.tape()
        return None, None, *(tape.take(place) for place in ctx.places)


class Tape:
    """The graphs and gradients of one micro-batch, from forward to backward."""

    def __init__(self, anchor: torch.Tensor):
        self.anchor = anchor
        self._roots: dict[int, tuple[tuple[Place, ...], torch.Tensor]] = {}
        self._gradients: dict[Place, torch.Tensor] = {}
        self._owned: set[Place] = set()

    def enter(self, place: Place, value: torch.Tensor) -> torch.Tensor:
        """Return a value as an operator reads it."""
        # Values come without history, and autograd skips functions without any input that requires a
        # gradient: the anchor does.
        return _Entry.apply(self.anchor, value, weakref.ref(self), place)

    def record(self, operator: int, made: Sequence[tuple[Place, torch.Tensor]]) -> None:
        """Record what an operator has made; called where gradients are enabled."""
        grown = [(place, value) for place, value in made if value.requires_grad]
        if grown:
            places = tuple(place for place, _ in grown)
            root = _Made.apply(weakref.ref(self), places, *(value for _, value in grown))
            self._roots[operator] = (places, root)

    def add(self, place: Place, gradient: torch.Tensor) -> None:
        """Add a reader's share of a gradient. The first share is taken as the sum; it may belong to something
        else, too, so a second one makes a sum that is the tape's own."""
        if place not in self._gradients:
            self._gradients[place] = gradient
        elif place in self._owned:
            self._gradients[place].add_(gradient)
        else:
            self._gradients[place] = self._gradients[place] + gradient
            self._owned.add(place)

    def take(self, place: Place) -> torch.Tensor | None:
        """Return the sum of all shares, and release it; None if no reader had one."""
        self._owned.discard(place)
        return self._gradients.pop(place, None)

    def backward(self, operator: int) -> None:
        """Run an operator's backward with the gradients of what it made, all of which are there."""
        places, root = self._roots.pop(operator, ((), None))
        # Without any gradient, nothing that this operator read can have one.
        if root is not None and any(place in self._gradients for place in places):
            torch.autograd.backward(root, torch.ones_like(root))


class TapedStep(DeferredStep):
    """A step from forward to backward: a tape for each micro-batch."""

    def __init__(self, tapes: Sequence[Tape]):
        super().__init__()
        self.tapes = list(tapes)
