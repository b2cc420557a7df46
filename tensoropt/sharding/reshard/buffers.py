"""The buffers of reshardings, which are alive only while something moves."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from tensoropt.sharding.reshard.steps import Step, lies_inside


def resharding_elements(steps: Sequence[Step], mesh: Sequence[int]) -> int:
    """The most elements that a resharding has alive in addition to its input, including its result.

    Shards along an atom that is surrounded by others are not contiguous in memory: collectives then need a
    copy with the pieces one after another, and gathered pieces need a further copy to be reassembled. The
    same holds for shards of which some are smaller: the pieces are padded, and cut when they are reassembled.
    """
    peak = 0
    for i, s in enumerate(steps):
        parts, before, after = prod(mesh[a] for a in s.axes), prod(s.before), prod(s.after)
        if s.kind == "all_gather":
            uneven = parts * s.before[s.atom] != s.after[s.atom]
            made = parts * before + after * (uneven or lies_inside(s.before, s.atom))
        elif s.kind == "reduce_scatter":
            uneven = parts * s.after[s.atom] != s.before[s.atom]
            made = after + parts * after * (uneven or lies_inside(s.before, s.atom))
        elif s.kind == "all_to_all":
            made = before * (1 + lies_inside(s.before, s.target)) + after * lies_inside(s.after, s.atom)
        else:
            made = after
        # The first step reads the input of the whole resharding, which is not counted; later steps read a
        # buffer.
        peak = max(peak, made + (before if i else 0))
    return peak
