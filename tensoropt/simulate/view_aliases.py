"""Who finds a storage under another name: readers of views.

A group that only takes a part of what it reads (one step of a sequence, one of three projections) gives a
view: what its readers keep is the whole storage that it was cut from, or the copy that was brought to it.
Which results are views depends on the configuration (:class:`~tensoropt.profiling.facts.Facts`), and
whether a reader of one finds it there on where it is put, so both are looked up for each strategy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from tensoropt.sharding.groups import Group
from tensoropt.sharding.placement import Layout
from tensoropt.simulate.candidates import Indices, Menu
from tensoropt.simulate.effects import SOURCE, PieceMaker, Reading, User
from tensoropt.simulate.step_schedule import Course

Column = tuple[Indices, list[Reading]]
"""Per strategy the number of a reading, and the readings."""
Homes = tuple[Indices, list[Layout]]


@dataclass(frozen=True)
class Lodging:
    """A tensor that in some configurations is a view of another one.

    Attributes:
        maker: the group that writes it.
        through: the other one's reader that makes it; :data:`SOURCE` where one group writes both.
        of: the other one's short name in that group.
        first: number of its own slots, from which those of its readers count on.
        leaves: it leaves the model.
        inner: the views of it.
    """

    name: str
    maker: Group
    through: int
    of: str
    first: int
    readers: tuple[Group, ...]
    leaves: bool
    inner: tuple[Lodging, ...]

    def walk(self) -> Iterator[Lodging]:
        yield self
        for inner in self.inner:
            yield from inner.walk()


class Lodgers:
    """The views of every tensor and who reads them.

    Args:
        readings: (group, tensor, whether it writes it) -> how it sees the tensor.
        homes: where tensors with several readers are put, None for others.
        inside: whether a tensor of one group is read in that group's recomputed region by another.
    """

    def __init__(
        self,
        menu: Menu,
        course: Course,
        makes: PieceMaker,
        readings: Callable[[str, str, bool], Column],
        homes: Callable[[str], Homes | None],
        inside: Callable[[str, str], bool],
    ):
        self.menu, self.course, self.makes = menu, course, makes
        self.readings, self.homes, self.inside = readings, homes, inside

    @cached_property
    def _views(self) -> Mapping[str, Sequence[tuple[Group, str]]]:
        """Per tensor the groups that make views of it, and these."""
        found: dict[str, dict[tuple[str, str], tuple[Group, str]]] = {}
        for group in self.menu.graph.groups:
            names = {short: name for name, short in group.short_names.items()}
            pairs = {pair for facts in self.menu.facts(group) for pair in facts.lies_in.items()}
            for view, of in sorted(pairs):
                found.setdefault(names[of], {})[group.name, view] = group, names[view]
        return {name: tuple(views.values()) for name, views in found.items()}

    def of(self, name: str, first: int | None = None) -> tuple[Lodging, ...]:
        """The views of a tensor; slots are counted from ``first``, or after those of its readers."""
        readers = [group.name for group in self.course.readers.get(name, ())]
        free, found = len(readers) if first is None else first, []
        for maker, view in self._views.get(name, ()):
            through = SOURCE if name in maker.writes else readers.index(maker.name)
            own = self.course.readers.get(view, ())
            inner = self.of(view, free + 1 + len(own))
            leaves = self.course.slot("forward", "output", maker.name, view) >= 0
            made = Lodging(view, maker, through, maker.short_names[name], free, own, leaves, inner)
            free += sum(1 + len(one.readers) for one in made.walk())
            found.append(made)
        return tuple(found)

    def columns(self, lodgings: Sequence[Lodging]) -> Iterator[Indices]:
        """All that decides who reads the views, per strategy."""
        for one in (one for lodging in lodgings for one in lodging.walk()):
            yield self.readings(one.maker.name, one.name, True)[0]
            for reader in one.readers:
                yield self.readings(reader.name, one.name, False)[0]
            if (homes := self.homes(one.name)) is not None:
                yield homes[0]

    def slots(self, lodgings: Sequence[Lodging]) -> Iterator[tuple[Group, str, bool]]:
        """(group, view, whether it is where the view is put) of the slots that these need, in order."""
        for one in (one for lodging in lodgings for one in lodging.walk()):
            yield one.maker, one.name, True
            for reader in one.readers:
                yield reader, one.name, False

    def users(
        self, lodgings: Sequence[Lodging], row: int, turns: Sequence[int], through: int | None = None
    ) -> Iterator[User]:
        """Who reads the views in a strategy where these lie.

        Args:
            turns: per number of slots when it comes in forward.
            through: of the views of a view: the reader of the outermost tensor.
        """
        for one in lodgings:
            which, writings = self.readings(one.maker.name, one.name, True)
            writing = writings[which[row]]
            if writing.lies_in != one.of:
                continue
            lodges = one.through if through is None else through
            source, homes = writing.layout, self.homes(one.name)
            if homes is not None:
                source = homes[1][homes[0][row]]
            if self.makes.steps(one.name, writing.layout, source)[0]:  # read once, on its way home
                yield User(one.first, False, writing.again, True, True, turns[one.first], lodges=lodges)
                continue
            if one.leaves:
                yield User(one.first, False, False, True, False, turns[one.first], True, lodges)
            for number, reader in enumerate(one.readers):
                at, reads = self.readings(reader.name, one.name, False)
                read, own = reads[at[row]], one.first + 1 + number
                moved = bool(self.makes.steps(one.name, source, read.layout)[0])
                inside = self.inside(one.maker.name, reader.name)
                yield User(own, read.kept, read.again, inside, moved, turns[own], lodges=lodges)
                if not moved:
                    inner = [view for view in one.inner if view.through == number]
                    yield from self.users(inner, row, turns, lodges)
