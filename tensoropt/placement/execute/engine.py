"""One training step of a placed plan, on the devices that this process runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from tensoropt.engine.engine import Engine, TargetCounts, device_of
from tensoropt.engine.runtime import Runtime
from tensoropt.errors import PlanError
from tensoropt.placement.execute.lower import (
    LocalDevices,
    LoweredPart,
    Place,
    PlacedParameters,
    StepContext,
    Tape,
    TapedStep,
    lower_part,
)
from tensoropt.placement.execute.operators import Cut
from tensoropt.placement.execute.transport import Alone, Arriving, Job, Transfer, Transport, schedule_of
from tensoropt.placement.graph import Value
from tensoropt.placement.points import PlacedStrategy


class PlacedEngine(Engine[LoweredPart, TapedStep]):
    """Runs a placed plan in one process per device, or in one process with all devices.

    With several micro-batches, the forwards run one after another in the model's call, and the backwards in
    ``backward()``. A training graph then gives only the loss. A buffer that a step changes is up to date
    where it is read, and everywhere after :meth:`sync_buffers`.

    Args:
        strategy: the plan.
        values: the model's parameters and buffers by graph name.
        devices: for one process that runs all devices, the PyTorch device of each. None for one process per
            device in a ``torch.distributed`` job.
        seed: the seed of dropout.
        transport: replaces the job's own way of reaching the other processes; it has a ``rank``.
        device: the device that this rank computes on, if ``devices`` do not say; by default that of the
            values.

    Attributes:
        local: the devices that this process runs.
        transport: carries values to the other processes.
        after_backward: called when gradients are complete.

    Raises:
        PlanError: the plan cannot be run in its order, or not on this number of devices.
    """

    def __init__(
        self,
        strategy: PlacedStrategy,
        values: Mapping[str, torch.Tensor],
        *,
        devices: Sequence[torch.device | str] | None = None,
        seed: int = 0,
        transport: Transport | None = None,
        rank: int | None = None,
        device: torch.device | None = None,
    ):
        self.schedule = schedule_of(strategy)
        base = device or device_of(values)
        if devices is not None:
            self.local, runtime, self.transport = _in_one_process(strategy, devices, seed)
        elif transport is not None:
            assert rank is not None
            self.local = LocalDevices((rank,), (base,) * strategy.devices)
            runtime, self.transport = Runtime((1,), rank=rank, seed=seed, device=base), transport
        else:
            self.local, runtime, self.transport = _in_a_job(strategy, base, seed)
        super().__init__(strategy.graph.groups.atoms.graph, runtime)
        self.strategy = strategy
        self.context = StepContext(self.transport, self.regathered)
        self.shards: PlacedParameters = PlacedParameters(strategy, self.local, runtime, values)
        self.buffers = {
            n: values[n].detach().to(self.runtime.device, copy=True) for n in self.lowered.buffers
        }
        # The losses of micro-batches, or of pieces, divide by what counts in the whole batch.
        counted = self.lowered.counts or strategy.micro_batches > 1
        self.counts = TargetCounts(strategy.graph.groups, self.runtime.device) if counted else None
        self.after_backward: Callable[[], None] = lambda: None
        self._makers = {v: o for o, op in enumerate(strategy.graph.operators) for v in op.writes}

    def _lower(self, *, evaluating: bool) -> LoweredPart:
        return lower_part(
            self.strategy, self.schedule, self.local, self.runtime, self.context, evaluating=evaluating
        )

    # -- forward ----------------------------------------------------------------------------------

    def _call(
        self, inputs: Sequence[torch.Tensor], *, training: bool, evaluating: bool
    ) -> tuple[torch.Tensor, ...]:
        count = self.strategy.micro_batches
        tapes = [Tape(self._anchor) for _ in range(count)] if training else []
        made: list[dict[Value, torch.Tensor]] = []
        for index in range(count):
            self._begin(index)
            # Nodes find the tape in the context. A call that fails must not leave it to the next one.
            self.context.tape = tapes[index] if training else None
            try:
                results = self._run_lowered(inputs, self.shards.leaves, evaluating=evaluating)
            finally:
                self.context.tape = None
            made.append(dict(zip(self._lowered_for(evaluating).results, results, strict=True)))
        # Every micro-batch has read the old values and made the same new ones (`micro_batch_strategies`).
        if not evaluating:
            self._mutate(made[-1])
            self._send_buffers()
        self._begin(0)
        # All ranks take part in broadcasts, in the order of the model's outputs.
        names = self.source.outputs
        # As with other plans that have micro-batches, only the loss is returned in training.
        names = names[:1] if count > 1 and self.training else names
        outputs = tuple(self._output(name, made, inputs) for name in names)
        self.transport.finish()
        return (self._defer(outputs[0], TapedStep(tapes)), *outputs[1:]) if training else outputs

    def _begin(self, micro_batch: int) -> None:
        """Set the runtime to this micro-batch, forward or backward."""
        self.runtime.micro_batch = micro_batch
        self.context.numbered = micro_batch * self.schedule.transfers

    def _mutate(self, made: Mapping[Value, torch.Tensor]) -> None:
        """Give buffers their new values, or the parts of them that are made here. Backward may still need the
        old values, so they are not overwritten."""
        for name, new in self.source.mutations.items():
            for value in (v for v in made if v.tensor == new):
                if value.code is None:
                    self.buffers[name] = made[value].detach().clone()
                    continue
                changed = self.buffers[name].clone(memory_format=torch.contiguous_format)
                atoms = self.strategy.graph.groups.atoms.atoms[new]
                Cut(atoms, value.code, value.count).put(changed, value.index, made[value])
                self.buffers[name] = changed

    def _send_buffers(self) -> None:
        """Send new values of buffers to the devices that read them in the next step."""
        if self._alone:
            return
        for name, device in self.strategy.sent_buffers.items():
            value = self.buffers[name].contiguous()
            # The old value may be needed by backward, which is still to come.
            place = value if device in self.local.own else torch.empty_like(value)
            self.buffers[name] = self.transport.broadcast(place, device)

    def _output(
        self, name: str, made: Sequence[Mapping[Value, torch.Tensor]], inputs: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Return a result of the model, from the parts of it that the micro-batches have made on this
        process.
        """
        tensor = self.source.tensors[name]
        if tensor.kind != "activation":
            return self._whole_input(name, inputs)
        value = Value(name)
        if value in made[0]:
            parts = [results[value] for results in made]
            own = parts[0]
            if len(parts) > 1:
                # Each micro-batch's mean divides by the whole batch's count, so that losses add up.
                own = torch.stack(parts).sum(0) if self.training else torch.cat(parts)
            own = own.to(self.runtime.device)
        else:
            # A buffer for what the device that makes the output broadcasts.
            own = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device=self.runtime.device)
        if not self._alone:
            # Results are given to all ranks: a script computes with its loss on each of them. Collectives
            # take contiguous tensors only.
            own = self.transport.broadcast(own.contiguous(), self._device_of(value))
        return own

    def _whole_input(self, name: str, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return an output of the model that is no operator's result."""
        available = {
            **dict(zip(self.source.inputs, inputs, strict=True)),
            **self.buffers,
            **self.source.constants,
        }
        if name not in available:
            raise PlanError(
                f"the model returns its parameter {name}, which a placed plan keeps on one device"
            )
        tensor = self.source.tensors[name]
        result: torch.Tensor = available[name].expand(tensor.shape)
        return result

    @property
    def _alone(self) -> bool:
        return len(self.local.own) == self.strategy.devices

    def _device_of(self, value: Value) -> int:
        return self.strategy.placement.device[self._makers[value]]

    # -- backward ---------------------------------------------------------------------------------

    def _finish_backward(self, step: TapedStep, gradient: torch.Tensor) -> None:
        """Run the plan's backward, micro-batch after micro-batch, given the gradient of the loss."""
        self.shards.accumulated.occupy()
        for index, tape in enumerate(step.tapes):
            self._begin(index)
            self._backward_of(tape, gradient)
        self._begin(0)
        self.transport.finish()
        self.shards.accumulated.finish()
        self.after_backward()

    def _backward_of(self, tape: Tape, gradient: torch.Tensor) -> None:
        loss = Value(self.source.outputs[0])
        if loss in self._makers and self._device_of(loss) in self.local.own:
            where = self._device_of(loss)
            tape.add((loss, where), gradient.to(self.local.devices[where]))
        arriving: dict[Value, list[tuple[Place, Arriving]]] = {}
        device, own = self.strategy.placement.device, self.local.own
        for instruction in self.schedule.backward:
            if isinstance(instruction, Transfer):
                self._return(tape, instruction, arriving)
            elif device[instruction] in own:
                # Waited for as late as possible, in front of the operator whose backward needs them, so that
                # messages travel meanwhile.
                for value in self.strategy.graph.operators[instruction].writes:
                    _take_in(tape, arriving.pop(value, ()))
                tape.backward(instruction)

    def _return(
        self, tape: Tape, transfer: Transfer, arriving: dict[Value, list[tuple[Place, Arriving]]]
    ) -> None:
        """Send a gradient back to the device that made the value."""
        value, own = transfer.value, self.local.own
        starts, ends = transfer.source in own, transfer.target in own
        shape = self.strategy.graph.shape(value)
        dtype = getattr(torch, self.source.tensors[value.tensor].dtype)
        if starts:
            gradient = tape.take((value, transfer.source))
            if gradient is None:  # it is waited for all the same
                gradient = torch.zeros(shape, dtype=dtype, device=self.local.devices[transfer.source])
            if ends:
                moved = self.context.move(gradient, self.local.devices[transfer.target])
                tape.add((value, transfer.target), moved)
            else:
                self.context.send(transfer, gradient)
        elif ends:
            where = self.local.devices[transfer.target]
            message = self.context.receive(transfer, shape, dtype, where)
            arriving.setdefault(value, []).append(((value, transfer.target), message))

    # -- between steps ----------------------------------------------------------------------------

    @torch.no_grad()
    def sync_buffers(self) -> None:
        """Bring the buffers that steps change up to date in every process; every process must call it."""
        if self._alone:
            return
        for name, new in self.source.mutations.items():
            value = Value(new)
            if value in self._makers:
                self.transport.broadcast(self.buffers[name], self._device_of(value))


def _take_in(tape: Tape, messages: Sequence[tuple[Place, Arriving]]) -> None:
    """Wait for gradients and put them on the tape, so that nothing here refers to them any longer."""
    for place, message in messages:
        tape.add(place, message.wait())


def _in_one_process(
    strategy: PlacedStrategy, devices: Sequence[torch.device | str], seed: int
) -> tuple[LocalDevices, Runtime, Transport]:
    """Set up all devices of a plan in this process."""
    count = strategy.devices
    if len(devices) != count:
        raise PlanError(f"the plan is for {count} devices, but {len(devices)} are given")
    local = LocalDevices(tuple(range(count)), tuple(torch.device(d) for d in devices))
    return local, Runtime((1,), seed=seed, device=local.first), Alone()


def _in_a_job(
    strategy: PlacedStrategy, device: torch.device, seed: int
) -> tuple[LocalDevices, Runtime, Transport]:
    """Set up this rank's device, in a job with one process per device."""
    runtime = Runtime((1, strategy.devices), seed=seed, device=device)
    local = LocalDevices((runtime.rank,), (device,) * strategy.devices)
    return local, runtime, Job() if runtime.distributed else Alone()
