"""One training step of a placed plan, on the devices of this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from tensoropt.engine.engine import Engine, TargetCounts, device_of
from tensoropt.engine.lower import Lowered
from tensoropt.engine.lowered_call import CallGraph, LoweredCall, given_result
from tensoropt.engine.runtime import Runtime
from tensoropt.errors import PlanError
from tensoropt.placement.execute import lower
from tensoropt.placement.execute.operators import Cut
from tensoropt.placement.execute.placed_call import PlacedCall
from tensoropt.placement.execute.transport import Alone, Arriving, Job, Transport
from tensoropt.placement.program import schedule_of
from tensoropt.placement.strategy import PlacedStrategy


class PlacedEngine(Engine[lower.TapedStep]):
    """Runs a placed plan in one process per device, or in one process with all devices.

    With several micro-batches, all forwards run in the model's call and all backwards in ``backward()``; in
    training, the call then returns only the loss.

    Args:
        values: parameters and buffers by graph name.
        transport: sends messages between devices in place of ``torch.distributed``; requires ``rank``.
        device: this rank's device; by default that of the values.

    Raises:
        PlanError: the plan's order of operators and messages deadlocks, or there are too few GPUs.
    """

    uncompiled = "a placed plan runs every operator, forward and backward, when the plan says"

    strategy: PlacedStrategy
    shards: lower.PlacedParameters

    def __init__(
        self,
        strategy: PlacedStrategy,
        values: Mapping[str, torch.Tensor],
        *,
        seed: int = 0,
        transport: Transport | None = None,
        rank: int | None = None,
        device: torch.device | None = None,
    ):
        self.schedule = schedule_of(strategy)
        self.transport: Transport
        base, count = device or device_of(values), strategy.devices
        if transport is not None:
            assert rank is not None
            self.local = lower.LocalDevices((rank,), (base,) * count)
            runtime, self.transport = Runtime((1,), rank=rank, seed=seed, device=base), transport
        elif dist.is_initialized():
            runtime = Runtime((1, count), seed=seed, device=base)
            self.local = lower.LocalDevices((runtime.rank,), (base,) * count)
            self.transport = Job() if runtime.distributed else Alone(self.local.devices)
        else:
            where = _all_devices(strategy, base)
            self.local = lower.LocalDevices(tuple(range(count)), where)
            runtime, self.transport = Runtime((1,), seed=seed, device=self.local.first), Alone(where)
        super().__init__(strategy, values, runtime)
        self.context = lower.StepContext(strategy, self.local, self.transport)
        self.shards = lower.PlacedParameters(strategy, self.local, runtime, self.transport, values)
        # The losses of micro-batches, or of pieces, divide by what counts in the whole batch.
        whole_counts = TargetCounts(strategy.graph, runtime.device) if self.lowered.program.counts else None
        self.counts = whole_counts or self._make_counts()

    def _lower(self, *, evaluating: bool) -> Lowered:
        return lower.lower_placed(self.schedule.forward, self.runtime, self.context, evaluating=evaluating)

    def lowered_call(self, call: CallGraph) -> LoweredCall:
        return PlacedCall(self.strategy, call, self.local, self.transport, self.runtime, self._on_all_ranks)

    # -- forward ----------------------------------------------------------------------------------

    def _call(
        self, inputs: Sequence[torch.Tensor], *, training: bool, evaluating: bool
    ) -> tuple[torch.Tensor, ...]:
        count = self.strategy.micro_batches
        tapes = [lower.Tape(self._anchor) for _ in range(count)] if training else []
        made: list[dict[str, torch.Tensor]] = []
        for index in range(count):
            self._begin(index)
            # Nodes find the tape in the context. A call that fails must not leave it to the next one.
            self.context.tape = tapes[index] if training else None
            try:
                with torch.set_grad_enabled(training):
                    results = self._run_lowered(inputs, self.shards.leaves, evaluating=evaluating)
            finally:
                self.context.tape = None
            made.append(dict(zip(self._lowered_for(evaluating).program.outputs, results, strict=True)))
        # Every micro-batch has read the old values and made the same new ones (`micro_batch_strategies`).
        if not evaluating:
            self._mutate(made[-1])
            self._send_buffers()
        self._begin(0)
        # All ranks take part in broadcasts, in the order of the model's outputs.
        outputs = tuple(self._output(name, made, inputs) for name in self.source.outputs)
        self.transport.finish()
        return (self._defer(outputs[0], lower.TapedStep(tapes)), *outputs[1:]) if training else outputs

    def _begin(self, micro_batch: int) -> None:
        self.runtime.micro_batch = micro_batch
        self.context.begin(micro_batch)

    def _mutate(self, made: Mapping[str, torch.Tensor]) -> None:
        values = [self.strategy.placed_graph.values[name] for name in made]
        for name, new in self.source.mutations.items():
            for value in (v for v in values if v.tensor == new):
                if value.code is None:
                    self.buffers[name] = made[new].detach().clone()
                    continue
                changed = self.buffers[name].clone(memory_format=torch.contiguous_format)
                atoms = self.strategy.graph.atoms.atoms[new]
                Cut(atoms, value.code, value.count).put(changed, value.index, made[value.name])
                self.buffers[name] = changed

    def _broadcast(self, value: torch.Tensor, place: int) -> torch.Tensor:
        return self.transport.broadcast(value, place)

    def _send_buffers(self) -> None:
        for name, device in self.strategy.sent_buffers.items():
            # The old value may be needed by backward, which is still to come.
            if device not in self.local.own:
                self.buffers[name] = torch.empty_like(self.buffers[name])
            self._send_buffer(name, device)

    def _output(
        self, name: str, made: Sequence[Mapping[str, torch.Tensor]], inputs: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        tensor = self.source.tensors[name]
        if tensor.kind != "activation":
            return given_result(self.source, name, inputs, self.buffers.__getitem__)
        parts = [results[name] for results in made if name in results]
        own = None
        if parts:
            own = (parts[0] if len(parts) == 1 else self._of_batch(parts)).to(self.runtime.device)
        maker = self.strategy.maker(name)
        assert maker is not None, "results are made whole"
        return self._on_all_ranks(tensor, own, maker)

    # -- backward ---------------------------------------------------------------------------------

    def _finish_backward(self, step: lower.TapedStep, gradient: torch.Tensor) -> None:
        self.shards.accumulated.occupy()
        for index, tape in enumerate(step.tapes):
            self._begin(index)
            self._backward_of(tape, gradient)
        self._begin(0)
        self.transport.finish()
        self.shards.accumulated.finish()

    def _backward_of(self, tape: lower.Tape, gradient: torch.Tensor) -> None:
        loss = self.source.outputs[0]
        where = self.strategy.maker(loss)
        if where is not None and where in self.local.own:
            tape.add((loss, where), gradient.to(self.local.devices[where]))
        arriving: dict[str, list[Arriving]] = {}
        for is_operator, number in self.schedule.backward:
            if not is_operator:
                self._return(tape, number, arriving)
            elif (device := self.strategy.placement.device[number]) in self.local.own:
                # Messages are waited for as late as possible, in front of the operator whose backward needs
                # them, so that they travel meanwhile.
                for value in self.strategy.placed_graph.operators[number].writes:
                    messages = arriving.pop(value.name, [])
                    while messages:  # so that nothing here refers to a gradient any longer
                        tape.add((value.name, device), messages.pop(0)())
                tape.backward(number)

    def _return(self, tape: lower.Tape, number: int, arriving: dict[str, list[Arriving]]) -> None:
        name, source, target, _ = self.strategy.transfers[number]
        if source in self.local.own:
            gradient = tape.take((name, source))
            if gradient is None:  # the receiver waits for it in any case
                shape, dtype = self.context.form(name)
                gradient = torch.zeros(shape, dtype=dtype, device=self.local.devices[source])
            self.context.send(number, gradient)
        if target in self.local.own:
            message = self.context.receive(number)
            if source in self.local.own:
                tape.add((name, target), message())
            else:
                arriving.setdefault(name, []).append(message)


def _all_devices(strategy: PlacedStrategy, like: torch.device) -> tuple[torch.device, ...]:
    """Return the PyTorch device for each device of the plan; PlanError if there are too few GPUs."""
    if like.type != "cuda" or strategy.devices == 1:
        return (like,) * strategy.devices
    gpu_count = torch.cuda.device_count()
    if gpu_count < strategy.devices:
        raise PlanError(
            f"the plan is for {strategy.devices} devices, but this process sees {gpu_count} "
            f"{'GPU' if gpu_count == 1 else 'GPUs'}; start one process per device with torchrun "
            f'--nproc-per-node {strategy.devices}, or run it on the CPU (device="cpu")'
        )
    return tuple(torch.device("cuda", i) for i in range(strategy.devices))
