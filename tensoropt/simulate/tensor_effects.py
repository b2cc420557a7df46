"""What becomes of an activation in a step: made, moved home, copied for readers, kept, let go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from tensoropt.costs.tables import leaves_model
from tensoropt.sharding.placement import Layout
from tensoropt.sharding.strategy import output_layout
from tensoropt.simulate.effects import (
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
    SOURCE,
    USED,
    USED_AGAIN,
    USED_BACK,
    Effect,
    Piece,
    PieceMaker,
    Reading,
    User,
    reader_slot,
)


class _Pass(NamedTuple):
    """One of the two forwards of a region, or the only one: the slots a tensor passes in it."""

    again: bool
    made: int
    home: int
    read: int
    used: int


_FIRST = _Pass(False, MADE, HOME, READ, USED)
_SECOND = _Pass(True, MADE_AGAIN, HOME_AGAIN, READ_AGAIN, USED_AGAIN)


class Estate(NamedTuple):
    """Where the gradients of a tensor lie, and for how long (:mod:`tensoropt.simulate.gradient_aliases`).

    Attributes:
        lodged: per reader whether the gradient it gives lies in a storage that is counted elsewhere, or in
            ``common``.
        common: (reader whose gradient lies in one storage with others of its own making, slot at which that
            is let go of).
        left: slot at which the whole gradient's storage is let go of by those to whom the tensor's group
            hands it on; -1 where nobody gets it.
        outlasts: it is there all through its group's backward.
    """

    lodged: tuple[bool, ...] = ()
    common: tuple[tuple[int, int], ...] = ()
    left: int = -1
    outlasts: bool = False


_ITS_OWN = Estate()


class TensorPieces(PieceMaker):
    """Works out what becomes of activations on one mesh."""

    def tensor(
        self,
        name: str,
        write: Reading,
        home: Layout | None,
        reads: Sequence[Reading],
        inside: Sequence[bool] = (),
        estate: Estate = _ITS_OWN,
        lodgers: Sequence[User] = (),
        turns: Sequence[int] = (),
    ) -> Piece:
        """An activation: written so, found by its readers at ``home`` (or as written), read so.

        Args:
            inside: per reader whether it lies in its producer's region.
            estate: where its gradients lie.
            lodgers: who reads views of it.
            turns: per reader when it comes in forward, compared with lodgers.
        """
        source = write.layout if home is None else home
        inside, turns = inside or [False] * len(reads), turns or range(len(reads))
        users = []
        for number, read in enumerate(reads):
            moved = bool(self.steps(name, source, read.layout)[0])
            users.append(User(number, read.kept, read.again, inside[number], moved, turns[number]))
        effects = self._passed(name, write, source, reads, users, lodgers, _FIRST)
        if leaves_model(self.graph, name):
            out, back = self.steps(name, source, output_layout(source))
            effects.append(self.moved(OUTPUT, name, out, 0, back))
        if any(read.again for read in reads) or write.again:
            effects += self._passed(name, write, source, reads, users, lodgers, _SECOND)
        if self.learns(name):
            effects += self._tensor_backward(name, write, source, reads, estate)
        return Piece(tuple(effects))

    def _passed(
        self,
        name: str,
        write: Reading,
        source: Layout,
        reads: Sequence[Reading],
        users: Sequence[User],
        lodgers: Sequence[User],
        at: _Pass,
    ) -> list[Effect]:
        """A tensor in the first forward, or in the second one of recomputed regions.

        In the first a recomputed region keeps nothing but what enters it, as its source has it; in the
        second it makes its inside again and keeps what backward needs. A tensor that lies in another one's
        storage has none of its own before it moves.
        """
        found: list[Effect] = []
        lodgers = [user for user in lodgers if not at.again or (user.again and user.inside)]
        beside = [user for user in lodgers if user.lodges == SOURCE]
        present = []
        for user, read in zip(users, reads, strict=True):
            if at.again and not user.again:
                continue
            lodged = [other for other in lodgers if other.lodges == user.number]
            if user.moved:
                found += self._copy(name, source, read.layout, user, lodged, at)
            if user.inside or not at.again:
                present += [user] if user.moved else [user, *lodged]
        if not (write.again or not at.again):
            return found
        keeps = bool(write.lies_in) or (write.kept and write.again == at.again)
        size = self.bytes(name, write.layout) if write.extent is None else write.extent
        stays = not at.again and (leaves_model(self.graph, name) or not reads)
        moves, back = self.steps(name, write.layout, source)
        if moves:
            made = 0 if keeps or beside else size
            found.append(self.moved(at.home, name, moves, made + self.resharding(moves, name), back))
            if beside and not keeps:
                found += self._alive(name, size, at.made, beside, at)
            found += self._alive(name, self.bytes(name, source), at.home, present, at, stays=stays)
        elif not keeps:
            found += self._alive(name, size, at.made, [*present, *beside], at, stays=stays)
        return found

    def _copy(
        self, name: str, source: Layout, layout: Layout, user: User, lodged: Sequence[User], at: _Pass
    ) -> list[Effect]:
        """A reader's own copy: made for it, and kept where its backward needs it, or that of who reads a
        view of it."""
        (steps, back), begin = self.steps(name, source, layout), reader_slot(user.number, at.read)
        own = replace(user, moved=False, inside=True)
        moved = self.moved(begin, name, steps, self.resharding(steps, name), back)
        return [moved, *self._alive(name, self.bytes(name, layout), begin, [own, *lodged], at)]

    def _alive(
        self, name: str, size: int, begin: int, users: Sequence[User], at: _Pass, *, stays: bool = False
    ) -> list[Effect]:
        """A storage that users find: alive until the last one, or kept from the first that needs it.

        Args:
            stays: nobody lets go of it before forward is over.
        """
        found = [Effect(begin, later=True, transient=size)]
        stays = stays or any(user.stays for user in users)
        users = sorted((user for user in users if not user.stays), key=lambda user: user.turn)
        keeper = next((user for user in users if self._keeps(user, at)), None)
        if keeper is not None:
            found.append(Effect(reader_slot(keeper.number, at.used), kept=size, transient=-size))
            found.append(Effect(reader_slot(keeper.number, USED_BACK), later=True, kept=-size))
        elif stays and self.training and name in self.graph.atoms.graph.mutations.values():
            # It takes the place of the buffer's last value, which its group's backward needs.
            found.append(Effect(GRADIENT, later=True, transient=-size))
        elif stays:
            found.append(Effect(FORWARD_END, transient=-size))
        elif users:
            last = reader_slot(users[-1].number, at.read if users[-1].moved else at.used)
            found.append(Effect(last, later=True, transient=-size))
        else:  # the second forward's result, which nobody in the region reads
            found.append(Effect(begin, later=True, transient=-size))
        return found

    def _keeps(self, user: User, at: _Pass) -> bool:
        """Whether a storage is kept for somebody: what enters a region, and what backward needs as it is."""
        enters = not at.again and user.again and not user.inside
        return enters or (user.kept and user.again == at.again and self.training and not user.moved)

    def _tensor_backward(
        self, name: str, write: Reading, source: Layout, reads: Sequence[Reading], estate: Estate
    ) -> list[Effect]:
        """Readers' gradients go to where the tensor was found, add up there, and go to its writer.

        Each sum is a new tensor, beside the two that are added: with any dispatch mode that watches, autograd
        adds nothing in place.
        """
        found, size, there = [], self.bytes(name, source), 0
        lodged = estate.lodged or (False,) * len(reads)
        for number, slot in estate.common:
            shared = self._gradient_bytes(name, reads[number])
            found.append(Effect(reader_slot(number, USED_BACK), later=True, transient=shared))
            found.append(Effect(slot, transient=-shared))
        for number, read in reversed(tuple(enumerate(reads))):
            (copied, steps), first = self.steps(name, source, read.layout), number == len(reads) - 1
            came = 0 if lodged[number] else self._gradient_bytes(name, read)
            found.append(Effect(reader_slot(number, USED_BACK), later=True, transient=came))
            spot = self.resharding(steps, name) if steps else 0
            if not first:
                spot = max(spot, 2 * size - came if steps else size)
            if steps:
                found.append(self.moved(reader_slot(number, READ_BACK), name, steps, spot, copied))
            elif spot:
                found.append(Effect(reader_slot(number, READ_BACK), spot=spot))
            after = came if first and not steps else size
            found.append(Effect(reader_slot(number, READ_BACK), later=True, transient=after - there - came))
            there = after
        moves, back = self.steps(name, write.layout, source)
        if back:
            found.append(self.moved(HOME_BACK, name, back, self.resharding(back, name), moves))
            if reads:
                given = self.bytes(name, write.layout)
                found.append(Effect(HOME_BACK, later=True, transient=given - there))
                there = given
        if estate.left >= 0:
            found.append(Effect(estate.left, transient=-there))
        else:
            found.append(Effect(GRADIENT, later=estate.outlasts, transient=-there))
        if leaves_model(self.graph, name):
            out, steps = self.steps(name, source, output_layout(source))
            found.append(self.moved(OUTPUT_BACK, name, steps, 0, out))
        return found

    def _gradient_bytes(self, name: str, read: Reading) -> int:
        """Of the storage in which the gradient that a reader gives lies."""
        return self.bytes(name, read.layout) if read.extent is None else read.extent
