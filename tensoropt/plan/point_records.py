"""The records of placed and pipelined points, which have no indices: their plans.

:func:`record_of` and :meth:`StagesRecord.to_data` are the one way from and to a saved exploration's JSON.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from pydantic import TypeAdapter

from tensoropt.plan.kinds import PlanKind
from tensoropt.plan.plan import OperatorPlan, ParameterPlan, StagesInfo, placing_words, plan_kind
from tensoropt.units import counted

FULL, LIGHT, IN_PART = "full", "norms and activations", "in part"
"""The recipe of a block that runs again as a whole, that of no product, and the word for what no recipe
describes."""


def recomputed_words(ways: Counter[str], blocks: int = 0) -> tuple[str, ...]:
    """Return how many blocks are recomputed, or what of them: ``norms and activations recomputed``.

    Args:
        ways: how many blocks each recipe recomputes.
        blocks: how many might be; 0 if that is unknown.
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
    """The plan of a point that no indices describe; empty for others.

    Attributes:
        stages: what the plan says beside its operators and parameters; None of a point with indices.
        operators, parameters: of all stages; what several stages have is listed as in the first of them.
        recomputed: the recomputed blocks of all stages.
        notes: its planner's remarks.
        recipes: by which recipe blocks are recomputed that are not wholly; in records of an earlier version
            none.
    """

    stages: StagesInfo | None = None
    operators: Mapping[str, OperatorPlan] = field(default_factory=dict)
    parameters: Mapping[str, ParameterPlan] = field(default_factory=dict)
    recomputed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    recipes: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def info(self) -> StagesInfo:
        """The stages; an empty list of a point with indices."""
        return self.stages or StagesInfo()

    @cached_property
    def identity(self) -> str:
        """What tells the plan from others; the same for all points with indices."""
        return self.info.model_dump_json()

    @cached_property
    def kind(self) -> PlanKind:
        """The kind of the plan, with the words for it."""
        return plan_kind(self.stages)

    @property
    def placing(self) -> tuple[str, ...]:
        """On how many devices single operators lie, and how many are cut for that, in words."""
        return placing_words(self.operators, self.info)

    @property
    def recomputing(self) -> tuple[str, ...]:
        """How many blocks are recomputed, or what of them, in words."""
        otherwise = IN_PART if not self.recipes and any(stage.once for stage in self.info.stages) else FULL
        ways = Counter(self.recipes.get(block, otherwise) for block in self.recomputed)
        return recomputed_words(ways)

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> StagesRecord:
        """Return the record that :meth:`to_data` wrote, or an older version, which has ``placed`` or
        ``pipeline`` in place of ``stages``."""
        name = next(name for name in ("stages", "placed", "pipeline") if name in data)
        return _PLAIN.validate_python({**data, "stages": data[name]})

    def to_data(self) -> dict[str, Any]:
        """Return the record as plain data."""
        return dict(_PLAIN.dump_python(self, mode="json"))


_PLAIN = TypeAdapter(StagesRecord)


WITH_INDICES = StagesRecord()
"""The record of all points that indices describe."""


def record_of(saved: Mapping[str, Any]) -> StagesRecord:
    """Return the record among the fields of a point that any version saved."""
    data = saved.get("record") or saved.get("placed") or saved.get("pipeline")
    return StagesRecord.from_data(data) if data else WITH_INDICES
