"""The effects of an activation in a step: it is made, resharded, copied for readers, saved and freed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from tensoropt.costs.effects import (
    BACKWARD_END,
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
    READ_ANEW,
    READ_ANEW_AGAIN,
    READ_BACK,
    SAME_USED,
    USED,
    USED_AGAIN,
    USED_BACK,
    Allocation,
    Effect,
    Effects,
    Keeps,
    MoveEffects,
    Reading,
    When,
    allocations,
    kept_for,
    reader,
)
from tensoropt.costs.tables import leaves_model
from tensoropt.ops.layouts import Layout
from tensoropt.sharding.groups import is_one_reduction, products_beside, takes_over_hub
from tensoropt.sharding.strategy import output_layout

SOURCE = -1
"""Stands for the group that makes a tensor, in place of a reader's number."""


@dataclass(frozen=True, slots=True)
class StorageUser:
    """A reader of a tensor, or of a view of it, as a user of the tensor's storage.

    Attributes:
        number: its index among the readers of the tensor and its views.
        kept: whether its backward needs what it reads.
        again: whether it is recomputed.
        remade: whether what it reads is recomputed too.
        moved: whether it reads its own copy, in another layout.
        order: its index from 0 in forward's order of reads; equal for reads at one moment.
        stays: whether it is the caller of the model, which holds the storage until forward ends.
        through: for a reader of a view, the index of the reader that makes the view, or :data:`SOURCE`.
        anew: whether backward makes its copy again.
    """

    number: int
    kept: bool
    again: bool
    remade: bool
    moved: bool
    order: int
    stays: bool = False
    through: int = SOURCE
    anew: bool = False

    @property
    def twice(self) -> bool:
        """Whether recomputation serves it: it is recomputed, or its backward needs a recomputed tensor."""
        return self.again or (self.remade and self.kept)


class _Pass(NamedTuple):
    """The moments of a tensor in forward, or when its block is recomputed."""

    again: bool
    made: When
    hub: When
    read: When
    used: When


_FIRST = _Pass(False, MADE, HUB, READ, USED)
_SECOND = _Pass(True, MADE_AGAIN, HUB_AGAIN, READ_AGAIN, USED_AGAIN)


_ACTIVATION, _GRADIENT = "activation", "gradient"


def _gradient(key: str, size: int) -> Allocation:
    return Allocation(_GRADIENT, key, size)


def _replaced(when: When, before: Sequence[Allocation | None], made: Allocation) -> Effect:
    return Effect(when, after=True, begins=allocations(made), ends=allocations(*before))


class TensorEffects:
    """Computes the effects of activations on one mesh."""

    def __init__(self, moves: MoveEffects):
        self.moves, self.graph, self.training = moves, moves.graph, moves.training
        self.products = products_beside(self.graph)

    def tensor(
        self,
        name: str,
        write: Reading,
        hub: Layout | None,
        reads: Sequence[Reading],
        inside: Sequence[bool],
        view_users: Sequence[StorageUser],
        orders: Sequence[int],
        replaced: When,
        *,
        gathered_again: bool,
        same: bool,
    ) -> Effects:
        """Return the effects of an activation in a step.

        Args:
            write, reads: how a group writes the tensor, and how each reader reads it.
            hub: the layout in which a tensor with several readers is materialised, if any.
            inside: for each reader, whether it is in the producer's recomputable block.
            view_users: the readers of the tensor's views.
            orders: for each reader, its index from 0 in forward's order of reads; equal at one moment.
            replaced: the moment when a buffer's new value replaces the old one.
            gathered_again: whether backward makes its copy (materialised, or of the only reader) again.
            same: whether the last reader's gradient is also another tensor's, whose producer uses it first.
        """
        source = write.layout if hub is None else hub
        users = []
        for number, read in enumerate(reads):
            moved = bool(self.moves.steps(name, source, read.layout)[0])
            remade = inside[number] and write.again
            seen = read.kept, read.again, remade, moved, orders[number]
            users.append(StorageUser(number, *seen, anew=gathered_again and hub is None))
        keepers = self._gathering(users, in_hub=hub is not None) if gathered_again else []
        whole = self._made_whole(name, source, replaced)
        until = OUTPUT if whole else replaced
        first = (name, write, source, reads, users, view_users, _FIRST, until)
        effects = self._passed(*first, gathered_again=gathered_again)
        out, back = self.moves.output(name, source) if leaves_model(self.graph, name) else (None, None)
        if out is not None:
            effects.append(out)
            effects += whole
        if any(read.again for read in reads) or write.again:
            effects += self._passed(name, write, source, reads, users, view_users, _SECOND)
        if keepers:
            copied = (write.layout, source) if hub is not None else (source, reads[keepers[0].number].layout)
            effects += self._gathered_again(name, *copied, keepers)
        if self.moves.learns(name):
            effects += self._backward(name, write, source, reads, inside, same=same)
            if back is not None:
                effects.append(back)
        return Effects(tuple(effects))

    def _gathering(self, users: Sequence[StorageUser], *, in_hub: bool) -> list[StorageUser]:
        """Return the readers whose copies are made again in backward, in forward's order."""
        if in_hub:
            needing = [user for user in users if self._keeps(user, _FIRST)]
        else:
            needing = [user for user in users if user.moved and user.kept and not (user.again or user.remade)]
        return sorted(needing, key=lambda user: user.order) if self.training else []

    def _gathered_again(
        self, name: str, source: Layout, target: Layout, keepers: Sequence[StorageUser]
    ) -> list[Effect]:
        first, last = keepers[0], keepers[-1]
        begin, steps = reader(last.number, READ_ANEW_AGAIN if last.again else READ_ANEW), self.moves.steps
        forward = steps(name, source, target)[0]
        workspace = self.moves.resharding_bytes(forward, name)
        alive = allocations(Allocation(_ACTIVATION, "gathered again", self.moves.bytes(name, target)))
        return [
            self.moves.stepped(begin, name, forward, workspace_bytes=workspace),
            Effect(begin, after=True, begins=alive),
            Effect(reader(first.number, USED_BACK), after=True, ends=alive),
        ]

    def _passed(
        self,
        name: str,
        write: Reading,
        source: Layout,
        reads: Sequence[Reading],
        users: Sequence[StorageUser],
        view_users: Sequence[StorageUser],
        at: _Pass,
        replaced: When = FORWARD_END,
        *,
        gathered_again: bool = False,
    ) -> list[Effect]:
        """Return the effects of a tensor in forward, or in the recomputation of its block."""
        effects: list[Effect] = []
        # The recomputation makes only what runs again; other views still exist.
        view_users = [user for user in view_users if not at.again or (user.twice and user.remade)]
        views = [user for user in view_users if user.through == SOURCE]
        present = []
        for user, read in zip(users, reads, strict=True):
            if at.again and not user.twice:
                continue
            of_its_views = [other for other in view_users if other.through == user.number]
            if user.moved:
                effects += self._copy(name, source, read.layout, user, of_its_views, at)
            if user.remade or not at.again:
                # A copy that is gathered again keeps alive the tensor that it is made from.
                found = replace(user, moved=user.moved and not user.anew)
                present += [found] if user.moved else [user, *of_its_views]
        # In the recomputation, only a recomputed group makes the tensor again.
        if not (write.again or not at.again):
            return effects
        # Such a storage is counted elsewhere: with the tensor in which it lies, or with what the group keeps.
        keeps = bool(write.lies_in) or (write.kept and write.again == at.again)
        size = self.moves.bytes(name, write.layout) if write.extent is None else write.extent
        # The caller of the model holds its results until forward is over, and likewise the inputs it was
        # given.
        stays = not at.again and (leaves_model(self.graph, name) or not reads or write.given)
        moves = self.moves.steps(name, write.layout, source)[0]
        if moves:
            if gathered_again and not at.again:
                # If backward gathers it again, the tensor is saved as it was made, and the hub lasts for
                # forward only.
                views = [*views, *present]
                present = [replace(user, kept=False, again=False) for user in present]
            # The original is alive during the move; it is workspace if nothing else counts it.
            workspace = (0 if keeps or views else size) + self.moves.resharding_bytes(moves, name)
            effects.append(self.moves.moved(at.hub, name, write.layout, source, workspace_bytes=workspace))
            if views and not keeps:
                effects += self._alive(size, at.made, views, at)
            hub_bytes = self.moves.bytes(name, source)
            effects += self._alive(hub_bytes, at.hub, present, at, stays=stays, until=replaced)
        elif not keeps:
            effects += self._alive(size, at.made, [*present, *views], at, stays=stays, until=replaced)
        return effects

    def _made_whole(self, name: str, source: Layout, replaced: When) -> list[Effect]:
        """Return the effects of gathering a buffer's new value on every rank once forward is over."""
        whole, graph = output_layout(source), self.graph.atoms.graph
        steps = self.moves.steps(name, source, whole)[0]
        if not (self.training and steps and name in graph.mutations.values()):
            return []
        alive = allocations(Allocation(_ACTIVATION, "whole", self.moves.bytes(name, whole)))
        workspace = self.moves.resharding_bytes(steps, name)
        made = Effect(OUTPUT, after=True, begins=alive)
        return [Effect(OUTPUT, workspace_bytes=workspace), made, Effect(replaced, ends=alive)]

    def _copy(
        self,
        name: str,
        source: Layout,
        layout: Layout,
        user: StorageUser,
        of_its_views: Sequence[StorageUser],
        at: _Pass,
    ) -> list[Effect]:
        begin = reader(user.number, at.read)
        workspace = self.moves.resharding_bytes(self.moves.steps(name, source, layout)[0], name)
        # The reader is a plain user of its own copy: it has not moved from it, and the copy is made as often
        # as it takes the tensor.
        kept = user.kept and not user.anew
        own = replace(user, moved=False, remade=user.twice, kept=kept, anew=False)
        moved = self.moves.moved(begin, name, source, layout, workspace_bytes=workspace)
        return [moved, *self._alive(self.moves.bytes(name, layout), begin, [own, *of_its_views], at)]

    def _alive(
        self,
        size: int,
        begin: When,
        users: Sequence[StorageUser],
        at: _Pass,
        *,
        stays: bool = False,
        until: When = FORWARD_END,
    ) -> list[Effect]:
        """Return the memory effects of a storage, which is freed after its last user unless it is saved for
        backward.

        Args:
            stays: whether nothing frees it before ``until``.
        """
        storage = Allocation(_ACTIVATION, f"{begin.phase} {begin.what} {begin.number}", size)
        alive = allocations(storage)
        effects = [Effect(begin, after=True, begins=alive)]
        if until is BACKWARD_END:
            return [*effects, Effect(until, ends=alive)]
        stays = stays or any(user.stays for user in users)
        # Of users in the same part of a group, one with a copy is done with the original first.
        users = sorted(
            (user for user in users if not user.stays), key=lambda user: (user.order, not user.moved)
        )
        # The first user that saves the storage: from then on it is saved, whoever else reads it. It is freed
        # after this user's backward, which comes last of all.
        keeper = next((user for user in users if self._keeps(user, at)), None)
        if keeper is not None:
            kept = allocations(storage._replace(kept=True))
            effects.append(Effect(reader(keeper.number, at.used), begins=kept, ends=alive))
            effects.append(Effect(reader(keeper.number, USED_BACK), after=True, ends=kept))
        elif stays:
            effects.append(Effect(until, after=until is OUTPUT, ends=alive))
        elif users:
            # A reader of a copy releases the original as soon as the copy is made.
            last = reader(users[-1].number, at.read if users[-1].moved else at.used)
            effects.append(Effect(last, after=True, ends=alive))
        else:  # a recomputed result that nothing in the block reads
            effects.append(Effect(begin, after=True, ends=alive))
        return effects

    def _keeps(self, user: StorageUser, at: _Pass) -> bool:
        """Return whether a user needs a storage to be saved, for its backward or for its recomputation."""
        kept = user.kept and self.training
        # A recomputed tensor is not saved in the first forward: what backward needs of it is saved now.
        if at.again:
            return kept and user.twice and not user.moved
        keeps = kept_for(kept=kept, again=user.again, remade=user.remade, moved=user.moved)
        return keeps is Keeps.SOURCE

    def _backward(
        self,
        name: str,
        write: Reading,
        source: Layout,
        reads: Sequence[Reading],
        inside: Sequence[bool],
        *,
        same: bool,
    ) -> list[Effect]:
        """Return the effects of gradients: readers' gradients are resharded, summed, and resharded to the
        writer.

        Each sum is a new tensor: while a dispatch mode is active, autograd adds nothing in place.
        """
        overlapped = self._reduced_beside(name, write, source, reads, inside)
        effects, size = [], self.moves.bytes(name, source)
        # Backward visits the readers in reverse; the gradients so far wait as one sum.
        waiting: Allocation | None = None
        for number, read in reversed(tuple(enumerate(reads))):
            if overlapped and number == 0:
                given = _gradient("given", self.moves.bytes(name, write.layout))
                # The sum of other readers' gradients is added in place, and is released with the node that
                # adds it.
                effects += [overlapped, _replaced(overlapped.when, (waiting,), given)]
                waiting = given
                continue
            steps, first = self.moves.steps(name, source, read.layout)[1], number == len(reads) - 1
            came = _gradient(f"of {number}", self._gradient_bytes(name, read))
            begin = SAME_USED if same and first and not steps else reader(number, USED_BACK)
            effects.append(Effect(begin, after=True, begins=allocations(came)))
            workspace = self.moves.resharding_bytes(steps, name) if steps else 0
            if not first:
                # The new sum, in addition to its two operands: the incoming gradient is already alive, and
                # after a move it is in its new place.
                workspace = max(workspace, 2 * size - came.bytes if steps else size)
            back = reader(number, READ_BACK)
            if steps:
                effects.append(self.moves.moved(back, name, source, read.layout, workspace_bytes=workspace))
            elif workspace:
                effects.append(Effect(back, workspace_bytes=workspace))
            if first and not steps:
                waiting = came
            else:
                made = _gradient(f"sum {number}", size)
                effects.append(_replaced(back, (waiting, came), made))
                waiting = made
        steps = self.moves.steps(name, write.layout, source)[1]
        if steps and not overlapped:
            workspace = self.moves.resharding_bytes(steps, name)
            effects.append(self.moves.moved(HUB_BACK, name, write.layout, source, workspace_bytes=workspace))
            if reads:
                given = _gradient("given", self.moves.bytes(name, write.layout))
                effects.append(_replaced(HUB_BACK, (waiting,), given))
                waiting = given
        # From its group's backward on, the gradient is part of what that backward has alive.
        effects.append(Effect(GRADIENT, ends=allocations(waiting)))
        return effects

    def _reduced_beside(
        self, name: str, write: Reading, source: Layout, reads: Sequence[Reading], inside: Sequence[bool]
    ) -> Effect | None:
        product_s = reads[0].product_s if name in self.products else None
        if product_s is None:
            return None
        first, layout = reads[0], reads[0].layout
        if name in self.graph.hubs:
            own = self.moves.steps(name, source, first.layout)
            if not takes_over_hub(own, again=first.again, inside=inside[0]):
                return None
            layout = source
        steps = self.moves.steps(name, write.layout, layout)[1]
        if not is_one_reduction(steps, self.moves.mesh):
            return None
        # An all-reduce is in place.
        workspace = 0 if steps[0].kind == "all_reduce" else self.moves.resharding_bytes(steps, name)
        moved = self.moves.moved(reader(0, USED_BACK), name, write.layout, layout, workspace_bytes=workspace)
        return replace(moved, beside_work_s=product_s)

    def _gradient_bytes(self, name: str, read: Reading) -> int:
        # A slice of a concatenation's gradient counts by itself, one number that is expanded as it is.
        size = self.moves.bytes(name, read.layout)
        return size if read.extent is None else min(read.extent, size)
