"""The time that each group of operators, and everything else, takes in a step, summed from its timeline."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

from tensoropt.simulate.recording import TimelineEvent

AGAIN, OPTIMIZER = "again", "optimizer"
"""The phases of recomputing and regathering, and of the optimizer."""
RECOMPUTATION, COPIES, OPTIMIZER_TITLE = "recomputation", "copies and additions", "the optimizer"
"""The titles of device work other than the groups' own operators."""


@dataclass(slots=True)
class Spent:
    """The durations of one group of operators in a step, in seconds; recomputation and regathering excluded.

    Attributes:
        forward_s, backward_s: duration of the operators.
        copies_s: duration of copies and additions that redistribute tensors for the group.
        communication_s: duration of collectives or messages.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    copies_s: float = 0.0
    communication_s: float = 0.0


NOTHING = Spent()


def is_of_group(event: TimelineEvent, names: Container[str]) -> bool:
    """Return whether an event is a named group's own work: no recomputation, no optimizer's computation."""
    if event.group not in names or event.phase == AGAIN:
        return False
    return event.phase != OPTIMIZER or event.copies or not event.is_computing


def spent_by_group(timeline: Iterable[TimelineEvent], names: Container[str]) -> dict[str, Spent]:
    """Return the durations of each named group that has an event in the timeline."""
    by_group: dict[str, Spent] = {}
    for event in timeline:
        if not is_of_group(event, names):
            continue
        spent = by_group.setdefault(event.group, Spent())
        if not event.is_computing:
            spent.communication_s += event.duration_s
        elif event.copies:
            spent.copies_s += event.duration_s
        elif event.phase == "backward":
            spent.backward_s += event.duration_s
        else:
            spent.forward_s += event.duration_s
    return by_group


def beside_groups(timeline: Iterable[TimelineEvent], spent: Mapping[str, Spent]) -> dict[str, float]:
    """Return the seconds of computation that no group's own operators take, such as copies, by title."""
    seconds = {COPIES: sum(g.copies_s for g in spent.values()), RECOMPUTATION: 0.0, OPTIMIZER_TITLE: 0.0}
    for event in timeline:
        if event.is_computing:
            if event.phase == AGAIN:
                seconds[RECOMPUTATION] += event.duration_s
            elif not is_of_group(event, spent):
                title = COPIES if event.copies or event.phase != OPTIMIZER else OPTIMIZER_TITLE
                seconds[title] += event.duration_s
    return seconds
