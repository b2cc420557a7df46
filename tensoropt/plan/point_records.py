"""Records of placed and pipelined points, which have no indices: the plan, and the recorded step.

:func:`record_fields` and ``to_data`` are the one way from and to the JSON of a saved exploration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tensoropt.plan.plan import (
    PIPELINED_SCHEMA,
    PLACED_MICRO_SCHEMA,
    SCHEMA,
    OperatorPlan,
    ParameterPlan,
    PipelineInfo,
    PlacedInfo,
)
from tensoropt.simulate.recording import Recording


@dataclass(frozen=True)
class _PlanRecord:
    """The operators and parameters of a plan that no indices describe."""

    info: Any
    operators: Mapping[str, OperatorPlan] = field(default_factory=dict)
    parameters: Mapping[str, ParameterPlan] = field(default_factory=dict)

    def _fields_of_plan(self, **own: Any) -> dict[str, Any]:
        return {"operators": self.operators, "parameters": self.parameters, "hubs": {}, **own}

    def _plans_data(self) -> dict[str, Any]:
        named = {"operators": self.operators, "parameters": self.parameters}
        return {
            kind: {name: plan.model_dump(mode="json") for name, plan in plans.items()}
            for kind, plans in named.items()
        }


@dataclass(frozen=True)
class PlacedRecord(_PlanRecord):
    """The plan of a placed point, and the recording of its step.

    Attributes:
        info: what the plan says beside its operators and parameters.
        notes: its planner's remarks.
        recording: empty until the point is kept: making it takes longer than simulating the step.
    """

    info: PlacedInfo
    notes: tuple[str, ...] = ()
    recording: Recording = field(default_factory=Recording)

    def plan_fields(self, micro_batches: int) -> dict[str, Any]:
        """Return the fields of its plan."""
        schema = SCHEMA if micro_batches == 1 else PLACED_MICRO_SCHEMA
        return self._fields_of_plan(schema=schema, placed=self.info)

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> PlacedRecord:
        """Return the record that :meth:`to_data` wrote."""
        info, notes = PlacedInfo(**data["placed"]), tuple(data.get("notes", ()))
        return cls(info, **_plans(data), notes=notes, recording=Recording.from_data(data))

    def to_data(self) -> dict[str, Any]:
        """Return the record as plain data."""
        own = {"placed": self.info.model_dump(mode="json"), "notes": list(self.notes)}
        return {**self._plans_data(), **own, **self.recording.to_data()}


@dataclass(frozen=True)
class PipelineRecord(_PlanRecord):
    """The plan of a pipelined point, and the recording of its step.

    Attributes:
        info: what the plan says beside its operators and parameters.
        operators, parameters: of all stages; what several stages have is listed as in the first of them.
        recomputed: the recomputed blocks of all stages.
        overlap: what is assumed to overlap what, in words.
        loads: the seconds (computing, communicating) of a rank of each place; None if an older version saved
            it.
        computed: (group, module, target, seconds) of what a rank of the busiest place computes; None if an
            older version saved it.
        again_s, optimizer_s: the seconds of recomputation and of the optimizer there.
    """

    info: PipelineInfo
    recomputed: tuple[str, ...] = ()
    overlap: str = ""
    loads: tuple[tuple[float, float], ...] | None = None
    computed: tuple[tuple[str, str, str, float], ...] | None = None
    again_s: float = 0.0
    optimizer_s: float = 0.0
    recording: Recording = field(default_factory=Recording)

    def plan_fields(self, micro_batches: int) -> dict[str, Any]:
        """Return the fields of its plan."""
        own = {"recomputed": self.recomputed, "pipeline": self.info}
        return self._fields_of_plan(schema=PIPELINED_SCHEMA, **own)

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> PipelineRecord:
        """Return the record that :meth:`to_data` wrote."""
        return cls(
            PipelineInfo(**data["pipeline"]),
            **_plans(data),
            recomputed=tuple(data["recomputed"]),
            overlap=data.get("overlap", ""),
            loads=_tuples(data.get("loads")),
            computed=_tuples(data.get("computed")),
            again_s=data.get("again_s", 0.0),
            optimizer_s=data.get("optimizer_s", 0.0),
            recording=Recording.from_data(data),
        )

    def to_data(self) -> dict[str, Any]:
        """Return the record as plain data."""
        recorded = self.recording.to_data()
        computed = {"computed": self.computed, "again_s": self.again_s, "optimizer_s": self.optimizer_s}
        return {
            **self._plans_data(),
            "recomputed": list(self.recomputed),
            "pipeline": self.info.model_dump(mode="json"),
            "overlap": self.overlap,
            **{name: rows for name, rows in recorded.items() if name == "rows"},
            **({"loads": self.loads} if self.loads is not None else {}),
            **(computed if self.computed is not None else {}),
            **recorded,
        }


def record_fields(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the records among the fields of a saved point, by the names of a
    :class:`~tensoropt.plan.point.Point`'s fields.
    """
    placed, pipeline = data.get("placed"), data.get("pipeline")
    return {
        "placed": PlacedRecord.from_data(placed) if placed else None,
        "pipeline": PipelineRecord.from_data(pipeline) if pipeline else None,
    }


def _plans(data: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "operators": {name: OperatorPlan(**plan) for name, plan in data["operators"].items()},
        "parameters": {name: ParameterPlan(**plan) for name, plan in data["parameters"].items()},
    }


def _tuples(rows: Any) -> Any:
    return None if rows is None else tuple(map(tuple, rows))
