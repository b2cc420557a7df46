"""The records of placed and pipelined points, which have no indices: the plan, and the recorded step.

:func:`record_of` and :meth:`StagesRecord.to_data` are the one way from and to a saved exploration's JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from pydantic import TypeAdapter

from tensoropt.plan.kinds import PlanKind
from tensoropt.plan.plan import OperatorPlan, ParameterPlan, StagesInfo, placing_words, plan_kind
from tensoropt.plan.spent import NOTHING, OPTIMIZER_TITLE, RECOMPUTATION, beside_groups, spent_by_group
from tensoropt.simulate.recording import Recording
from tensoropt.units import counted_if_any


@dataclass(frozen=True)
class StagesRecord:
    """The plan of a point that no indices describe, and the recording of its step; empty for others.

    Attributes:
        stages: what the plan says beside its operators and parameters; None of a point with indices.
        operators, parameters: of all stages; what several stages have is listed as in the first of them.
        recomputed: the recomputed blocks of all stages.
        notes: its planner's remarks.
        loads: the seconds (computing, communicating) of a rank of each place; None if an older version saved
            it, and of a placed point until it is kept.
        computed: (group, module, target or name of its first operator, seconds) of what a rank of the busiest
            place computes; None as before.
        again_s, optimizer_s: the seconds of recomputation and of the optimizer there.
        recording: empty until a placed point is kept: making it takes longer than simulating the step.
    """

    stages: StagesInfo | None = None
    operators: Mapping[str, OperatorPlan] = field(default_factory=dict)
    parameters: Mapping[str, ParameterPlan] = field(default_factory=dict)
    recomputed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    loads: tuple[tuple[float, float], ...] | None = None
    computed: tuple[tuple[str, str, str, float], ...] | None = None
    again_s: float = 0.0
    optimizer_s: float = 0.0
    recording: Recording = field(default_factory=Recording)

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
        """How many blocks are recomputed, in words."""
        return counted_if_any(len(self.recomputed), "block", "{} recomputed")

    @property
    def split_words(self) -> tuple[str, ...]:
        """How the model is cut into stages, and what is recomputed or lies on single devices, in words."""
        return (*self.info.words, *self.recomputing, *self.placing)

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> StagesRecord:
        """Return the record that :meth:`to_data` wrote, or an older version, which has ``placed`` or
        ``pipeline`` in place of ``stages``."""
        name = next(name for name in ("stages", "placed", "pipeline") if name in data)
        recording = Recording.from_data(data)
        record = _PLAIN.validate_python({**data, "stages": data[name], "recording": recording})
        return read_off_timeline(record) if name == "placed" else record

    def to_data(self) -> dict[str, Any]:
        """Return the record as plain data."""
        plain = _PLAIN.dump_python(self, mode="json", exclude={"recording"})
        return {**plain, **self.recording.to_data()}


_PLAIN = TypeAdapter(StagesRecord)


def read_off_timeline(record: StagesRecord) -> StagesRecord:
    """Return a placed point's record with the seconds that its timeline has of its operators and its devices,
    and with what the device that computes longest computes.
    """
    rows, timeline = record.recording.operator_rows(), record.recording.timeline()
    device_of = {row.group: row.configuration["device"] for row in rows}
    loads = {str(number): [0.0, 0.0] for number in range(len(record.info.peak_bytes))}
    for event in timeline:
        if event.is_computing:
            loads[event.lane.removeprefix("device ")][0] += event.duration_s
        elif event.group in device_of:
            loads[device_of[event.group]][1] += event.duration_s
    busiest = max(loads, key=lambda number: loads[number][0], default="")
    own = [event for event in timeline if event.lane == f"device {busiest}"]
    spent, own_spent = spent_by_group(timeline, device_of), spent_by_group(own, device_of)
    computed, timed = [], []
    for row in rows:
        took, of_busiest = (seconds.get(row.group, NOTHING) for seconds in (spent, own_spent))
        worked = replace(row, communication_s=took.communication_s, forward_s=0.0, backward_s=0.0)
        # Those that cut tensors into pieces, or join pieces, copy.
        if row.members:
            worked = replace(worked, forward_s=took.forward_s, backward_s=took.backward_s)
            own_s = of_busiest.forward_s + of_busiest.backward_s
            computed.append((row.group, row.module, row.members[0], own_s))
        else:
            worked = replace(worked, copies_s=took.forward_s + took.backward_s)
        timed.append(worked)
    beside = beside_groups(own, own_spent)
    return replace(
        record,
        loads=tuple((compute_s, communication_s) for compute_s, communication_s in loads.values()),
        computed=tuple(computed),
        again_s=beside[RECOMPUTATION],
        optimizer_s=beside[OPTIMIZER_TITLE],
        recording=replace(record.recording, rows=Recording.of(timed, (), (), ()).rows),
    )


WITH_INDICES = StagesRecord()
"""The record of all points that indices describe."""


def record_of(saved: Mapping[str, Any]) -> StagesRecord:
    """Return the record among the fields of a point that any version saved."""
    data = saved.get("record") or saved.get("placed") or saved.get("pipeline")
    return StagesRecord.from_data(data) if data else WITH_INDICES
