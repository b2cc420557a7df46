"""Uses of one parameter that share a gathering, and those whose gradients are summed and scattered at once.

A tied parameter has uses in several groups. Those of one block that read it in the same way have one gathered
copy; each other block gathers its own, which would otherwise have to stay alive in between. Gradients of uses
that read it in the same way are added up, whatever their blocks, and scattered once, behind the block that
backward reaches last.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from tensoropt.ops.layouts import Layout


class UsePlace(NamedTuple):
    """One use of a parameter, as the other uses see it.

    Attributes:
        block: the block that contains it.
        layout: the layout that the group reads.
        again: the group is recomputed, with the rest of its region.
        wanted: backward needs the parameter.
        ahead: it is gathered ahead.
        behind: its gradient is scattered behind.
        learns: it has a gradient.
    """

    block: int
    layout: Layout
    again: bool
    wanted: bool
    ahead: bool
    behind: bool
    learns: bool = True


class Turn(NamedTuple):
    """The part that falls to one use of what several uses share.

    Attributes:
        gathers, frees: it is the first, or the last, of its block in forward.
        frees_again: it is the last in the second forward of a recomputed block, which keeps nothing for
            backward.
        gathers_back, frees_back: it is the first, or the last, that needs the parameter in the block's
            backward.
        before: the number of gradients in the sum when its own arrives.
        scatters: its own is the last.
    """

    gathers: bool = True
    frees: bool = True
    frees_again: bool = True
    gathers_back: bool = True
    frees_back: bool = True
    before: int = 0
    scatters: bool = True


def alone(*, wanted: bool) -> Turn:
    """The turn of a use that is the only one."""
    return Turn(frees_again=not wanted, gathers_back=wanted, frees_back=wanted)


def turns(uses: Sequence[UsePlace]) -> list[Turn]:
    """Return the part that falls to each of a parameter's uses.

    Args:
        uses: in execution order; backward reaches them in reverse.
    """
    gathered: dict[Hashable, list[int]] = {}
    summed: dict[Hashable, list[int]] = {}
    for number, use in enumerate(uses):
        if use.ahead:
            gathered.setdefault((use.block, use.layout, use.again, use.learns), []).append(number)
        if use.behind:
            summed.setdefault(use.layout, []).append(number)
    found = [alone(wanted=use.wanted) for use in uses]
    for members in gathered.values():
        wanting = [number for number in members if uses[number].wanted]
        for number in members:
            found[number] = found[number]._replace(
                gathers=number == members[0],
                frees=number == members[-1],
                frees_again=number == members[-1] and not wanting,
                gathers_back=number in wanting[-1:],
                frees_back=number in wanting[:1],
            )
    for members in summed.values():
        for before, number in enumerate(reversed(members)):
            found[number] = found[number]._replace(before=before, scatters=number == members[0])
    return found
