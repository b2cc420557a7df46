"""Settings of an exact planner: its rules, its blocks, its seconds."""

from __future__ import annotations

from dataclasses import dataclass

from tensoropt.planners.placed.exact.rules import Rules


@dataclass(frozen=True, kw_only=True)
class ExactSettings:
    """Settings of an exact planner.

    Attributes:
        name: the planner's name.
        rules: the rules of its program.
        most_blocks: a graph with more operators is contracted to so many blocks.
        seconds: the solver's time, to which the limit on its effort is proportional.
        most_after_all: refuse if more blocks remain because nothing more can be joined; None to refuse never.
    """

    name: str
    rules: Rules
    most_blocks: int
    seconds: float
    most_after_all: int | None = None
