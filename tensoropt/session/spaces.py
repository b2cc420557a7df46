"""The search of all spaces of an exploration; a space is a mesh with a micro-batch count.

The simulated strategies of all spaces are reduced to one frontier, which prunes the searches that follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tensoropt.errors import InfeasibleError
from tensoropt.processes import cores, in_forks
from tensoropt.question.settings import Settings
from tensoropt.search import TOO_LARGE, Staircase, TrackedFrontier
from tensoropt.session import one_space
from tensoropt.session.simulations import Simulations
from tensoropt.sharding.constraints import ConstraintError
from tensoropt.types import Progress

_TRIFLE = 1e-3
"""The fraction by which a strategy must need less memory or time for its space to be worth a search; an
exploration may lose as much anyway."""

_TOGETHER = 8
"""The number of spaces that are searched at once in forked processes, without pruning by each other's
results. It is not the number of cores, on which the points of an exploration may not depend. Eight keep two
cores busy although one space takes ten times as long as another."""


@dataclass(eq=False)
class SpaceSearch:
    """The search of all spaces (a mesh with a micro-batch count each) of an exploration.

    Attributes:
        built: the mesh and the cost tables of each space.
        simulations: the simulated strategies of the same spaces, in the same order; the search adds to them.
        found: the spaces with strategies, by index.
        interrupted: the number of spaces that were left out because of Ctrl-C.
        refused: why a space has no strategy, by the space's index.
        every: all frontiers found, coarse ones included.
        outlines: the coarse frontiers that are found before a full search, by the space's index.
    """

    built: list[one_space.Built]
    settings: Settings
    simulations: Simulations
    progress: Progress
    found: dict[int, one_space.SearchedSpace] = field(default_factory=dict)
    interrupted: int = 0
    refused: dict[int, str] = field(default_factory=dict)
    every: list[one_space.Found] = field(default_factory=list)
    outlines: dict[int, TrackedFrontier] = field(default_factory=dict)

    def leave(self) -> None:
        """Mark all spaces as found, with cost tables but without a search."""
        for number in range(len(self.built)):
            self._add(number)

    def search(self) -> None:
        """Search all spaces, and simulate promising points.

        Raises:
            InfeasibleError, ConstraintError: no space has a strategy; the message says what to relax.
        """
        order = self._outlined() if self.settings.allows_gap else range(len(self.built))
        # If no gap is allowed, the search itself keeps all cores busy.
        together = _TOGETHER if self.settings.allows_gap else 1
        done = 0
        while done < len(order):
            # The first prunes all others, and forks have the kernels loaded that it used.
            numbers = order[done : done + (together if done else 1)]
            self._report(len(self.built) - len(order) + done, numbers)
            try:
                self._search(numbers)
            except KeyboardInterrupt:
                if not self.found:
                    raise
                self.interrupted = sum(number not in self.found for number in order)
                break
            done += len(numbers)
        if not self.found:
            raise self._nothing()
        points = sum(len(space.frontier or ()) for space in self.found.values())
        self.progress("search", len(self.built), len(self.built), f"{points} points")

    def add(self, built: one_space.Built) -> bool:
        """Search one more space if a coarse search there finds a strategy that beats all known ones by more
        than 0.1 %. Return whether it does."""
        number = len(self.built)
        self.built.append(built)
        before = self.simulations.frontier()
        self.simulations.add(*built)
        self._outline(number)
        if number not in self.outlines:
            return False
        outline = self.every[-1]
        if not self.settings.allows_gap:
            one_space.first_look(outline, self.simulations)
        self._report(number, [number])
        own = self.simulations.spaces[number].simulated[outline.numbers[outline.numbers >= 0]]
        memory, time_s = (1.0 + _TRIFLE) * own.T
        better = bool((time_s < Staircase(before.memory, before.time).bounds(memory)).any())
        if better:
            self._search([number])
        else:
            self._add(number, self.outlines[number])
        return better

    def simulate(self) -> None:
        """Simulate more points: those next to unbeaten ones or, if no gap is allowed, all."""
        if self.settings.allows_gap:
            for done, count in enumerate(one_space.neighbours_of_winners(self.every, self.simulations)):
                self.progress("simulate", done, done + 2, f"{count} neighbours of the best")
        else:
            for done, found in enumerate(self.every):
                self.progress("simulate", done, len(self.every), f"{len(found.frontier)} points")
                found.simulate(self.simulations, np.arange(len(found.frontier)))

    def _outlined(self) -> list[int]:
        for number in range(len(self.built)):
            self._report(0, [number])
            self._outline(number)
        best = self.simulations.frontier().origin[:, 0] if self.outlines else np.zeros(0)
        # The first results prune the other searches.
        return sorted(self.outlines, key=lambda number: (-int((best == number).sum()), number))

    def _outline(self, number: int) -> None:
        for found in self._each([number], outline=True):  # takes less than a fork
            self.outlines[number] = found.frontier

    def _search(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            if self._is_too_large(number):
                self._add(number, self.outlines[number])
        left = [number for number in numbers if not self._is_too_large(number)]
        for found in self._each(left, outline=False):
            self._add(found.space, found.frontier)

    def _each(self, numbers: Sequence[int], *, outline: bool) -> list[one_space.Found]:
        threads = max(1, cores() // max(len(numbers), 1))

        def alone(number: int) -> one_space.SpacePart:
            known = self.simulations.copy()
            return one_space.part_of(
                number, self.built[number], self.settings, known, threads, outline=outline
            )

        parts = in_forks(alone, numbers)
        for part in parts:
            self.simulations.spaces[part.number].done = part.simulated
            if part.refused:
                self.refused[part.number] = part.refused
        found = [part.found for part in parts if part.found is not None]
        self.every += found
        return found

    def _add(self, number: int, frontier: TrackedFrontier | None = None) -> None:
        self.found[number] = one_space.SearchedSpace(*self.built[number], frontier)

    def _is_too_large(self, number: int) -> bool:
        return number in self.outlines and TOO_LARGE in self.outlines[number].notes

    def _report(self, done: int, numbers: Sequence[int]) -> None:
        spaces = [(mesh.label, tables.mesh[0]) for mesh, tables in (self.built[n] for n in numbers)]
        words = ", ".join(f"mesh {label}, {count} micro-batches" for label, count in spaces)
        self.progress("search", done, len(self.built), words)
        if self.outlines and (draw := getattr(self.progress, "points", None)):
            best = self.simulations.frontier()
            draw(best.memory, best.time)

    @property
    def notes(self) -> tuple[str, ...]:
        """The reasons why spaces have no strategy, in words."""
        return tuple(dict.fromkeys(self.refused.values()))

    def _nothing(self) -> InfeasibleError | ConstraintError:
        said = "; ".join(self.notes)
        if self.settings.constraints is None:
            return InfeasibleError(
                f"{said}; if memory ran out, take a smaller batch, or predict without timing: run "
                "`tensoropt measure profiles --forget-failed`, then explore with --measure never"
            )
        return ConstraintError(f"{said}; take back or soften a constraint")
