"""What becomes of an activation in a step: made, moved home, copied for readers, kept, let go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tensoropt.costs.tables import leaves_model
from tensoropt.plan.pieces import (
    FORWARD_END,
    GRADIENT,
    HOME,
    HOME_AGAIN,
    HOME_BACK,
    MADE,
    MADE_AGAIN,
    OUTPUT,
    OUTPUT_BACK,
    READ,
    READ_AGAIN,
    READ_BACK,
    USED,
    USED_AGAIN,
    USED_BACK,
    Effect,
    Piece,
    PieceMaker,
    Reading,
    reader_slot,
)
from tensoropt.sharding.placement import Layout
from tensoropt.sharding.resharding import Step
from tensoropt.sharding.strategy import output_layout


class _Pass(NamedTuple):
    """One of the two forwards of a region, or the only one: the slots a tensor passes in it."""

    again: bool
    made: int
    home: int
    read: int
    used: int


_FIRST = _Pass(False, MADE, HOME, READ, USED)
_SECOND = _Pass(True, MADE_AGAIN, HOME_AGAIN, READ_AGAIN, USED_AGAIN)


class TensorPieces(PieceMaker):
    """Works out what becomes of activations on one mesh."""

    def tensor(
        self,
        name: str,
        write: Reading,
        home: Layout | None,
        reads: Sequence[Reading],
        inside: Sequence[bool] = (),
        handed: bool = False,
    ) -> Piece:
        """An activation: written so, found by its readers at ``home`` (or as written), read so.

        Args:
            inside: per reader whether it lies in its producer's region.
            handed: its gradient lies in another tensor's, unless it is resharded.
        """
        source = write.layout if home is None else home
        inside = inside or [False] * len(reads)
        effects = self._passed(name, write, source, reads, inside, _FIRST)
        if leaves_model(self.graph, name):
            out = self.steps(name, source, output_layout(source))[0]
            effects.append(self.moved(OUTPUT, name, out, 0))
        if any(read.again for read in reads) or write.again:
            effects += self._passed(name, write, source, reads, inside, _SECOND)
        if self.learns(name):
            effects += self._tensor_backward(name, write, source, reads, handed)
        return Piece(tuple(effects))

    def _passed(
        self,
        name: str,
        write: Reading,
        source: Layout,
        reads: Sequence[Reading],
        inside: Sequence[bool],
        at: _Pass,
    ) -> list[Effect]:
        """A tensor in the first forward, or in the second one of recomputed regions.

        In the first a recomputed region keeps nothing but what enters it, as its source has it; in the
        second it makes its inside again and keeps what backward needs.
        """
        found = []
        makes, keeps = write.again or not at.again, write.kept and write.again == at.again
        moves = self.steps(name, write.layout, source)[0] if makes else ()
        if moves:
            made = 0 if keeps else self.bytes(name, write.layout)
            found.append(self.moved(at.home, name, moves, made + self.resharding(moves, name)))
        present, keepers = [], []
        for number, read in enumerate(reads):
            needed = read.kept and read.again == at.again and self.training
            steps = self.steps(name, source, read.layout)[0]
            if at.again and not read.again:
                continue
            if steps:
                found += self._copy(name, number, read, steps, at, needed)
            if inside[number] or not at.again:
                present.append(number)
                enters = read.again and not inside[number]
                if enters or (needed and not steps):
                    keepers.append(number)
        if makes and (moves or not keeps):
            size, begin = self.bytes(name, source), at.home if moves else at.made
            stays = not at.again and (leaves_model(self.graph, name) or not reads)
            moved = bool(present) and bool(self.steps(name, source, reads[present[-1]].layout)[0])
            found += self._storage(name, size, begin, present, keepers, stays, moved, at)
        return found

    def _copy(
        self, name: str, number: int, read: Reading, steps: Sequence[Step], at: _Pass, needed: bool
    ) -> list[Effect]:
        """A reader's own copy: made for it, and kept where its backward needs it."""
        size = self.bytes(name, read.layout)
        found = [
            self.moved(reader_slot(number, at.read), name, steps, self.resharding(steps, name)),
            Effect(reader_slot(number, at.read), later=True, transient=size),
        ]
        if needed:
            found.append(Effect(reader_slot(number, at.used), kept=size, transient=-size))
            found.append(Effect(reader_slot(number, USED_BACK), later=True, kept=-size))
        else:
            found.append(Effect(reader_slot(number, at.used), later=True, transient=-size))
        return found

    def _storage(
        self,
        name: str,
        size: int,
        begin: int,
        readers: Sequence[int],
        keepers: Sequence[int],
        stays: bool,
        moved: bool,
        at: _Pass,
    ) -> list[Effect]:
        """A storage that readers find: alive until the last one, or kept from the first that needs it.

        Args:
            stays: nobody lets go of it before forward is over.
            moved: the last reader reads a copy.
        """
        found = [Effect(begin, later=True, transient=size)]
        if keepers:
            found.append(Effect(reader_slot(keepers[0], at.used), kept=size, transient=-size))
            found.append(Effect(reader_slot(keepers[0], USED_BACK), later=True, kept=-size))
        elif stays and self.training and name in self.graph.atoms.graph.mutations.values():
            # It takes the place of the buffer's last value, which its group's backward needs.
            found.append(Effect(GRADIENT, later=True, transient=-size))
        elif stays:
            found.append(Effect(FORWARD_END, transient=-size))
        elif readers:
            found.append(
                Effect(reader_slot(readers[-1], at.read if moved else at.used), later=True, transient=-size)
            )
        else:  # the second forward's result, which nobody in the region reads
            found.append(Effect(begin, later=True, transient=-size))
        return found

    def _tensor_backward(
        self, name: str, write: Reading, source: Layout, reads: Sequence[Reading], handed: bool
    ) -> list[Effect]:
        """Readers' gradients go to where the tensor was found, add up there, and go to its writer."""
        found, size = [], self.bytes(name, source)
        if handed and not self.steps(name, source, reads[0].layout)[1]:
            reads = ()
        for number, read in enumerate(reads):
            steps, own = self.steps(name, source, read.layout)[1], self.bytes(name, read.layout)
            found.append(Effect(reader_slot(number, USED_BACK), later=True, transient=own))
            if steps:
                spot = self.resharding(steps, name)
                found.append(self.moved(reader_slot(number, READ_BACK), name, steps, spot))
            adds = size if number == len(reads) - 1 else 0
            found.append(Effect(reader_slot(number, READ_BACK), later=True, transient=adds - own))
        back, given = self.steps(name, write.layout, source)[1], size
        if back:
            found.append(self.moved(HOME_BACK, name, back, self.resharding(back, name)))
        if back and reads:
            given = self.bytes(name, write.layout)
            found.append(Effect(HOME_BACK, later=True, transient=given - size))
        if reads:
            found.append(Effect(GRADIENT, transient=-given))
        if leaves_model(self.graph, name):
            steps = self.steps(name, source, output_layout(source))[1]
            found.append(self.moved(OUTPUT_BACK, name, steps, 0))
        return found
