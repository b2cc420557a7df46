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
from tensoropt.units import counted_if_any

FULL, IN_PART = "full", "in part"
"""The recipe of a block that runs again as a whole, and the word for what no recipe describes."""


def by_recipes(ways: Counter[str]) -> str:
    """Return how many blocks each recipe recomputes, in brackets; nothing if all are, wholly."""
    if not set(ways) - {FULL}:
        return ""
    if len(ways) == 1:
        return f" ({next(iter(ways))})"
    return f" ({', '.join(f'{count} {way}' for way, count in ways.most_common())})"


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
        """How many blocks are recomputed, by which recipes, and how many inputs gathered again, in words."""
        otherwise = IN_PART if not self.recipes and any(stage.once for stage in self.info.stages) else FULL
        ways = Counter(self.recipes.get(block, otherwise) for block in self.recomputed)
        gathered = sum(len(stage.gathered_again) for stage in self.info.stages)
        return (
            *counted_if_any(len(self.recomputed), "block", f"{{}} recomputed{by_recipes(ways)}"),
            *counted_if_any(gathered, "input", "{} gathered again"),
        )

    @property
    def split_words(self) -> tuple[str, ...]:
        """How the model is cut into stages, and what is recomputed or lies on single devices, in words."""
        return (*self.info.words, *self.recomputing, *self.placing)

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
