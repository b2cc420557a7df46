"""One training step of a placed plan, on the devices that this process plays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tensoropt.engine.counts import TargetCounts
from tensoropt.engine.engine import Engine, GatheredParameters
from tensoropt.engine.runtime import Runtime
from tensoropt.errors import PlanError
from tensoropt.placement.execute.cuts import Cut
from tensoropt.placement.execute.lower import Part, Running, check_buffers, lower_part
from tensoropt.placement.execute.order import Transfer, schedule_of
from tensoropt.placement.execute.parameters import HomeParameters, Placing
from tensoropt.placement.execute.tape import Place, Tape
from tensoropt.placement.execute.transport import Alone, Arriving, Job, Transport
from tensoropt.placement.graph import Value
from tensoropt.placement.plans import PlacedStrategy
from tensoropt.ranks.allocator import keep_freed_memory


class _Loss(torch.autograd.Function):
    """The loss as everybody gets it; its backward is the plan's."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, loss: torch.Tensor, engine: PlacedEngine, tape: Tape
    ) -> torch.Tensor:
        ctx.engine, ctx.tape = engine, tape
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        ctx.engine.backward(ctx.tape, gradient)
        return None, None, None, None


class PlacedEngine:
    """Runs a placed plan; has the face of :class:`~tensoropt.engine.engine.Engine`.

    Args:
        strategy: the plan.
        values: the model's parameters and buffers by graph name.
        devices: for one process that plays all devices: where each of them is. None for one process per
            device in a ``torch.distributed`` job.
        seed: of dropout.
        transport: other ways of reaching the other processes than the job's, with ``rank``.

    Attributes:
        training: whether the graph is one of training.
        shards: the parameters that live here and their gradients.
        buffers: every process has all; those that a step changes are up to date where they are used, and
            everywhere after :meth:`settle`.
        part: what runs here.
        home: the first device that this process plays.
        after_backward: called when gradients are complete.
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
    ):
        self.strategy = strategy
        self.source = strategy.graph.groups.atoms.graph
        self.training = self.source.training
        self.schedule = schedule_of(strategy)
        check_buffers(strategy)
        base = next((v.device for v in values.values()), torch.device("cpu"))
        self._play(devices, seed, transport, rank, base)
        self.running = Running(self.transport, GatheredParameters(self.runtime))
        self.runtime.gathered = self.running.keeper.note
        self.part = self._lower(evaluating=False)
        self.shards = HomeParameters(strategy, self.placing, self.runtime, values)
        self.buffers = {n: values[n].detach().clone() for n in self.part.buffers}
        self._anchor = torch.zeros((), requires_grad=True, device=self.home)
        self._counts = TargetCounts(strategy.graph.groups) if self.part.counts else None
        self._evaluator: Part | None = None
        self.after_backward: Callable[[], None] = lambda: None
        self._makers = {v: o for o, op in enumerate(strategy.graph.operators) for v in op.writes}

    def _play(
        self,
        devices: Sequence[torch.device | str] | None,
        seed: int,
        transport: Transport | None,
        rank: int | None,
        base: torch.device,
    ) -> None:
        count = self.strategy.devices
        if devices is not None:
            if len(devices) != count:
                raise PlanError(f"the plan is for {count} devices, but {len(devices)} are given")
            self.placing = Placing(tuple(range(count)), tuple(torch.device(d) for d in devices))
            self.runtime = Runtime((1,), seed=seed, device=self.placing.devices[0])
            self.transport: Transport = Alone()
        elif transport is not None:
            assert rank is not None
            self.placing = Placing((rank,), (base,) * count)
            self.runtime = Runtime((1,), rank=rank, seed=seed, device=base)
            self.transport = transport
        else:
            self.runtime = Runtime((1, count), seed=seed, device=base)
            self.placing = Placing((self.runtime.rank,), (base,) * count)
            self.transport = Job() if self.runtime.distributed else Alone()
        self.home = self.placing.devices[self.placing.here[0]]
        if self.home.type == "cpu":
            keep_freed_memory()

    def _lower(self, *, evaluating: bool) -> Part:
        part = lower_part(
            self.strategy, self.schedule, self.placing, self.runtime, self.running, evaluating=evaluating
        )
        part.module.to(self.home)
        return part

    @property
    def module(self) -> torch.fx.GraphModule:
        """What runs forward here."""
        return self.part.module

    def load(self, values: Mapping[str, torch.Tensor]) -> None:
        """Set parameters and buffers to the model's values."""
        self.shards.load(values)
        for name, buffer in self.buffers.items():
            buffer.copy_(values[name])

    # -- forward ----------------------------------------------------------------------------------

    def __call__(self, *inputs: torch.Tensor, evaluating: bool = False) -> tuple[torch.Tensor, ...]:
        """Results of the model on the global batch ``inputs``; every process passes the same and gets the
        same.

        Args:
            evaluating: without dropout, and with the running statistics of batch norms.
        """
        training = self.training and torch.is_grad_enabled()
        if self._counts is not None:
            self.runtime.counts = self._counts.count(inputs, self.buffers)
        tape = Tape(self._anchor) if training else None
        self.running.tape = tape
        try:
            made = self._run(inputs, evaluating)
        finally:
            self.running.tape = None
        outputs = tuple(self._output(name, made, inputs) for name in self.source.outputs)
        self.transport.finish()
        if tape is None:
            return outputs
        self.runtime.step += 1
        return (_Loss.apply(self._anchor, outputs[0], self, tape), *outputs[1:])

    def _run(self, inputs: Sequence[torch.Tensor], evaluating: bool) -> dict[Value, torch.Tensor]:
        if evaluating and self._evaluator is None:
            self._evaluator = self._lower(evaluating=True)
        part = self._evaluator if evaluating and self._evaluator is not None else self.part
        leaves = [self.shards.leaves[name] for name in part.parameters]
        results = part.module(*inputs, *leaves, *(self.buffers[name] for name in part.buffers))
        made = dict(zip(part.results, results, strict=True))
        if not evaluating:
            self._mutate(made)
        return made

    def _mutate(self, made: Mapping[Value, torch.Tensor]) -> None:
        """Give buffers their new values, or the parts of them that are made here. The old ones may still be
        needed by backward, so they are not written to."""
        for name, new in self.source.mutations.items():
            for value in (v for v in made if v.tensor == new):
                if value.code is None:
                    self.buffers[name] = made[value].detach().clone()
                    continue
                changed = self.buffers[name].clone(memory_format=torch.contiguous_format)
                atoms = self.strategy.graph.groups.atoms.atoms[new]
                Cut(atoms, value.code, value.count).put(changed, value.index, made[value])
                self.buffers[name] = changed

    def _output(
        self, name: str, made: Mapping[Value, torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        tensor = self.source.tensors[name]
        if tensor.kind != "activation":
            return self._given(name, inputs)
        value = Value(name)
        if value in made:
            own = made[value].to(self.home)
        else:
            own = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device=self.home)
        if not self._alone:
            own = self.transport.broadcast(own.contiguous(), self._device_of(value))
        return own

    def _given(self, name: str, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """An output that is no operator's result."""
        known = {
            **dict(zip(self.source.inputs, inputs, strict=True)),
            **self.buffers,
            **self.source.constants,
        }
        if name not in known:
            raise PlanError(
                f"the model returns its parameter {name}, which a placed plan keeps on one device"
            )
        tensor = self.source.tensors[name]
        result: torch.Tensor = known[name].expand(tensor.shape)
        return result

    @property
    def _alone(self) -> bool:
        return len(self.placing.here) == self.strategy.devices

    def _device_of(self, value: Value) -> int:
        return self.strategy.placement.device[self._makers[value]]

    # -- backward ---------------------------------------------------------------------------------

    def backward(self, tape: Tape, gradient: torch.Tensor) -> None:
        """Run the plan's backward, given the gradient of the loss."""
        if tape.done:
            raise RuntimeError("this loss was already used for backward(); run the model again")
        tape.done = True
        self.shards.book.occupy()
        loss = Value(self.source.outputs[0])
        if loss in self._makers and self._device_of(loss) in self.placing.here:
            where = self._device_of(loss)
            tape.add((loss, where), gradient.to(self.placing.devices[where]))
        arriving: dict[Value, list[tuple[Place, Arriving]]] = {}
        device, here = self.strategy.placement.device, self.placing.here
        for instruction in self.schedule.backward:
            if isinstance(instruction, Transfer):
                self._return(tape, instruction, arriving)
            elif device[instruction] in here:
                for value in self.strategy.graph.operators[instruction].writes:
                    for place, message in arriving.pop(value, ()):
                        tape.add(place, message.wait())
                tape.backward(instruction)
        self.transport.finish()
        self.shards.book.finish()
        self.after_backward()

    def _return(
        self, tape: Tape, transfer: Transfer, arriving: dict[Value, list[tuple[Place, Arriving]]]
    ) -> None:
        """A gradient goes back to who made the value."""
        value, here = transfer.value, self.placing.here
        starts, ends = transfer.source in here, transfer.target in here
        shape = self.strategy.graph.shape(value)
        dtype = getattr(torch, self.source.tensors[value.tensor].dtype)
        if starts:
            gradient = tape.take((value, transfer.source))
            if gradient is None:  # it is waited for all the same
                gradient = torch.zeros(shape, dtype=dtype, device=self.placing.devices[transfer.source])
            if ends:
                moved = self.running.move(gradient, self.placing.devices[transfer.target])
                tape.add((value, transfer.target), moved)
            else:
                self.transport.send(transfer, gradient)
        elif ends:
            where = self.placing.devices[transfer.target]
            message = self.transport.receive(transfer, shape, dtype, where)
            arriving.setdefault(value, []).append(((value, transfer.target), message))

    # -- between steps ----------------------------------------------------------------------------

    @torch.no_grad()
    def settle(self) -> None:
        """Bring the buffers that steps change up to date in every process; all of them call it."""
        if self._alone:
            return
        for name, new in self.source.mutations.items():
            value = Value(new)
            if value in self._makers:
                self.transport.broadcast(self.buffers[name], self._device_of(value))


AnyEngine = Engine | PlacedEngine
