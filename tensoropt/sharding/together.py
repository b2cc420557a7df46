"""Which uses of one parameter share a gathering, and the sum of whose gradients is scattered at once.

A tied parameter has uses in several groups. Those of one block that read it alike have one gathered copy;
each other block gathers its own, as it would have to stay alive in between. Gradients of uses that read it
alike are added up, whatever their blocks, and scattered once, behind the block that backward comes to last.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from tensoropt.ops.layouts import Layout


class UsePlace(NamedTuple):
    """One use of a parameter as others see it.

    Attributes:
        block: in which it lies.
        layout: that the group reads.
        again: the group is recomputed, with all of its region.
        wanted: backward asks for the parameter.
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
    """What falls to one use of what several have in common.

    Attributes:
        gathers, frees: it is the first, or the last, of its block in forward.
        frees_again: it is the last in the second forward of a recomputed block, which keeps nothing for
            backward.
        gathers_back, frees_back: it is the first, or the last, that asks for the parameter in the block's
            backward.
        before: how many gradients lie in the sum when its own comes.
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
    """Of the only use."""
    return Turn(frees_again=not wanted, gathers_back=wanted, frees_back=wanted)


def turns(uses: Sequence[UsePlace]) -> list[Turn]:
    """What falls to each of a parameter's uses.

    Args:
        uses: in execution order; backward comes to them in reverse.
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
