"""Resharding: the collectives that convert one layout of a tensor into another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import takewhile
from math import prod
from typing import Literal

from tensoropt.ops.layouts import PARTIAL, PARTIAL_GRAD, REPLICATE, Atoms, Layout

StepKind = Literal["slice", "reduce_scatter", "all_to_all", "all_reduce", "all_gather", "mask", "pad"]
COLLECTIVES = ("reduce_scatter", "all_to_all", "all_reduce", "all_gather")


@dataclass(frozen=True, slots=True)
class ReshardingStep:
    """One collective or local operation, on a shard viewed so that each factor of a dim (atom) is a dim.

    Attributes:
        axes: the mesh axes over which it runs, flattened to one group of ranks; ascending.
        atom: the index of the atom that is sliced, scattered, gathered, padded or, by an all-to-all, made
            whole; -1 for none.
        target: for an all-to-all, the atom that becomes sharded.
        before, after: the largest shard's atom sizes before and after the step.
    """

    kind: StepKind
    axes: tuple[int, ...]
    atom: int
    target: int
    before: tuple[int, ...]
    after: tuple[int, ...]

    def payload(self, mesh: Sequence[int]) -> int:
        """Return the number of elements of an all-gather's output, of a reduce-scatter's input, or of the
        larger shard before or after another step. Uneven shards are padded to the largest."""
        parts = prod(mesh[axis] for axis in self.axes)
        if self.kind == "all_gather":
            return parts * prod(self.before)
        if self.kind == "reduce_scatter":
            return parts * prod(self.after)
        return max(prod(self.before), prod(self.after))


def lies_inside(shape: Sequence[int], atom: int) -> bool:
    """Return whether factors (atoms) above size 1 precede ``atom``, so that its shards are not contiguous."""
    return any(size > 1 for size in shape[: max(atom, 0)])


def permuted_atoms(atoms: Atoms, order: Sequence[int]) -> tuple[int, ...]:
    """Return the new index of each atom (factor of a dim) if the tensor's dims are permuted to ``order``."""
    starts, count = [], 0
    for dim in atoms:
        starts.append(count)
        count += len(dim)
    old = [starts[d] + i for d in order for i in range(len(atoms[d]))]
    return tuple(old.index(atom) for atom in range(count))


def permuted_steps(steps: Sequence[ReshardingStep], places: Sequence[int]) -> tuple[ReshardingStep, ...]:
    """Return the same steps for permuted dims, where atom (factor) ``i`` has the new index ``places[i]``."""

    def moved(atom: int) -> int:
        return places[atom] if atom >= 0 else atom

    def sizes(old: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(size for _, size in sorted(zip(places, old, strict=True)))

    return tuple(
        replace(s, atom=moved(s.atom), target=moved(s.target), before=sizes(s.before), after=sizes(s.after))
        for s in steps
    )


@cache
def forward_placements(layout: Layout) -> tuple[int, ...]:
    """Return each axis's placement of the tensor itself: an atom's number, REPLICATE or PARTIAL."""
    return tuple(REPLICATE if code == PARTIAL_GRAD else code for code in layout)


@cache
def gradient_placements(layout: Layout) -> tuple[int, ...]:
    """Return each axis's placement of the tensor's gradient: an atom's number, REPLICATE or PARTIAL."""
    swapped = {PARTIAL_GRAD: PARTIAL, PARTIAL: REPLICATE}
    return tuple(swapped.get(code, code) for code in layout)


class _StepFinder:
    """The search for the steps of one resharding, with the placements and shard sizes reached so far."""

    def __init__(
        self, atoms: Sequence[int], mesh: Sequence[int], current: Sequence[int], goal: Sequence[int]
    ):
        self.mesh = mesh
        self.current = list(current)
        self.goal = tuple(goal)
        self.global_sizes = tuple(atoms)
        self.sizes = self._sizes()
        self.goal_axes = {code: self.axes_on(self.goal, code) for code in set(self.goal) if code >= 0}
        self.steps: list[ReshardingStep] = []

    def _sizes(self) -> tuple[int, ...]:
        sizes = list(self.global_sizes)
        for axis, code in enumerate(self.current):
            if code >= 0:
                # Rounded up: shapes are those of the largest shard, which determines payloads and padding.
                sizes[code] = -(-sizes[code] // self.mesh[axis])
        return tuple(sizes)

    def axes_on(self, placements: Sequence[int], atom: int) -> list[int]:
        return [axis for axis, code in enumerate(placements) if code == atom]

    def leaving(self, atom: int) -> list[int]:
        """Return the axes that must stop sharding ``atom``: from the first that differs from the goal."""
        now, then = self.axes_on(self.current, atom), self.goal_axes.get(atom, [])
        alike = list(takewhile(lambda pair: pair[0] == pair[1], zip(now, then, strict=False)))
        return now[len(alike) :]

    def can_enter(self, axis: int) -> bool:
        """Return whether ``axis`` comes next, outermost first, of the axes that shall shard its goal atom."""
        now, then = self.axes_on(self.current, self.goal[axis]), self.goal_axes[self.goal[axis]]
        return then[: len(now) + 1] == [*now, axis]

    def step(self, kind: StepKind, axes: Sequence[int], code: int, atom: int = -1, target: int = -1) -> None:
        before = self.sizes
        for axis in axes:
            self.current[axis] = code
        self.sizes = self._sizes()
        self.steps.append(ReshardingStep(kind, tuple(axes), atom, target, before, self.sizes))

    def enter(self, source: int, kind: StepKind) -> None:
        """Add steps by which axes placed as ``source`` shard the atoms that are their goals, if possible."""
        moved = source in self.current
        while moved:
            moved = False
            for axis, code in enumerate(self.current):
                # An axis that has entered may allow the next inner one to enter, so all are tried again after
                # each.
                if code == source and self.goal[axis] >= 0 and self.can_enter(axis):
                    self.step(kind, (axis,), self.goal[axis], atom=self.goal[axis])
                    moved = True

    def exchangeable(self, atom: int, leaving: Sequence[int]) -> list[int]:
        """Return the innermost axes that one all-to-all can move from ``atom`` to another atom, or []."""
        for start in range(len(leaving)):
            run, target = list(leaving[start:]), self.goal[leaving[start]]
            # The whole run must move to one atom; otherwise the exchange would need a group for each.
            if target in (atom, REPLICATE, PARTIAL) or any(self.goal[axis] != target for axis in run):
                continue
            now, then = self.axes_on(self.current, target), self.goal_axes[target]
            # Exchanged pieces have one size and are not padded; uneven shards are gathered and sliced
            # instead.
            even = all(
                self.global_sizes[a] % prod(self.mesh[axis] for axis in self.axes_on(p, a)) == 0
                for a, p in ((atom, self.current), (target, self.goal))
            )
            if even and then[: len(now) + len(run)] == [*now, *run]:
                return run
        return []

    def exchange(self) -> None:
        moved = True
        # Most moves have no axis that goes from one atom to another.
        while moved and any(
            now != then >= 0 <= now for now, then in zip(self.current, self.goal, strict=True)
        ):
            moved = False
            for atom in sorted({code for code in self.current if code >= 0}):
                if run := self.exchangeable(atom, self.leaving(atom)):
                    target = self.goal[run[0]]
                    self.step("all_to_all", run, target, atom=atom, target=target)
                    moved = True

    def gather(self) -> None:
        for atom in sorted({code for code in self.current if code >= 0}):
            while axes := self.leaving(atom):
                # The innermost run of axes that move to the same kind of placement; axes that can still be
                # exchanged once these are removed are not gathered with them.
                padded = self.goal[axes[-1]] == PARTIAL
                run = [axes.pop()]
                while (
                    axes and (self.goal[axes[-1]] == PARTIAL) == padded and not self.exchangeable(atom, axes)
                ):
                    run.insert(0, axes.pop())
                if padded:
                    self.step("pad", run, PARTIAL, atom=atom)
                else:
                    self.step("all_gather", run, REPLICATE, atom=atom)
                self.exchange()

    def find(self) -> tuple[ReshardingStep, ...]:
        self.enter(REPLICATE, "slice")
        self.enter(PARTIAL, "reduce_scatter")
        self.exchange()
        # One all-reduce over all axes sends less than one for each, because the data does not get smaller for
        # the second one.
        reduced = [a for a, c in enumerate(self.current) if c == PARTIAL and self.goal[a] != PARTIAL]
        if reduced:
            self.step("all_reduce", reduced, REPLICATE)
        self.gather()
        self.enter(REPLICATE, "slice")
        masked = [a for a, c in enumerate(self.current) if c == REPLICATE and self.goal[a] == PARTIAL]
        if masked:
            self.step("mask", masked, PARTIAL)
        assert tuple(self.current) == self.goal, (self.current, self.goal)
        return tuple(self.steps)


@lru_cache(maxsize=1 << 16)
def resharding_steps(
    atoms: tuple[int, ...], mesh: tuple[int, ...], source: tuple[int, ...], target: tuple[int, ...]
) -> tuple[ReshardingStep, ...]:
    """Return the steps that reshard a tensor, or a gradient, from ``source`` to ``target``.

    Args:
        atoms: global sizes of the tensor's atoms (factors of its dims).
        mesh: axis sizes.
        source, target: for each axis the number of an atom, ``REPLICATE`` or ``PARTIAL``.
    """
    if source == target:
        return ()
    return _StepFinder(atoms, mesh, source, target).find()


def move_pattern(
    atoms: tuple[int, ...], mesh: tuple[int, ...], source: tuple[int, ...], target: tuple[int, ...]
) -> object:
    """Return a key that is equal for reshardings whose steps have equal kinds, axes and payloads."""
    numbers: dict[int, int] = {}
    parts: dict[int, int] = {}
    for axis, (before, after) in enumerate(zip(source, target, strict=True)):
        # An axis never shards an atom that is in neither of its own placements (``_StepFinder``), so these
        # are all the parts into which an atom can be cut on the way.
        for code in {before, after}:
            if code >= 0:
                parts[code] = parts.get(code, 1) * mesh[axis]
    for number, code in enumerate(sorted(parts)):
        if atoms[code] % parts[code]:
            return atoms, source, target
        numbers[code] = number
    get = numbers.get
    return tuple([get(code, code) for code in source]), tuple([get(code, code) for code in target])


def edge_steps(
    atoms: tuple[int, ...], mesh: tuple[int, ...], source: Layout, target: Layout
) -> tuple[tuple[ReshardingStep, ...], tuple[ReshardingStep, ...]]:
    """Return the (forward, backward) steps of a resharding between layouts."""
    forward = resharding_steps(atoms, mesh, forward_placements(source), forward_placements(target))
    backward = resharding_steps(atoms, mesh, gradient_placements(target), gradient_placements(source))
    return forward, backward


def resharding_elements(steps: Sequence[ReshardingStep], mesh: Sequence[int]) -> int:
    """Return the most elements that are allocated at once during a resharding, including its result.

    Shards along an inner atom, and uneven ones, are copied before the collective and again when reassembled.
    """
    peak = 0
    for i, s in enumerate(steps):
        parts, before, after = prod(mesh[a] for a in s.axes), prod(s.before), prod(s.after)
        if s.kind == "all_gather":
            uneven = parts * s.before[s.atom] != s.after[s.atom]
            made = parts * before + after * (uneven or lies_inside(s.before, s.atom))
        elif s.kind == "reduce_scatter":
            uneven = parts * s.after[s.atom] != s.before[s.atom]
            made = after + parts * after * (uneven or lies_inside(s.before, s.atom))
        elif s.kind == "all_to_all":
            made = before * (1 + lies_inside(s.before, s.target)) + after * lies_inside(s.after, s.atom)
        else:
            made = after
        # The first step reads the input of the whole resharding, which is not counted; later steps read a
        # buffer.
        peak = max(peak, made + (before if i else 0))
    return peak
