"""Users of a storage under another name: readers of views.

A group that only takes a part of its input (one step of a sequence, one of three projections) gives a view:
its readers then keep the whole storage from which it was cut, or the copy that was brought to it. Which
results are views depends on the configuration (:class:`~tensoropt.profiling.facts.Facts`), and whether a
reader of one finds it there depends on where it is put, so both are looked up for each strategy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from tensoropt.costs.move_effects import MoveEffects
from tensoropt.sharding.groups import Group
from tensoropt.simulate.candidates import Candidates
from tensoropt.simulate.readings import Readings
from tensoropt.simulate.step_schedule import Reader, StepSchedule
from tensoropt.simulate.tensor_effects import SOURCE, StorageUser
from tensoropt.types import Indices


@dataclass(frozen=True)
class ViewAlias:
    """A tensor that is a view of another tensor in some configurations.

    Attributes:
        maker: the group that writes it.
        through: the reader of the other tensor that makes it; :data:`SOURCE` if one group writes both.
        of: the other tensor's short name in that group.
        first: its own number among the tensor's readers, from which its readers are numbered onwards.
        leaves: whether it leaves the model.
        inner: the views of it.
    """

    name: str
    maker: Group
    through: int
    of: str
    first: int
    readers: tuple[Group, ...]
    leaves: bool
    inner: tuple[ViewAlias, ...]

    def with_inner(self) -> Iterator[ViewAlias]:
        """Yield the view, the views of it, and so on, depth first."""
        yield self
        for inner in self.inner:
            yield from inner.with_inner()


class ViewAliases:
    """The views of every tensor, and their readers."""

    def __init__(
        self, candidates: Candidates, schedule: StepSchedule, moves: MoveEffects, readings: Readings
    ):
        self.candidates, self.schedule, self.moves = candidates, schedule, moves
        self.readings = readings

    @cached_property
    def _views(self) -> Mapping[str, Sequence[tuple[Group, str]]]:
        """The groups that make views of each tensor, and the views."""
        return self.readings.known.once("views", self._all_views)

    def _all_views(self) -> dict[str, tuple[tuple[Group, str], ...]]:
        found: dict[str, dict[tuple[str, str], tuple[Group, str]]] = {}
        for group in self.candidates.graph.groups:
            names = {short: name for name, short in group.short_names.items()}
            # Over all configurations, because readers must have the same numbers in every strategy, so that
            # one schedule and one set of columns serve all of them; users() leaves out tensors that are not
            # views in a strategy.
            pairs = {pair for facts in self.candidates.facts(group) for pair in facts.lies_in.items()}
            for view, of in sorted(pairs):
                found.setdefault(names[of], {})[group.name, view] = group, names[view]
        return {name: tuple(views.values()) for name, views in found.items()}

    def of(self, name: str, first: int | None = None) -> tuple[ViewAlias, ...]:
        """The views of a tensor; readers are numbered from ``first``, or after the tensor's own readers."""
        readers = [group.name for group in self.schedule.readers.get(name, ())]
        free, found = len(readers) if first is None else first, []
        for maker, view in self._views.get(name, ()):
            through = SOURCE if name in maker.writes else readers.index(maker.name)
            own = self.schedule.readers.get(view, ())
            # Numbers go depth first: the view's own (for its hub), its readers, then those of its views.
            # places() and users() count in the same order.
            inner = self.of(view, free + 1 + len(own))
            leaves = self.schedule.position("forward", "output", maker.name, view) >= 0
            made = ViewAlias(view, maker, through, maker.short_names[name], free, own, leaves, inner)
            free += sum(1 + len(one.readers) for one in made.with_inner())
            found.append(made)
        return tuple(found)

    def columns(self, views: Sequence[ViewAlias]) -> Iterator[Indices]:
        """Yield everything that decides who reads the views, per strategy."""
        for one in (one for view in views for one in view.with_inner()):
            yield self.readings.written(one.maker.name, one.name).which
            for group in one.readers:
                yield self.readings.read(group.name, one.name).which
            if (hub := self.readings.hub(one.name)) is not None:
                yield hub.which

    def places(self, views: Sequence[ViewAlias]) -> Iterator[Reader]:
        """Yield the readers of views, in the order of their numbers; for each view, the hub in which it is
        put comes first."""
        for one in (one for view in views for one in view.with_inner()):
            yield Reader(one.maker.name, one.name, materialises=True)
            for group in one.readers:
                yield Reader(group.name, one.name)

    def users(
        self, views: Sequence[ViewAlias], row: int, orders: Sequence[int], through: int | None = None
    ) -> Iterator[StorageUser]:
        """Yield the readers of the views in a strategy, if the views lie in place there.

        Args:
            orders: for each reader's number, its position in forward.
            through: for the views of a view: the reader of the outermost tensor.
        """
        for one in views:
            writing = self.readings.written(one.maker.name, one.name).at(row)
            if writing.lies_in != one.of:
                continue
            outer = one.through if through is None else through
            source, hub = writing.layout, self.readings.hub(one.name)
            if hub is not None:
                source = hub.at(row)
            order = orders[one.first]
            if self.moves.steps(one.name, writing.layout, source)[0]:  # read once, on its way to its hub
                yield StorageUser(one.first, False, writing.again, True, True, order, through=outer)
                continue
            if one.leaves:
                yield StorageUser(one.first, False, False, True, False, order, True, outer)
            for number, group in enumerate(one.readers):
                read, own = self.readings.read(group.name, one.name).at(row), one.first + 1 + number
                moved = bool(self.moves.steps(one.name, source, read.layout)[0])
                inside = self.readings.inside(one.maker.name, group.name)
                yield StorageUser(own, read.kept, read.again, inside, moved, orders[own], through=outer)
                # A reader with a copy makes views of its copy, in which the outer storage has no part.
                if not moved:
                    inner = [view for view in one.inner if view.through == number]
                    yield from self.users(inner, row, orders, outer)
