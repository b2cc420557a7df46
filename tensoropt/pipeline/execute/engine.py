"""One training step of a pipelined plan on this rank, run by one of PyTorch's schedules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from tensoropt.engine.engine import Engine, device_of
from tensoropt.engine.gradients import Pending
from tensoropt.engine.lower import Lowered
from tensoropt.engine.lowered_call import CallGraph, LoweredCall
from tensoropt.engine.runtime import Runtime
from tensoropt.ops.layouts import REPLICATE
from tensoropt.pipeline.execute.stage import (
    RunningStage,
    StagedParameters,
    StageEngine,
    TiedParameters,
    TrailingGradients,
)
from tensoropt.pipeline.execute.staged_call import StagedCall
from tensoropt.pipeline.receipts import taken_back, taken_on
from tensoropt.pipeline.strategy import PipelinedStrategy, schedule_named

_SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}
"""PyTorch's schedule classes, by the names of :data:`tensoropt.pipeline.strategy.SCHEDULES`."""


class PipelinedEngine(Engine[Pending]):
    """Runs this rank's stages of a pipelined plan.

    The last stage broadcasts the loss. A buffer that a step changes is up to date on the ranks of its stage,
    and on all ranks after :meth:`sync_buffers`.

    Args:
        strategy: the strategy of the plan.
        values: parameters and buffers by graph name; only those of this rank's stages are read.
        device: this rank's device; by default that of the values.
        runtime: this rank's mesh position and process groups; by default from ``torch.distributed``.
    """

    uncompiled = "a pipeline runs stages and micro-batches in the order of its schedule"

    strategy: PipelinedStrategy

    def __init__(
        self,
        strategy: PipelinedStrategy,
        values: Mapping[str, torch.Tensor],
        *,
        seed: int = 0,
        device: torch.device | None = None,
        runtime: Runtime | None = None,
    ):
        job = runtime or Runtime(strategy.mesh, seed=seed, device=device or device_of(values))
        super().__init__(strategy, values, job)
        place = job.position[0]
        self._trailing = TrailingGradients()
        self.stages = {
            number: StageEngine(
                strategy.parts[number], strategy.stages[number], values, self._at(number), self._trailing
            )
            for number in strategy.stages_at(place)
        }
        self.shards = StagedParameters(strategy, [stage.shards for stage in self.stages.values()])
        self.tied = TiedParameters(strategy, job)
        self._share_buffers()
        self.counts = self._make_counts()
        group = job.group((1,))
        assert group is not None
        self._along = group
        self._schedule = self._make_schedule()

    def _at(self, stage: int) -> Runtime:
        job, mesh = self.runtime, self.strategy.stages[stage].mesh
        return Runtime(mesh, seed=job.seed, device=job.device, job=job)

    def _make_schedule(self) -> PipelineScheduleSingle | PipelineScheduleMulti:
        count, micro_batches = len(self.strategy.stages), self.strategy.micro_batches
        schedule, actions = self.strategy.schedule, self.strategy.actions
        waits = schedule_named(schedule).waits
        self._running = [
            RunningStage(
                engine,
                number,
                count,
                self._along,
                taken_back(schedule, actions, number),
                taken_on(schedule, actions, number),
                waits=waits,
            )
            for number, engine in self.stages.items()
        ]
        kind = _SCHEDULES[schedule]
        running = self._running if issubclass(kind, PipelineScheduleMulti) else self._running[0]
        # A loss that is a mean already divides by the whole batch's count.
        return kind(running, micro_batches, loss_fn=lambda output, _: output, scale_grads=False)

    # -- modules ------------------------------------------------------------------------------------------

    def _lower(self, *, evaluating: bool) -> Lowered:
        raise AssertionError("a pipeline has a lowered module for each of its stages")

    @property
    def module(self) -> Any:
        return torch.nn.ModuleList([stage.module for stage in self.stages.values()])

    def lowered_modules(self) -> list[torch.fx.GraphModule]:
        return [stage.module for stage in self.stages.values()]

    def lowered_call(self, call: CallGraph) -> LoweredCall:
        return StagedCall(self.strategy, call, self.runtime, self._on_all_ranks)

    # -- calls --------------------------------------------------------------------------------------------

    def _call(
        self, inputs: Sequence[torch.Tensor], *, training: bool, evaluating: bool
    ) -> tuple[torch.Tensor, ...]:
        pending = {number: Pending() for number in self.stages} if training else {}
        for number, stage in self.stages.items():
            stage.runtime.step, stage.runtime.counts = self.runtime.step, self.runtime.counts
            stage.begin_step(inputs, pending.get(number), evaluating=evaluating)
        self._run(training=training)
        self._trailing.take_in()
        for stage in self.stages.values():
            stage.end_step()
        if not evaluating:
            self._take_buffers()
        outputs = self._outputs()
        if not training:
            return outputs
        for stage in self.stages.values():
            stage.shards.accumulated.wait()
        self.tied.add_up(self.shards.gradients)
        for stage in self.stages.values():
            stage.shards.accumulated.hide()
        return (self._defer(outputs[0], _StagedPending(pending)),)

    def _run(self, *, training: bool) -> None:
        numbers = torch.arange(self.strategy.micro_batches, device=self.runtime.device)
        # Schedules cut their input into micro-batches; these are only their numbers, which nobody reads.
        arguments = (numbers,) if 0 in self.stages else ()
        target = numbers if len(self.strategy.stages) - 1 in self.stages else None
        run = self._schedule.step if training else self._schedule.eval
        run(*arguments, target=target, return_outputs=False)
        for stage in self._running:
            stage.release_messages()

    def _outputs(self) -> tuple[torch.Tensor, ...]:
        outputs = []
        for name in self.source.outputs:
            maker, value = self.strategy.maker(name), None
            if (stage := self.stages.get(maker)) is not None:
                number = stage.source.outputs.index(name)
                parts = [stage.outputs[i][number] for i in range(self.strategy.micro_batches)]
                value = self._of_batch(parts)
            tensor = self.source.tensors[name]
            outputs.append(self._on_all_ranks(tensor, value, self.strategy.place_of(maker)))
        return tuple(outputs)

    def _broadcast(self, value: torch.Tensor, place: int) -> torch.Tensor:
        value = value.contiguous()
        dist.broadcast(value, dist.get_global_rank(self._along, place), group=self._along)
        return value

    # -- backward -------------------------------------------------------------------------------------------

    def _finish_backward(self, step: Any, gradient: torch.Tensor) -> None:
        for number, pending in step.of.items():
            self.stages[number]._finish_backward(pending, gradient)
            pending.done = True

    # -- buffers --------------------------------------------------------------------------------------------

    def _share_buffers(self) -> None:
        for stage in self.stages.values():
            for name in stage.buffers:
                stage.buffers[name] = self.buffers[name]

    @torch.no_grad()
    def _take_buffers(self) -> None:
        for stage in self.stages.values():
            for name in stage.source.mutations:
                self.buffers[name] = stage.buffers[name]
        for name, place in self.strategy.sent_buffers.items():
            # Received in place: no remaining backward needs the old value.
            self._send_buffer(name, place)
        self._share_buffers()

    # -- what lies on this rank -----------------------------------------------------------------------------

    def shown_otherwise(self) -> str:
        split = [
            tensor.key
            for tensor in self.source.parameters
            if tensor.requires_grad and len(tensor.shape) > 1 and self._is_split(tensor.name)
        ]
        if not split:
            return ""
        return (
            "a pipeline shows each parameter as the shard that a rank stores, which is only a part of "
            f"{len(split)} matrices ({split[0]} first): optimizers that work on single elements (SGD, Adam, "
            "Lion) are right, those that need whole matrices (Muon, Shampoo, Adafactor, LAMB) are not; "
            "tensoropt.original_shape(p) returns the model's own shape"
        )

    def _is_split(self, name: str) -> bool:
        stages = (self.strategy.stages[number] for number in self.strategy.holders(name))
        return any(
            code > REPLICATE and stage.mesh[axis] > 1
            for stage in stages
            for axis, code in enumerate(stage.stored[name])
            if axis > 0
        )

    def parameter_tensors(self) -> list[torch.Tensor]:
        return [tensor for stage in self.stages.values() for tensor in stage.parameter_tensors()]

    def gradient_tensors(self) -> list[torch.Tensor]:
        return [tensor for stage in self.stages.values() for tensor in stage.gradient_tensors()]


class _StagedPending(Pending):
    """The steps, by stage number, of a rank's stages that have run forward and wait for ``backward()``."""

    def __init__(self, of: Mapping[int, Pending]) -> None:
        super().__init__()
        self.of = of
