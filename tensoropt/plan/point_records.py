"""The plans of placed and pipelined points. Sharded points instead have indices into tables of choices.

:meth:`StagesRecord.to_data` writes such a plan as JSON in a saved exploration, and ``from_data`` reads it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from pydantic import TypeAdapter

from tensoropt.plan.kinds import PlanKind
from tensoropt.plan.plan import OperatorPlan, ParameterPlan, StagesInfo, plan_kind
from tensoropt.units import counted

FULL, LIGHT, IN_PART = "full", "norms and activations", "in part"
"""The names of the recomputed part of a block: the whole, all but matrix products, or another part."""


def recomputed_words(ways: Counter[str], blocks: int = 0) -> tuple[str, ...]:
    """Return how many blocks are recomputed, or which part of them: ``norms and activations recomputed``.

    Args:
        ways: the number of blocks by the name of the recomputed part.
        blocks: the number of repeated blocks in the model; 0 if unknown.
    """
    total = ways.total()
    if not total:
        return ()
    of = f"{total}/{blocks} blocks" if blocks else counted(total, "block")
    if set(ways) == {FULL}:
        return (f"{of} recomputed",)
    if len(ways) > 1 or IN_PART in ways:
        return (f"{of} recomputed in part",)
    (way,) = ways
    return (f"{way} recomputed" if total == blocks else f"{way} of {of} recomputed",)


@dataclass(frozen=True)
class StagesRecord:
    """The plan of a placed or pipelined point; empty for a sharded point, which has indices instead.

    Attributes:
        stages: the plan's stages; None for a sharded point.
        operators, parameters: the plans of the operators and parameters of all stages. One that is in several
            stages is described as in the first of them.
        recomputed: the names of the recomputed blocks of all stages.
        recipes: the name of the recomputed part of each block that is recomputed in part.
    """

    stages: StagesInfo | None = None
    operators: Mapping[str, OperatorPlan] = field(default_factory=dict)
    parameters: Mapping[str, ParameterPlan] = field(default_factory=dict)
    recomputed: tuple[str, ...] = ()
    recipes: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def info(self) -> StagesInfo:
        """The stages; empty for a sharded point."""
        return self.stages or StagesInfo()

    @cached_property
    def identity(self) -> str:
        """A text that is equal only for equal plans, and equal for all sharded points."""
        return self.info.model_dump_json()

    @cached_property
    def kind(self) -> PlanKind:
        """The plan's kind (sharded, pipeline or placed), with the words for it."""
        return plan_kind(self.stages)

    @property
    def placing(self) -> tuple[str, ...]:
        """The number of devices with placed operators, and of operators cut into pieces, in words."""
        devices = {operator.device for operator in self.operators.values()} - {None}
        placed = f"placed on {counted(len(devices), 'device')}" if devices else ""
        cut = f"{counted(len(self.info.splits), 'operator')} cut" if self.info.splits else ""
        return tuple(filter(None, (placed, cut)))

    @property
    def recomputing(self) -> tuple[str, ...]:
        """The number or part of recomputed blocks, in words."""
        return recomputed_words(Counter(self.recipes.get(block, FULL) for block in self.recomputed))

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> StagesRecord:
        """Return the record written by :meth:`to_data`."""
        return _PLAIN.validate_python(data)

    def to_data(self) -> dict[str, Any]:
        return dict(_PLAIN.dump_python(self, mode="json"))


_PLAIN = TypeAdapter(StagesRecord)


WITH_INDICES = StagesRecord()
"""The record of every sharded point."""
