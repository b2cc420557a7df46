"""Settings of an exact planner: its rules, its blocks, its seconds."""

from __future__ import annotations

from dataclasses import dataclass

from tensoropt.planners.placed.exact.rules import Rules


@dataclass(frozen=True, kw_only=True)
class ExactSettings:
    """Settings of an exact planner.

    Attributes:
        name: of the planner.
        rules: of its program.
        most_blocks: beyond so many operators they are contracted to as many blocks.
        seconds: given to the solver, whose effort is limited in proportion.
        most_after_all: refuse where more blocks remain, because nothing more can be joined; None for never.
    """

    name: str
    rules: Rules
    most_blocks: int
    seconds: float
    most_after_all: int | None = None
