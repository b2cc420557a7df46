"""The events inside a pipeline's actions: each stage's operators and collectives, timed by the schedule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from tensoropt.evaluation.evaluate import Evaluation
from tensoropt.pipeline.timing import ScheduledEvent
from tensoropt.simulate.timed import StepEvent, TimedStep

_MOST_TIMED = 3
"""The number of a stage's micro-batches that are timed: the first, one middle one, the last."""


@dataclass(frozen=True)
class TimedStage:
    """The timed events of one stage's step, as if its micro-batches ran one after another."""

    evaluation: Evaluation

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches in the step."""
        return self.evaluation.batch.mesh[0]

    @cached_property
    def _timed(self) -> TimedStep:
        few = min(self.micro_batches, _MOST_TIMED)
        return TimedStep(self.evaluation.batch, micro_batches=few, launched=False)

    @property
    def _slower(self) -> float:
        metrics = self.evaluation.metrics
        device_s = float(metrics.compute_s[0] + metrics.exposed_s[0])
        return float(metrics.time_s[0]) / device_s if device_s else 1.0

    def whole(self) -> Iterator[StepEvent]:
        """Yield the step's events. A single micro-batch, with longer events, stands for all middle ones."""
        turns = self._timed.turns
        between = range(turns[2][0], turns[4][0]) if self.micro_batches > _MOST_TIMED else ()
        for number, event in enumerate(self._timed.events):
            times = self.micro_batches - 2 if number in between else 1
            yield replace(event, duration_s=times * event.duration_s)

    def within(self, action: ScheduledEvent, share: float) -> Iterator[StepEvent]:
        """Yield the events within an action or the optimizer's step, at their times in the pipeline's step.

        Args:
            share: the share of a whole backward that the action takes, if backward is split; otherwise 1.
        """
        last, events = self._timed.micro_batches - 1, self._timed.events
        if action.kind == "O":
            turn = 2 * (last + 1)
        elif action.kind == "F":  # not the first forward, in which parameters are gathered once per step
            turn = 2 * min(1, last)
        else:
            is_last = action.micro_batch == self.micro_batches - 1
            turn = 2 * (last if is_last else min(action.micro_batch, 1)) + 1
        (first, begin_s), (end, end_s) = self._timed.turns[turn : turn + 2]
        factor = share * self._slower
        if action.kind in "FO":  # waiting at the beginning of these actions is not a part of them
            begin_s = max(begin_s, end_s - (action.end_s - action.start_s) / factor)
        for event in events[first:end]:
            since_s = event.start_s - begin_s
            start_s = action.start_s + max(since_s, 0.0) * factor
            end_s = min(action.start_s + since_s * factor + event.duration_s * share, action.end_s)
            if end_s > start_s:
                yield replace(event, start_s=start_s, duration_s=end_s - start_s)
