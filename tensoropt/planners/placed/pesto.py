"""Pesto: placement and schedule on two devices by an integer program over a coarsened graph.

U. U. Hafeez, X. Sun, A. Gandhi, Z. Liu, *Towards Optimal Placement and Scheduling of DNN Operations with
Pesto*, Middleware 2021. Its integer program places operators on one of two devices and orders them and the
transfers between them: operators on a device do not overlap, transfers on a link do not overlap (its
congestion constraints), and memory is balanced between the devices. Large graphs are first coarsened, edge by
edge, where that closes no cycle, to about two hundred vertices.

This version uses CP-SAT, so that an ordering is one no-overlap constraint instead of a binary and two big-M
rows for every pair of operators; the coarsening is that of ``common/contraction.py``. How uneven memory
may be is a setting, with a default of our own. If nothing found is balanced enough, pesto refuses and says
why.
"""

from __future__ import annotations

from dataclasses import dataclass

from tensoropt.placement import PlacementProblem
from tensoropt.planners.errors import UnsuitableError
from tensoropt.planners.placed.common.units import PlacedAnswer, limited
from tensoropt.planners.placed.exact.place import ExactProgram, contracted, place_exactly
from tensoropt.planners.placed.exact.rules import Rules

_DEVICES = 2
_MOST_OPERATORS = 200
"""The most operators that the program takes, and that coarsening must reach."""


@dataclass(frozen=True, kw_only=True)
class Pesto:
    """The settings of the planner.

    Attributes:
        most_blocks: the graph is coarsened to so many blocks, as far as possible; an assumption about what
            the solver can order in its time.
        seconds: the solver's time; an assumption about how long a person waits.
        balance: the largest share of all stored and kept bytes on one device; 0.5 is even, 1 means no rule.
    """

    most_blocks: int = 60
    seconds: float = 60.0
    balance: float = 0.6


DEFAULTS = Pesto()


def place(
    problem: PlacementProblem, memory_limit_bytes: float | None, seed: int, settings: Pesto = DEFAULTS
) -> PlacedAnswer:
    """Return the best placement found in time, with its proven gap in the notes.

    Raises:
        UnsuitableError: not two devices, or a graph that cannot be coarsened far enough.
        MissingExtraError: OR-tools is not installed.
        InfeasibleError: nothing found fits and is balanced.
    """
    if problem.devices.count != _DEVICES:
        raise UnsuitableError(
            f"pesto places on {_DEVICES} devices; this cluster has {problem.devices.count}; use netsplit, "
            f"or give pesto {_DEVICES} of them"
        )
    problem = limited(problem, memory_limit_bytes)
    contraction = contracted(problem, settings.most_blocks)
    blocks = len(contraction.groups)
    if blocks > _MOST_OPERATORS:
        raise UnsuitableError(
            f"{problem.size} operators can only be contracted to {blocks} blocks; the program takes "
            f"{_MOST_OPERATORS}; use netsplit or dpos"
        )
    program = ExactProgram(
        name="pesto",
        rules=Rules(balance=settings.balance),
        seconds=settings.seconds,
        note=f"{problem.size} operators contracted to {blocks} blocks" if blocks < problem.size else "",
    )
    return place_exactly(problem, contraction, seed, program).placed
