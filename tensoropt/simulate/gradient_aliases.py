"""Who holds the storage of a gradient: the backward of a sum hands the gradient it gets to both operands,
that of a concatenation hands on slices of it, and the storage lives until the last of them is used up.

Which gradients share one depends on the configuration (:class:`~tensoropt.profiling.facts.Facts`), and for
how
long each holds it on what is resharded, so both are looked up for each strategy. A shared storage counts with
one tensor: the one whose gradient is handed on, or, where a backward makes gradients in one storage, the
first of these. A gradient that is handed on to one tensor only just becomes that one's.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from math import prod

import numpy as np
from numpy.typing import NDArray

from tensoropt.costs.tables import leaves_model
from tensoropt.sharding.groups import Group
from tensoropt.simulate.candidates import Indices, Menu
from tensoropt.simulate.step_schedule import Course
from tensoropt.simulate.tensor_effects import Estate

Flags = NDArray[np.bool_]
Relation = tuple[str, tuple[str, ...]]
"""A result whose gradient these reads' gradients lie in; "" where they lie in a storage made for them."""


class Heirs:
    """The shared storages of gradients, of all strategies at once. Ends are moments' places in the course; -1
    where there is nothing.

    Args:
        choices: per group the configuration of each strategy.
        sent_back: (tensor, reader) -> whether the reader's gradient moves to where the tensor was found.
        home_left: tensor -> whether its gradient moves from there to its writer.
    """

    def __init__(
        self,
        menu: Menu,
        course: Course,
        choices: Mapping[str, Indices],
        sent_back: Callable[[str, Group], Flags],
        home_left: Callable[[str], Flags],
    ):
        self.menu, self.course, self.choices = menu, course, choices
        self.graph = menu.graph
        self.count = len(next(iter(choices.values()))) if choices else 1
        self.writer = {name: group for group in self.graph.groups for name in group.writes}
        self._sent_back, self._home_left = sent_back, home_left
        self._relations = self._all_relations()
        self._ends: dict[tuple[str, str, int], Indices] = {}
        self._held: dict[tuple[str, str], Indices] = {}
        self._left: dict[str, Indices] = {}
        self._common: dict[str, list[tuple[int, Indices]]] = {}
        self._handed: dict[str, Indices] = {}
        self._found = False

    def handed(self, group: Group) -> Indices:
        """Per strategy 1 where the gradient of something that a group writes outlasts its backward."""
        self._find()
        return self._handed.get(group.name, np.zeros(self.count, dtype=np.int64))

    def estates(
        self, group: Group, name: str, first: int
    ) -> tuple[tuple[int, ...], tuple[Indices, list[Estate]]]:
        """(further slots of a tensor that a group writes, counted from ``first``; per strategy the number of
        where its gradients lie, and these)."""
        self._find()
        readers = self.course.readers.get(name, ())
        held = [self._held.get((reader.name, name)) for reader in readers]
        common, left = self._common.get(name, []), self._left.get(name)
        handed = self._handed.get(group.name)
        columns = [
            *((column >= 0).astype(np.int64) for column in held if column is not None),
            *(column for _, column in common),
            *((left,) if left is not None else ()),
            *((handed,) if handed is not None else ()),
        ]
        if not columns:
            return (), (np.zeros(self.count, dtype=np.int64), [Estate()])
        _, firsts, which = np.unique(np.stack(columns), axis=1, return_index=True, return_inverse=True)
        storages = [*(column for _, column in common), *((left,) if left is not None else ())]
        ends = sorted({int(end) for column in storages for end in column[firsts] if end >= 0})
        slot = {end: first + number for number, end in enumerate(ends)} | {-1: -1}
        found = [
            Estate(
                tuple(column is not None and bool(column[row] >= 0) for column in held),
                tuple((number, slot[int(column[row])]) for number, column in common if column[row] >= 0),
                slot[int(left[row])] if left is not None else -1,
                bool(handed[row]) if handed is not None else False,
            )
            for row in firsts
        ]
        return tuple(ends), (which.reshape(-1), found)

    # -- relations --------------------------------------------------------------------------------

    def _all_relations(self) -> dict[str, dict[Relation, Flags]]:
        """Per group its relations, by the tensors' names, and the strategies in which there are these."""
        known: dict[Hashable, dict[Relation, Flags]] = {}
        found = {}
        for group in self.graph.groups:
            look = self.menu.look(group)
            if look not in known:
                known[look] = self._by_configuration(group)
            if not known[look]:
                continue
            names = {short: name for name, short in group.short_names.items()} | {"": ""}
            found[group.name] = {
                (names[of], tuple(names[member] for member in members)): flags[self.choices[group.name]]
                for (of, members), flags in known[look].items()
            }
        return found

    def _by_configuration(self, group: Group) -> dict[Relation, Flags]:
        """A group's relations by short names, and the configurations in which there are these."""
        written = {group.short_names[name] for name in group.writes}
        looks = self.menu.facts(group)
        found: dict[Relation, Flags] = {}
        for number, facts in enumerate(looks):
            members: dict[str, list[str]] = {}
            for read, of in facts.hands_on.items():
                members.setdefault(of, [] if of in written else [of]).append(read)
            for of, reads in members.items():
                relation = (of if of in written else "", tuple(reads))
                found.setdefault(relation, np.zeros(len(looks), dtype=bool))[number] = True
        return found

    # -- lives ------------------------------------------------------------------------------------

    def _find(self) -> None:
        """Go through the groups as backward does: who gets a gradient comes after who gives it."""
        if self._found or not self._relations:
            return
        self._found = True
        for group in reversed(self.graph.groups):
            incoming = {name: lies for name in group.writes if (lies := self._lies(name)) is not None}
            if group.name in self._relations or incoming:
                self._follow(group, incoming)

    def _lies(self, name: str) -> Indices | None:
        """The end of the shared storage in which the gradient lies that comes to a tensor's writer."""
        readers = self.course.readers.get(name, ())
        if len(readers) != 1 or (readers[0].name, name) not in self._held or leaves_model(self.graph, name):
            return None
        moved = self._sent_back(name, readers[0]) | self._home_left(name)
        return np.where(moved, -1, self._held[readers[0].name, name])

    def _follow(self, group: Group, incoming: Mapping[str, Indices]) -> None:
        """What becomes of the gradients that come to a group's backward, and of those it makes."""
        done = self.course.slot("backward", "compute", group.name)
        outlasts = np.zeros(self.count, dtype=bool)
        for end in incoming.values():
            outlasts |= end > done
        for (of, members), active in self._relations.get(group.name, {}).items():
            lies = incoming.get(of, np.full(self.count, -1))
            ends = lies
            if len(members) > 1:
                size = self._elements(of) if of else 0
                last = np.maximum.reduce([self._end(group, member, size) for member in members])
                ends = np.where(lies >= 0, lies, last)
                begun = np.where(active & (lies < 0), last, -1)
                if of:
                    self._left[of] = np.maximum(self._left.get(of, begun), begun)
                    outlasts |= begun >= 0
                else:
                    place = [r.name for r in self.course.readers[members[0]]].index(group.name)
                    self._common.setdefault(members[0], []).append((place, begun))
            ends = np.where(active, ends, -1)
            for member in members:
                at = group.name, member
                self._held[at] = np.maximum(self._held.get(at, ends), ends)
        self._handed[group.name] = outlasts.astype(np.int64)

    def _end(self, group: Group, name: str, size: int) -> Indices:
        """When a tensor that gets its gradient from a group lets go of its storage.

        Args:
            size: elements of the tensor whose gradient the storage was made for; 0 where it was for several.
        """
        at = group.name, name, size
        if at not in self._ends:
            self._ends[at] = self._find_end(group, name, size)
        return self._ends[at]

    def _find_end(self, group: Group, name: str, size: int) -> Indices:
        readers, at = self.course.readers[name], self.course.slot("backward", "read", group.name, name) + 1
        last, sent_back = at, self._sent_back(name, group)
        if len(readers) > 1 or leaves_model(self.graph, name):
            if len(readers) > 1 and readers[-1].name == group.name:  # the next one's sum is a new tensor
                last = self.course.slot("backward", "read", readers[-2].name, name) + 1
            return np.where(sent_back, at, last)
        writer = self.writer[name]
        done = np.full(self.count, self.course.slot("backward", "compute", writer.name))
        if self._elements(name) != size:  # nobody lets go of a part of it
            done += 1
        for (of, members), active in self._relations.get(writer.name, {}).items():
            if of == name:
                ends = [self._end(writer, member, size) for member in members]
                done = np.where(active, np.maximum.reduce(ends), done)
        home = self.course.slot("backward", "home", writer.name, name) + 1
        return np.where(sent_back, at, np.where(self._home_left(name), home, done))

    def _elements(self, name: str) -> int:
        return prod(self.graph.atoms.graph.tensors[name].shape)
