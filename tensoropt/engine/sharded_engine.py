"""The engine of sharded plans: micro-batches, unsharded parameters, gradients and buffers of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensor

from tensoropt.engine.batch_share import BatchShare
from tensoropt.engine.engine import Engine, device_of
from tensoropt.engine.gathering import CallAhead, UnshardedParameters
from tensoropt.engine.gradients import Pending, whole_gradient
from tensoropt.engine.lower import Lowered, lower
from tensoropt.engine.lowered_call import CallGraph, LoweredCall, ShardedCall
from tensoropt.engine.parameters import ParameterShards, has_own_shape
from tensoropt.engine.requested_gradients import mark_loss
from tensoropt.engine.runtime import Runtime
from tensoropt.sharding.strategy import Strategy


class ShardedEngine(Engine[Pending]):
    """Runs a strategy on this rank; after every step, buffers are equal on all ranks.

    Args:
        values: whole parameters and buffers by graph name, on any device.
        runtime: this rank's position on the mesh; by default that in the ``torch.distributed`` job.
        device: the device to compute on; by default that of the values.

    Attributes:
        unsharded: the copies of parameters that are gathered once per step.
    """

    strategy: Strategy
    shards: ParameterShards

    def __init__(
        self,
        strategy: Strategy,
        values: Mapping[str, torch.Tensor],
        *,
        runtime: Runtime | None = None,
        seed: int = 0,
        device: torch.device | None = None,
    ):
        job = runtime or Runtime(strategy.mesh, seed=seed, device=device or device_of(values))
        super().__init__(strategy, values, job)
        self.uncompiled = _why_uncompiled(strategy)
        self._lowered_for(False)  # now, as the first call may be one that is compiled
        self.shards = ParameterShards(strategy, self.runtime, values)
        self.unsharded = UnshardedParameters(strategy, self.runtime, self.shards.leaves)
        self.shards.accumulated.delivered = strategy.scattered
        # The new values from the last micro-batch, until the step is over.
        self._new_buffers: dict[str, torch.Tensor] = {}
        self.counts = self._make_counts()
        self._in_backward = False
        # The calls whose backward has begun, and the number that still wait for theirs.
        self._calls: list[CallAhead] = []
        self._waiting = 0

    def _lower(self, *, evaluating: bool) -> Lowered:
        return lower(self.strategy, self.runtime, evaluating=evaluating, share=self.share)

    def lowered_call(self, call: CallGraph) -> LoweredCall:
        return ShardedCall(self.strategy, call, self.runtime, self.share.axes)

    def share_batch(self) -> BatchShare:
        self.share = BatchShare(self.strategy, self.runtime)
        if self.share.world > 1:
            self._lowered.clear()
            self._lowered_for(False)
        return self.share

    def shown_otherwise(self) -> str:
        parameters = self.source.parameters
        keys = [str(tensor.key) for tensor in parameters if not has_own_shape(self.strategy, tensor.name)]
        if not keys:
            return ""
        more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
        return (
            f"{', '.join(keys[:3])}{more} are shown in other shapes than the model's, because PyTorch "
            "cannot express how this plan splits them: where an optimizer's groups depend on p.dim() or "
            "p.ndim, use len(tensoropt.original_shape(p))"
        )

    def parameter_tensors(self) -> list[torch.Tensor]:
        return [*super().parameter_tensors(), *self.unsharded.values.values()]

    def gradient_tensors(self) -> list[torch.Tensor]:
        return [*super().gradient_tensors(), *self.unsharded.unreduced.values()]

    # -- forward ----------------------------------------------------------------------------------

    def _call(
        self, inputs: Sequence[torch.Tensor], *, training: bool, evaluating: bool
    ) -> tuple[torch.Tensor, ...]:
        # At the beginning of a call rather than after the optimizer's step: whatever changed the shards is
        # seen.
        self.unsharded.gather()
        if self.strategy.micro_batches > 1:
            return self._micro_batches(inputs, training, evaluating)
        self.runtime.micro_batch = 0
        outputs = self._micro_batch(inputs, evaluating)
        self._take_buffers()
        # A loss that reaches no trained parameter has no backward to prepare for.
        if training and outputs[0].requires_grad:
            # A tensor's hook runs before everything that follows the tensor in backward: nothing is
            # accumulated yet.
            outputs[0].register_hook(self._begin_backward)
            if not torch.compiler.is_compiling():
                mark_loss(outputs[0])
        return outputs

    def _gather_ahead(self, evaluating: bool) -> None:
        ahead = self._lowered_for(evaluating).ahead
        if not ahead and not self.unsharded.blocks and not self.strategy.scattered:
            return
        behind = self.strategy.blocks.behind
        self.runtime.ahead = CallAhead(
            self.runtime, behind, ahead, self._deliver, self._calls, self._copies_to_make()
        )
        self._waiting += torch.is_grad_enabled()

    def _copies_to_make(self) -> UnshardedParameters | None:
        return self.unsharded if self.runtime.micro_batch == 0 else None

    def _deliver(self, name: str, gradient: torch.Tensor) -> None:
        self.shards.accumulated.add_late(name, gradient.to(self.shards.leaves[name].dtype))
        self.unsharded.scattered(name)

    def _finish_ahead(self) -> None:
        while self._calls:
            self._calls.pop(0).finish()
        self._waiting = 0

    def _micro_batch(self, inputs: Sequence[torch.Tensor], evaluating: bool) -> tuple[torch.Tensor, ...]:
        self._gather_ahead(evaluating)
        # Where gradients are reduced last, the unsharded parameter is the leaf that collects them.
        leaves = {name: self.unsharded.values[name] for name in self.unsharded.unreduced}
        results = self._run_lowered(inputs, {**self.shards.leaves, **leaves}, evaluating=evaluating)
        count = len(self.lowered.program.outputs)
        if not evaluating and self.runtime.micro_batch == self.strategy.micro_batches - 1:
            self._new_buffers = dict(zip(self.source.mutations, results[count:], strict=True))
        own = len(self.source.outputs)
        return (*map(_in_own_memory, results[:own]), *results[own:count])

    def _take_buffers(self) -> None:
        for name, value in self._new_buffers.items():
            # Not written in place, as autograd may have saved the old value; and not copied, as the new one
            # has memory of its own.
            self.buffers[name] = value.detach()
        self._new_buffers = {}

    def _micro_batches(
        self, inputs: Sequence[torch.Tensor], training: bool, evaluating: bool
    ) -> tuple[torch.Tensor, ...]:
        step = Pending()
        if training:
            self.shards.accumulated.occupy(step)
            self.unsharded.clear()
        parts: list[tuple[torch.Tensor, ...]] = []
        for index in range(self.strategy.micro_batches):
            self.runtime.micro_batch = index
            outputs = self._micro_batch(inputs, evaluating)
            if training:
                self.shards.accumulated.one_call = True
                self.unsharded.last = index == self.strategy.micro_batches - 1
                if self.unsharded.last:
                    self.shards.accumulated.begin_last()
                # Only the loss is handed out in training: what else a micro-batch returns would keep its
                # graph.
                outputs[0].backward()
                self._finish_ahead()
                outputs = (outputs[0].detach(),)
            parts.append(outputs)
        self.runtime.micro_batch = 0
        self._take_buffers()
        # Of a training graph only the loss is handed out, with gradients or without.
        results = zip(*(each[:1] if self.training else each for each in parts), strict=True)
        outputs = tuple(map(self._of_batch, results))
        if not training:
            return outputs
        self.unsharded.reduce_last(self.shards.accumulated)
        self.shards.accumulated.hide()
        return (self._defer(outputs[0], step),)

    # -- backward ---------------------------------------------------------------------------------

    def _begin_backward(self, grad: torch.Tensor) -> torch.Tensor:
        # Several losses of one backward each call this; room in the buckets is made once.
        if not self._in_backward:
            self._in_backward = True
            self.shards.accumulated.one_call = self._waiting == 1
            self.shards.accumulated.occupy()
            self.unsharded.clear()
            # Gradients arrive in whatever order autograd chooses; this is called when the last one has.
            torch.autograd.Variable._execution_engine.queue_callback(self._end_of_backward)
        return whole_gradient(grad)

    def _end_of_backward(self) -> None:
        self._in_backward = False
        self._finish_ahead()
        self.unsharded.reduce_last(self.shards.accumulated)
        self.shards.accumulated.finish()

    def _finish_backward(self, step: Pending, gradient: torch.Tensor) -> None:
        self.shards.accumulated.recall(step)
        # In the usual `loss.backward()`, multiplying by 1 would go over all gradients for nothing.
        self.shards.accumulated.finish(None if _is_one(gradient) else gradient)


def _why_uncompiled(strategy: Strategy) -> str:
    if strategy.unsharded:
        return "a plan that gathers parameters once per step (ZeRO-1 and 2) keeps them from call to call"
    if strategy.recomputed and strategy.micro_batches > 1:
        return "a plan that recomputes blocks in several micro-batches runs their backward inside a call"
    return ""


def _in_own_memory(value: torch.Tensor) -> torch.Tensor:
    """Copy a scalar loss whose storage is larger: that of PyTorch's mse_loss would keep all terms alive."""
    if torch.compiler.is_compiling():
        return value
    if value.numel() == 1 and value.untyped_storage().nbytes() > value.element_size():
        return value.clone()
    return value


def _is_one(grad: torch.Tensor) -> bool:
    return isinstance(grad, FakeTensor) or float(grad) == 1.0
