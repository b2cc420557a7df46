"""Pesto as NetSplit extends it to any number of devices, equations (6-2)–(6-7), for comparison with itself.

Every operator lies on one device (its indicators sum to 1), starts after the completion of what it reads, and
a message takes the time of its link if the two lie on different devices; the makespan of forward is as short
as possible. Nothing keeps a device from doing several things at a time, backward is not scheduled, and there
is no memory rule. So on equal devices all operators on one of them are an optimum: the devices are only used
where an answer does not fit. Then the devices' capacity is added, which is ours,
and the notes say so.

Larger graphs are coarsened to two hundred blocks, as Pesto's are (:mod:`.pesto`). Backward runs in the
opposite order of forward.
"""

from __future__ import annotations

from dataclasses import dataclass

from tensoropt.placement import PlacementProblem
from tensoropt.planners.placed.common.units import PlacedAnswer, limited
from tensoropt.planners.placed.exact.place import ExactProgram, contracted, place_exactly
from tensoropt.planners.placed.exact.rules import Rules


@dataclass(frozen=True, kw_only=True)
class PestoExtended:
    """The settings of the planner.

    Attributes:
        most_blocks: larger graphs are coarsened to so many blocks, as far as possible; Pesto's two hundred.
        seconds: the solver's time; an assumption about how long a person waits.
    """

    most_blocks: int = 200
    seconds: float = 60.0


DEFAULTS = PestoExtended()


def place(
    problem: PlacementProblem,
    memory_limit_bytes: float | None,
    seed: int,
    settings: PestoExtended = DEFAULTS,
) -> PlacedAnswer:
    """Return the program's own answer; the notes say what it promises, and which heuristic is faster.

    Raises:
        MissingExtraError: OR-tools is not installed.
        InfeasibleError: the program finds nothing that fits when simulated.
    """
    contraction = contracted(limited(problem, memory_limit_bytes), settings.most_blocks)
    whole, blocks = contraction.whole.size, len(contraction.groups)
    program = ExactProgram(
        name="pesto_extended",
        rules=Rules(exclusive=False, backward=False),
        seconds=settings.seconds,
        knows_memory=False,
        promise="it knows forward alone and lets operators share a device",
        note=f"{whole} operators coarsened to {blocks} blocks" if blocks < whole else "",
    )
    return place_exactly(contraction.whole, contraction, seed, program).placed
