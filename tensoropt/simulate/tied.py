"""Parameters that several groups use: the part of their gathering, and of the sum of their gradients, that
falls to each use, in many strategies at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np

from tensoropt.costs.group_effects import Choice, GroupEffects
from tensoropt.ops.layouts import Layout
from tensoropt.sharding.groups import Group
from tensoropt.sharding.storage import Storage
from tensoropt.sharding.together import Turn, UsePlace, turns
from tensoropt.simulate.known import Known
from tensoropt.simulate.readings import Column, distinct
from tensoropt.types import Flags, Indices

Choose = Callable[[Group, int, Mapping[str, Layout]], Choice]


@dataclass(frozen=True)
class TiedParameter:
    """A parameter that several groups use, some of which gather it ahead or hand its gradient over.

    Attributes:
        turns: for each group and strategy, what falls to its use.
        joins: (strategies,) whether gradients of several uses come to the parameter by themselves, and are
            added up there.
    """

    turns: Mapping[str, Column[Turn]]
    joins: Flags


def tied_parameter(
    name: str,
    stored: Column[Layout],
    chosen: Mapping[str, Indices],
    choose: Choose,
    effects: GroupEffects,
    known: Known,
) -> TiedParameter | None:
    """The part that falls to each use of a shared parameter; None if each use is independent in all
    strategies.

    Args:
        chosen: for each group that uses it, in execution order, the index of its configuration.
        choose: maps such an index to what is chosen for the group.
    """
    if all(Storage.of(stored.values[number]).is_plain for number in np.unique(stored.which)):
        return None
    groups = [group for group in effects.graph.groups if group.name in chosen]

    @cache
    def place(user: int, choice: int, layout: Layout) -> UsePlace:
        group = groups[user]
        use = effects.uses(choose(group, choice, {name: layout}))[name]
        return UsePlace(
            effects.blocks.of[group.name],
            use.layout,
            use.again,
            use.wanted > 0,
            effects.goes_ahead(name, layout, use),
            effects.hands_over(name, layout, use),
            use.learns,
        )

    firsts, which = distinct([stored.which, *chosen.values()])
    numbers, joins = [], []
    for row in firsts.tolist():
        uses = [place(user, int(column[row]), stored.at(row)) for user, column in enumerate(chosen.values())]
        numbers.append([known.turns.of(turn) for turn in turns(uses)])
        joins.append(sum(use.learns and not use.behind for use in uses) > 1)
    table = np.array(numbers)[which]
    columns = {group: Column(table[:, user], known.turns.values) for user, group in enumerate(chosen)}
    return TiedParameter(columns, np.array(joins)[which])
