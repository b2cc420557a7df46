"""Many strategies of the same candidates, taken apart into owners of effects: what the simulator steps
through.

An owner is a group, a tensor or a parameter. What it does depends on few choices, so its effects are worked
out once per distinct choice and shared by strategies, and by layers that look alike.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from tensoropt.costs.effects import USED, Effect, Effects, When, joined, reader
from tensoropt.costs.group_effects import Choice, GroupEffects
from tensoropt.costs.prices import Prices
from tensoropt.ops.layouts import Layout
from tensoropt.sharding.groups import Group
from tensoropt.sharding.storage import whole_layout
from tensoropt.simulate.candidates import Candidates
from tensoropt.simulate.gradient_aliases import GradientAliases
from tensoropt.simulate.overlap import BLOCKING, Overlap
from tensoropt.simulate.readings import Column, Readings, distinct
from tensoropt.simulate.step_schedule import Reader, Resolver, StepSchedule, step_schedule
from tensoropt.simulate.tensor_effects import TensorEffects
from tensoropt.simulate.view_aliases import ViewAliases
from tensoropt.types import Indices

Known = dict[Hashable, Effects]
"""Effects by what they depend on, kept from one batch of the same candidates and prices to the next."""


@dataclass(frozen=True)
class Owner:
    """A group, a tensor or a parameter: its effects, and where in a step they take place.

    Attributes:
        kind: ``group``, ``tensor`` or ``parameter``.
        positions: per moment of its effects the position in the step schedule.
        effects: the distinct ones, and per strategy which.
    """

    kind: str
    name: str
    positions: Mapping[When, int]
    effects: Column[Effects]

    def of(self, row: int) -> Iterator[tuple[int, Effect]]:
        """The effects of one strategy with their positions."""
        for effect in self.effects.at(row).effects:
            yield self.positions[effect.when], effect


def _owner(kind: str, name: str, resolve: Resolver, effects: Sequence[Effects], which: Indices) -> Owner:
    whens = dict.fromkeys(effect.when for one in effects for effect in one.effects)
    return Owner(kind, name, {when: resolve(when) for when in whens}, Column(which, list(effects)))


class Batch:
    """Strategies ready to be simulated together.

    Args:
        choices, options: per variable and per group the index of every strategy.
        prices: :func:`~tensoropt.costs.prices.free_prices` to follow bytes and collectives only.
        known: effects that were worked out before, of the same candidates and prices; filled here.
        schedule: that of the candidates' graph and regions.
    """

    def __init__(
        self,
        candidates: Candidates,
        choices: Mapping[str, Indices],
        options: Mapping[str, Indices],
        prices: Prices,
        overlap: Overlap = BLOCKING,
        known: Known | None = None,
        schedule: StepSchedule | None = None,
    ):
        self.candidates, self.prices, self.overlap = candidates, prices, overlap
        self.graph, self.mesh = candidates.graph, candidates.mesh
        self.schedule = schedule or step_schedule(candidates.graph, candidates.regions)
        self.readings = Readings(candidates, choices, options)
        self.count = self.readings.count
        self.stored: dict[str, Column[Layout]] = self.readings.stored()
        self._choices = choices
        self._known: Known = {} if known is None else known
        self._of_groups, self._of_tensors = GroupEffects(prices), TensorEffects(prices)
        told = candidates, self.schedule, self._of_tensors, self.readings
        # Made before the owners: how long a tensor's storage lives depends on who reads its views and gets
        # its gradient.
        self._views, self._gradients = ViewAliases(*told), GradientAliases(*told)
        groups = [self._group(group) for group in self.graph.groups]
        tensors = [self._tensor(group, name) for group in self.graph.groups for name in group.writes]
        self.owners = (*groups, *tensors, *(self._parameter(name) for name in self.stored))

    def owner(self, kind: str, name: str) -> Owner:
        """The owner of a kind and name."""
        return next(owner for owner in self.owners if (owner.kind, owner.name) == (kind, name))

    def _worked_out(self, key: Hashable, make: Callable[[], Effects]) -> Effects:
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def _group(self, group: Group) -> Owner:
        chosen, outlasting = self._choices[group.name], self._gradients.outlasting(group)
        names = (*group.parameters, *group.shared)
        # The last user's gradient comes first in backward and waits; those of all earlier users are added to
        # it.
        joins = tuple(self.schedule.users[name][1] != group.name for name in group.shared)
        firsts, which = distinct([chosen, outlasting, *(self.stored[name].which for name in names)])
        found = []
        for row in firsts:
            number, handed = int(chosen[row]), bool(outlasting[row])
            stored = {name: self.stored[name].at(row) for name in names}
            # The key has all that the effects depend on, without the group's name: equal layers share one
            # entry.
            key = ("group", self.candidates.signature(group), number, tuple(stored.values()), handed, joins)

            choice = self._choice(group, number, stored)
            make = partial(self._of_groups.group, choice, handed=handed, joins=joins)

            found.append(self._worked_out(key, make))
        return _owner("group", group.name, self.schedule.of_group(group.name), found, which)

    def _choice(self, group: Group, number: int, stored: Mapping[str, Layout]) -> Choice:
        of = self.candidates
        return Choice(
            of.configurations(group)[number],
            of.works(group)[number],
            of.facts(group)[number],
            stored,
            of.again(group)[number],
        )

    def _tensor(self, group: Group, name: str) -> Owner:
        """The owner of a tensor: its effects depend on how it is written, materialised and read, on who reads
        views of it, and on where its gradients lie."""
        readers, views = self.schedule.readers.get(name, ()), self._views.of(name)
        written, hub = self.readings.written(group.name, name), self.readings.hub(name)
        read = [self.readings.read(one.name, name) for one in readers]
        ends, gradients = self._gradients.storages(group, name)
        places = [*(Reader(one.name, name) for one in readers), *self._views.places(views)]
        resolve = self.schedule.of_tensor(group.name, name, places, ends)
        orders = _orders([resolve(reader(number, USED)) for number in range(len(places))])
        inside = tuple(self.readings.inside(group.name, one.name) for one in readers)
        tensor = self.graph.atoms.graph.tensors[name]
        # What TensorEffects asks of a tensor beside its readings. Two tensors that agree in it, and in what
        # is told of their readers, have equal effects, whatever they are called.
        alike = (
            self.graph.atoms.atoms[name],
            self._of_tensors.orders.get(name),
            tensor.dtype,
            tensor.requires_grad,
            self.schedule.position("forward", "output", group.name, name) >= 0,
            name in self.graph.atoms.graph.mutations.values(),
        )
        # Of thousands of strategies only the distinct combinations of these columns are worked out.
        columns = [written.which, *(one.which for one in read), *((hub.which,) if hub else ())]
        columns += [*self._views.columns(views), gradients.which]
        firsts, which = distinct(columns)
        found = []
        for row in firsts:
            told = (
                written.at(row),
                hub.at(row) if hub else None,
                tuple(one.at(row) for one in read),
                inside,
                gradients.at(row),
                tuple(self._views.users(views, int(row), orders)),
                orders[: len(readers)],
            )

            make = partial(self._of_tensors.tensor, name, *told)
            found.append(self._worked_out(("tensor", *alike, *told), make))
        return _owner("tensor", name, resolve, found, which)

    def _parameter(self, name: str) -> Owner:
        tensor, stored = self.graph.atoms.graph.tensors[name], self.stored[name]
        first, last = self.schedule.users[name]
        dtypes = tensor.dtype, tensor.stored_dtype
        alike = ("parameter", self.graph.atoms.atoms[name], *dtypes, tensor.requires_grad, first != last)
        shared = name in self.graph.shared
        found = []
        for layout in stored.values:

            def make(layout: Layout = layout) -> Effects:
                own = self._of_groups.stored(name, layout, joins=first != last)
                if not shared:  # a copy that stays gathered is its only group's
                    return own
                return joined([own, self._of_groups.unsharded(name, layout, whole_layout(tensor, self.mesh))])

            found.append(self._worked_out((*alike, shared, layout), make))
        return _owner("parameter", name, self.schedule.of_parameter(name), found, stored.which)


def _orders(positions: Sequence[int]) -> tuple[int, ...]:
    """Per position its rank among all."""
    ranked = sorted(range(len(positions)), key=positions.__getitem__)
    return tuple(ranked.index(i) for i in range(len(positions)))
