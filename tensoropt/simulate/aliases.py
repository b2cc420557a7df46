"""Views that share a tensor's storage, and the operator groups that read them in each strategy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from tensoropt.costs.effects import MoveEffects
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
        maker: the operator group that writes the view.
        through: the index of ``maker`` among the other tensor's readers; :data:`SOURCE` if it writes both.
        of: the other tensor's short name in ``maker``.
        first: the number of the view's materialisation. Numbers from 0 count the viewed tensor's readers,
            then, depth first, each view's materialisation and its readers.
        leaves: whether the view is a result of the model or a buffer's new value.
        inner: the views of this view.
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
        """Yield the view and all views of it, depth first."""
        yield self
        for inner in self.inner:
            yield from inner.with_inner()


class ViewAliases:
    def __init__(
        self, candidates: Candidates, schedule: StepSchedule, moves: MoveEffects, readings: Readings
    ):
        self.candidates, self.schedule, self.moves = candidates, schedule, moves
        self.readings = readings

    @cached_property
    def _views(self) -> Mapping[str, Sequence[tuple[Group, str]]]:
        return self.readings.memo.once("views", self._all_views)

    def _all_views(self) -> dict[str, tuple[tuple[Group, str], ...]]:
        views_of: dict[str, dict[tuple[str, str], tuple[Group, str]]] = {}
        for group in self.candidates.graph.groups:
            names = {short: name for name, short in group.short_names.items()}
            # Over all configurations, because readers must have the same numbers in every strategy, so that
            # one schedule and one set of columns serve all of them; users() leaves out tensors that are not
            # views in a strategy.
            pairs = {pair for facts in self.candidates.facts(group) for pair in facts.lies_in.items()}
            for view, of in sorted(pairs):
                views_of.setdefault(names[of], {})[group.name, view] = group, names[view]
        return {name: tuple(views.values()) for name, views in views_of.items()}

    def of(self, name: str, first: int | None = None) -> tuple[ViewAlias, ...]:
        """Return a tensor's views, whose readers are numbered from ``first`` on (by default, the number of
        the tensor's own readers)."""
        readers = [group.name for group in self.schedule.readers.get(name, ())]
        free, aliases = len(readers) if first is None else first, []
        for maker, view in self._views.get(name, ()):
            through = SOURCE if name in maker.writes else readers.index(maker.name)
            own = self.schedule.readers.get(view, ())
            # Numbers go depth first: the view's own (for its hub), its readers, then those of its views.
            # places() and users() count in the same order.
            inner = self.of(view, free + 1 + len(own))
            leaves = self.schedule.position("forward", "output", maker.name, view) >= 0
            made = ViewAlias(view, maker, through, maker.short_names[name], free, own, leaves, inner)
            free += sum(1 + len(one.readers) for one in made.with_inner())
            aliases.append(made)
        return tuple(aliases)

    def columns(self, views: Sequence[ViewAlias]) -> Iterator[Indices]:
        """Yield (strategies,) indices of each choice that decides which operator groups read the views."""
        for alias in (alias for view in views for alias in view.with_inner()):
            yield self.readings.written(alias.maker.name, alias.name).which
            if (gathered := self.readings.gathered_again(alias.name)) is not None:
                yield gathered
            for group in alias.readers:
                yield self.readings.read(group.name, alias.name).which
            if (hub := self.readings.hub(alias.name)) is not None:
                yield hub.which

    def places(self, views: Sequence[ViewAlias]) -> Iterator[Reader]:
        """Yield the readers of views by number: of each view its materialisation, then its readers."""
        for alias in (alias for view in views for alias in view.with_inner()):
            yield Reader(alias.maker.name, alias.name, materialises=True)
            for group in alias.readers:
                yield Reader(group.name, alias.name)

    def users(
        self, views: Sequence[ViewAlias], row: int, orders: Sequence[int], through: int | None = None
    ) -> Iterator[StorageUser]:
        """Yield the readers of views that use the tensor's storage in the strategy number ``row``.

        Args:
            orders: reader's number -> its index from 0 in forward's order of reads; equal at one moment.
            through: for views of a view, the number of the tensor's reader that makes the outermost view.
        """
        for alias in views:
            writing = self.readings.written(alias.maker.name, alias.name).at(row)
            if writing.lies_in != alias.of:
                continue
            outer = alias.through if through is None else through
            source, hub = writing.layout, self.readings.hub(alias.name)
            gathered = self.readings.gathered_again(alias.name)
            anew = gathered is not None and bool(gathered[row])
            if hub is not None:
                source = hub.at(row)
            order = orders[alias.first]
            to_hub = bool(self.moves.steps(alias.name, writing.layout, source)[0])
            if to_hub:  # read once, on its way to its hub
                remade = writing.again
                yield StorageUser(alias.first, False, writing.again, remade, True, order, through=outer)
            elif alias.leaves:
                yield StorageUser(alias.first, False, False, False, False, order, True, outer)
            for number, group in enumerate(alias.readers if anew or not to_hub else ()):
                read, own = self.readings.read(group.name, alias.name).at(row), alias.first + 1 + number
                moved = bool(self.moves.steps(alias.name, source, read.layout)[0])
                if to_hub:
                    needs = read.again or (read.kept and not moved)
                    yield StorageUser(own, needs, False, False, False, orders[own], through=outer)
                    continue
                # A view is recomputed with the tensor that it is a view of, or by itself from saved tensors.
                remade = writing.again and self.readings.inside(alias.maker.name, group.name)
                in_place = not moved or (anew and hub is None)
                seen = read.kept, read.again, remade, not in_place, orders[own]
                yield StorageUser(own, *seen, through=outer)
                # A reader with a copy makes views of its copy, in which the outer storage has no part.
                if not moved:
                    inner = [view for view in alias.inner if view.through == number]
                    yield from self.users(inner, row, orders, outer)
