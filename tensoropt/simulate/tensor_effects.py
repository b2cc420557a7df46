"""What becomes of an activation in a step: made, materialised, copied for readers, kept, let go.

Its moves are the effects that the search's tables add up edge by edge
(:class:`~tensoropt.costs.move_effects.MoveEffects`). For how long its storages live depends on all its
readers together, which no table of pairs can tell; that is worked out here, once per distinct choice of them
all.

A tensor is followed by its storage: an edge whose forward moves nothing gives its reader the very storage of
its source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

from tensoropt.costs.effects import (
    FORWARD_END,
    GRADIENT,
    HUB,
    HUB_AGAIN,
    HUB_BACK,
    MADE,
    MADE_AGAIN,
    OUTPUT,
    READ,
    READ_AGAIN,
    READ_BACK,
    USED,
    USED_AGAIN,
    USED_BACK,
    Effect,
    Effects,
    Keeps,
    Reading,
    WeightProduct,
    When,
    kept_for,
    reader,
    storage_end,
)
from tensoropt.costs.move_effects import Both, MoveEffects
from tensoropt.costs.prices import Prices
from tensoropt.costs.tables import leaves_model
from tensoropt.ops.layouts import Layout
from tensoropt.sharding.beside_weights import is_one_reduction, products_beside, takes_over_hub
from tensoropt.sharding.reshard.steps import Step
from tensoropt.sharding.strategy import output_layout

SOURCE = -1
"""Stands for the tensor's own group, where a reader's number is asked for."""


@dataclass(frozen=True, slots=True)
class StorageUser:
    """Somebody who finds a storage.

    Attributes:
        number: among the tensor's readers and those of its views.
        kept: its backward needs what it reads.
        again: it is recomputed.
        inside: what it reads is made in its region.
        moved: it reads a copy of its own, made when it is read.
        order: when it comes in forward, compared with other users.
        stays: it is no group: the storage is let go of when forward is over.
        through: of one that reads a view: the reader that made it, in whose copy the view lies where it has
            one; :data:`SOURCE` where the tensor's own group made it.
    """

    number: int
    kept: bool
    again: bool
    inside: bool
    moved: bool
    order: int
    stays: bool = False
    through: int = SOURCE


class _Pass(NamedTuple):
    """One of the two forwards of a region, or the only one: the moments that a tensor passes in it."""

    again: bool
    made: When
    hub: When
    read: When
    used: When


_FIRST = _Pass(False, MADE, HUB, READ, USED)
_SECOND = _Pass(True, MADE_AGAIN, HUB_AGAIN, READ_AGAIN, USED_AGAIN)


class GradientStorage(NamedTuple):
    """Where the gradients of a tensor lie, and for how long (:mod:`tensoropt.simulate.gradient_aliases`).

    Attributes:
        elsewhere: per reader whether the gradient it gives lies in a storage that is counted elsewhere, or in
            ``common``.
        common: (reader whose gradient lies in one storage with others of its own making, number of the end at
            which that is let go of).
        end: number of the end at which the whole gradient's storage is let go of by those to whom the
            tensor's group hands it on; -1 where nobody gets it.
        outlasts: it is there all through its group's backward.
    """

    elsewhere: tuple[bool, ...] = ()
    common: tuple[tuple[int, int], ...] = ()
    end: int = -1
    outlasts: bool = False


_ITS_OWN = GradientStorage()


def _given_back(when: When, size: int) -> Effect:
    """The effect of letting go of so many bytes; of an end of backward's as that is over."""
    return Effect(when, after=when.phase == "backward" and when.what == "end", transient=-size)


class TensorEffects(MoveEffects):
    """Works out what becomes of activations on one mesh."""

    def __init__(self, prices: Prices):
        super().__init__(prices)
        self._steps: dict[object, Both] = {}
        self.products = products_beside(self.graph)

    def steps(self, name: str, source: Layout, target: Layout) -> Both:
        # Layers repeat, and the same few moves are asked for by all that share a tensor.
        key = self.graph.atoms.atom_sizes(name), self.learns(name), source, target
        if key not in self._steps:
            self._steps[key] = super().steps(name, source, target)
        return self._steps[key]

    def tensor(
        self,
        name: str,
        write: Reading,
        hub: Layout | None,
        reads: Sequence[Reading],
        inside: Sequence[bool] = (),
        gradients: GradientStorage = _ITS_OWN,
        view_users: Sequence[StorageUser] = (),
        orders: Sequence[int] = (),
        needed: When | None = None,
    ) -> Effects:
        """An activation: written so, found by its readers in its ``hub`` (or as written), read so.

        Args:
            inside: per reader whether it lies in its producer's region.
            gradients: where its gradients lie.
            view_users: who reads views of it.
            orders: per reader when it comes in forward, compared with users of views.
            needed: of a buffer's new value: until when the step needs the old one, whose place it takes then;
                None where that is counted elsewhere.
        """
        source = write.layout if hub is None else hub
        inside, orders = inside or [False] * len(reads), orders or range(len(reads))
        users = []
        for number, read in enumerate(reads):
            moved = bool(self.steps(name, source, read.layout)[0])
            seen = read.kept, read.again, inside[number], moved, orders[number]
            users.append(StorageUser(number, *seen))
        effects = self._passed(name, write, source, reads, users, view_users, _FIRST, needed)
        out, back = self.output(name, source) if leaves_model(self.graph, name) else (None, None)
        if out is not None:
            effects.append(out)
            effects += self._made_whole(name, source, needed)
        if any(read.again for read in reads) or write.again:
            effects += self._passed(name, write, source, reads, users, view_users, _SECOND)
        if self.learns(name):
            effects += self._backward(name, write, source, reads, inside, gradients)
            if back is not None:
                effects.append(back)
        return Effects(tuple(effects))

    def _passed(
        self,
        name: str,
        write: Reading,
        source: Layout,
        reads: Sequence[Reading],
        users: Sequence[StorageUser],
        view_users: Sequence[StorageUser],
        at: _Pass,
        needed: When | None = None,
    ) -> list[Effect]:
        """A tensor in the first forward, or in the second one of recomputed regions.

        In the first a recomputed region keeps nothing but what enters it, as its source has it; in the
        second it makes its inside again and keeps what backward needs. A tensor that lies in another one's
        storage has none of its own before it moves.
        """
        found: list[Effect] = []
        # The second forward makes only what lies inside the region; views from outside are still there.
        view_users = [user for user in view_users if not at.again or (user.again and user.inside)]
        beside = [user for user in view_users if user.through == SOURCE]
        present = []
        for user, read in zip(users, reads, strict=True):
            if at.again and not user.again:
                continue
            of_its_views = [other for other in view_users if other.through == user.number]
            if user.moved:
                found += self._copy(name, source, read.layout, user, of_its_views, at)
            if user.inside or not at.again:
                present += [user] if user.moved else [user, *of_its_views]
        # In the second forward only a recomputed group makes the tensor anew.
        if not (write.again or not at.again):
            return found
        # Such a storage is counted elsewhere: with the tensor that it lies in, or with what the group keeps.
        keeps = bool(write.lies_in) or (write.kept and write.again == at.again)
        size = self.bytes(name, write.layout) if write.extent is None else write.extent
        # The caller of the model holds its results until forward is over, and so it does what it was given.
        stays = not at.again and (leaves_model(self.graph, name) or not reads or write.given)
        moves = self.steps(name, write.layout, source)[0]
        # One that is made whole when all is computed takes the buffer's place as that.
        later = not at.again and self._whole_later(name, source)
        until = None if at.again or later else needed
        if moves:
            # The original lives during the move; it is workspace where nobody counts it otherwise.
            workspace = (0 if keeps or beside else size) + self.resharding_bytes(moves, name)
            found.append(self.moved(at.hub, name, write.layout, source, workspace_bytes=workspace))
            if beside and not keeps:
                found += self._alive(name, size, at.made, beside, at)
            found += self._alive(
                name, self.bytes(name, source), at.hub, present, at, stays=stays, until=until
            )
        elif not keeps:
            users = [*present, *beside]
            found += self._alive(name, size, at.made, users, at, stays=stays, until=until, later=later)
        return found

    def _made_whole(self, name: str, source: Layout, needed: When | None) -> list[Effect]:
        """Memory of a buffer's new value that is not made whole."""
        if not self._whole_later(name, source):
            return []
        whole = output_layout(source)
        size, steps = self.bytes(name, whole), self.steps(name, source, whole)[0]
        begin = Effect(OUTPUT, workspace_bytes=self.resharding_bytes(steps, name))
        return [begin, Effect(OUTPUT, after=True, transient=size), _given_back(needed or FORWARD_END, size)]

    def _whole_later(self, name: str, source: Layout) -> bool:
        """Whether a tensor is a buffer's new value that is still to be made whole."""
        mutated = self.training and name in self.graph.atoms.graph.mutations.values()
        return mutated and bool(self.steps(name, source, output_layout(source))[0])

    def _copy(
        self,
        name: str,
        source: Layout,
        layout: Layout,
        user: StorageUser,
        of_its_views: Sequence[StorageUser],
        at: _Pass,
    ) -> list[Effect]:
        """A reader's own copy: made for it, and kept where its backward needs it, or that of who reads a
        view of it."""
        begin = reader(user.number, at.read)
        workspace = self.resharding_bytes(self.steps(name, source, layout)[0], name)
        # Of its own copy the reader is a plain user: it has not moved from it, and the copy is made in its
        # region.
        own = replace(user, moved=False, inside=True)
        moved = self.moved(begin, name, source, layout, workspace_bytes=workspace)
        return [moved, *self._alive(name, self.bytes(name, layout), begin, [own, *of_its_views], at)]

    def _alive(
        self,
        name: str,
        size: int,
        begin: When,
        users: Sequence[StorageUser],
        at: _Pass,
        *,
        stays: bool = False,
        until: When | None = None,
        later: bool = False,
    ) -> list[Effect]:
        """A storage that users find: alive until the last one, or kept from the first that needs it.

        Args:
            stays: nobody lets go of it before forward is over.
            until: when it takes the place of a buffer, whoever else has it.
            later: a buffer's new value is made of it when all is computed.
        """
        found = [Effect(begin, after=True, transient=size)]
        if until is not None:
            return [*found, _given_back(until, size)]
        stays = stays or any(user.stays for user in users)
        users = sorted((user for user in users if not user.stays), key=lambda user: user.order)
        # The first keeper: from then on the storage is kept, whoever else reads it. It is given back after
        # the first keeper's backward, which comes last of all.
        keeper = next((user for user in users if self._keeps(user, at)), None)
        if keeper is not None:
            found.append(Effect(reader(keeper.number, at.used), kept=size, transient=-size))
            found.append(Effect(reader(keeper.number, USED_BACK), after=True, kept=-size))
        elif later:
            found.append(Effect(OUTPUT, after=True, transient=-size))
        elif stays:
            found.append(Effect(FORWARD_END, transient=-size))
        elif users:
            # Who reads a copy lets go of the original as soon as the copy is made.
            last = reader(users[-1].number, at.read if users[-1].moved else at.used)
            found.append(Effect(last, after=True, transient=-size))
        else:  # the second forward's result, which nobody in the region reads
            found.append(Effect(begin, after=True, transient=-size))
        return found

    def _keeps(self, user: StorageUser, at: _Pass) -> bool:
        """Whether a storage is kept for somebody: what enters a region, and what backward needs as it is."""
        kept = user.kept and self.training
        # Inside a region that runs again nothing "enters": what backward needs of it is kept now.
        if at.again:
            return kept and user.again and not user.moved
        keeps = kept_for(kept=kept, again=user.again, inside=user.inside, moved=user.moved)
        return keeps is Keeps.SOURCE

    def _backward(
        self,
        name: str,
        write: Reading,
        source: Layout,
        reads: Sequence[Reading],
        inside: Sequence[bool],
        gradients: GradientStorage,
    ) -> list[Effect]:
        """Readers' gradients go to where the tensor was found, add up there, and go to its writer.

        Each sum is a new tensor, beside the two that are added: with any dispatch mode that watches, autograd
        adds nothing in place.
        """
        beside = self._reduced_beside(name, write, source, reads, inside)
        found, size, there = [], self.bytes(name, source), 0
        elsewhere = gradients.elsewhere or (False,) * len(reads)
        for number, end in gradients.common:
            shared = self._gradient_bytes(name, reads[number])
            found.append(Effect(reader(number, USED_BACK), after=True, transient=shared))
            found.append(Effect(storage_end(end), transient=-shared))
        # Backward meets the readers in reverse; the gradients that came so far wait as one sum, ``there``.
        for number, read in reversed(tuple(enumerate(reads))):
            if beside and number == 0:
                given = self.bytes(name, write.layout)
                # What came of other readers is added in place, and goes with the node that adds it.
                found += [beside, Effect(beside.when, after=True, transient=given - there)]
                there = given
                continue
            steps, first = self.steps(name, source, read.layout)[1], number == len(reads) - 1
            came = 0 if elsewhere[number] else self._gradient_bytes(name, read)
            found.append(Effect(reader(number, USED_BACK), after=True, transient=came))
            workspace = self.resharding_bytes(steps, name) if steps else 0
            if not first:
                # The new sum beside its two operands: what came is alive already, and after a move in its new
                # place.
                workspace = max(workspace, 2 * size - came if steps else size)
            back = reader(number, READ_BACK)
            if steps:
                found.append(self.moved(back, name, source, read.layout, workspace_bytes=workspace))
            elif workspace:
                found.append(Effect(back, workspace_bytes=workspace))
            after = came if first and not steps else size
            found.append(Effect(back, after=True, transient=after - there - came))
            there = after
        steps = self.steps(name, write.layout, source)[1]
        if steps and not beside:
            workspace = self.resharding_bytes(steps, name)
            found.append(self.moved(HUB_BACK, name, write.layout, source, workspace_bytes=workspace))
            if reads:
                given = self.bytes(name, write.layout)
                found.append(Effect(HUB_BACK, after=True, transient=given - there))
                there = given
        if gradients.end >= 0:
            found.append(Effect(storage_end(gradients.end), transient=-there))
        else:
            # From its group's backward on the gradient is one of what that backward has alive, and counted
            # there; where it outlasts the backward, that peak leaves it out (``handed``), and it is counted
            # to the end.
            found.append(Effect(GRADIENT, after=gradients.outlasts, transient=-there))
        return found

    def _reduced_beside(
        self, name: str, write: Reading, source: Layout, reads: Sequence[Reading], inside: Sequence[bool]
    ) -> Effect | None:
        """The reduction of the whole gradient beside the product in the first reader's backward; None where
        it is reduced by itself, if at all (:mod:`tensoropt.sharding.beside_weights`)."""
        product = reads[0].product if name in self.products else None
        if product is None:
            return None
        first, found = reads[0], reads[0].layout
        if name in self.graph.hubs:
            own = self.steps(name, source, first.layout)
            if not takes_over_hub(own, again=first.again, inside=inside[0]):
                return None
            found = source
        steps = self.steps(name, write.layout, found)[1]
        if not is_one_reduction(steps, self.mesh):
            return None
        workspace = self._beside_bytes(name, found, steps, product)
        moved = self.moved(reader(0, USED_BACK), name, write.layout, found, workspace_bytes=workspace)
        return replace(moved, beside_work_s=product.seconds)

    def _beside_bytes(self, name: str, layout: Layout, steps: Sequence[Step], product: WeightProduct) -> int:
        """Bytes of a reduction that are alive beside what its group's backward has alive in any case."""
        made, size = self.resharding_bytes(steps, name), self.bytes(name, layout)
        if steps[0].kind == "all_reduce":
            # In place, once the gradient lies as the tensor does.
            made, copied = (made, True) if name in self.orders else (0, False)
        else:
            copied = made > prod(steps[0].after) * self.tensors[name].element_bytes
        if copied:
            # As the copy is made the weight's gradient is not there yet, and then the first one not any more.
            made -= min(size, product.bytes)
        return max(made - product.spare_bytes, 0)

    def _gradient_bytes(self, name: str, read: Reading) -> int:
        """Of the storage in which the gradient that a reader gives lies."""
        return self.bytes(name, read.layout) if read.extent is None else read.extent
