"""One training step of a lowered plan: micro-batches, gradients, buffers.

With one micro-batch a call builds an ordinary autograd graph. With several, forward *and* backward of
every micro-batch happen inside the call (that is what saves the memory), gradients wait in the
buckets, and the user's ``loss.backward()`` scales and reduces them: the calling convention is kept.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from tensoropt.engine.counts import TargetCounts
from tensoropt.engine.gradients import Pending
from tensoropt.engine.lower import Lowered, lower
from tensoropt.engine.parameters import ParameterShards
from tensoropt.engine.runtime import Runtime
from tensoropt.engine.unsharded import HeldCopies
from tensoropt.ranks.allocator import keep_freed_memory
from tensoropt.sharding.reshard.redistribute import EdgeSpec, travel
from tensoropt.sharding.strategy import Strategy


class GatheredParameters:
    """Keeps autograd from holding gathered or cast parameters: what it would save is made again.

    A saved tensor that lies in the storage of such a parameter is replaced by a note; backward unpacks
    the note by casting the stored shard and issuing the edge's gather once more (ZeRO stage 3).
    """

    def __init__(self, runtime: Runtime):
        self.runtime = runtime
        self._known: dict[int, tuple[weakref.ref, torch.Tensor, EdgeSpec]] = {}

    def note(self, gathered: torch.Tensor, shard: torch.Tensor, spec: EdgeSpec) -> None:
        key = gathered.untyped_storage()._cdata
        self._known[key] = (weakref.ref(gathered), shard.detach(), spec)

    def pack(self, value: torch.Tensor) -> Any:
        known = self._known.get(value.untyped_storage()._cdata) if self._known else None
        if known is None or known[0]() is None or isinstance(value, torch.nn.Parameter):
            return value
        _, shard, spec = known
        micro = self.runtime.micro_batch
        return (shard, spec, micro, tuple(value.shape), value.stride(), value.storage_offset())

    def unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        shard, spec, micro, shape, stride, offset = packed
        self.runtime.micro_batch = micro
        with torch.no_grad():
            whole = travel(self.runtime, shard, spec)
        return whole.as_strided(shape, stride, offset)


class _Deferred(torch.autograd.Function):
    """The loss of a step whose backward already ran; its own backward scales and reduces."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, loss: torch.Tensor, engine: Engine, step: Pending
    ) -> torch.Tensor:
        ctx.engine, ctx.step = engine, step
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        ctx.engine.finish(grad, ctx.step)
        return None, None, None, None


class Engine:
    """Runs a strategy on this rank.

    Attributes:
        training: whether the graph is one of training.
        shards: the parameters and their gradients.
        held: copies of parameters that serve a whole step.
        buffers: whole on every rank, updated after backward.
    """

    def __init__(
        self,
        strategy: Strategy,
        values: Mapping[str, torch.Tensor],
        *,
        runtime: Runtime | None = None,
        seed: int = 0,
    ):
        self.strategy = strategy
        self.training = strategy.graph.atoms.graph.training
        device = next((v.device for v in values.values()), None)
        self.runtime = runtime or Runtime(strategy.mesh, seed=seed, device=device)
        if self.runtime.device.type == "cpu":
            keep_freed_memory()
        self.keeper = GatheredParameters(self.runtime)
        self.runtime.gathered = self.keeper.note
        self.lowered: Lowered = lower(strategy, self.runtime)
        self.lowered.module.to(self.runtime.device)
        self.shards = ParameterShards(strategy, self.runtime, values)
        self.held = HeldCopies(strategy, self.runtime, self.shards.leaves)
        self.buffers = {name: values[name].detach().clone() for name in self.lowered.buffers}
        self.gathers = any(node.meta["edge"].kind == "parameter" for node in self._edges())
        self._in_backward = False
        self._anchor = torch.zeros((), requires_grad=True, device=self.runtime.device)
        self._counts = TargetCounts(strategy.graph) if strategy.micro_batches > 1 else None
        self._evaluator: torch.fx.GraphModule | None = None

    @property
    def module(self) -> torch.fx.GraphModule:
        """What runs forward."""
        return self.lowered.module

    def settle(self) -> None:
        """Buffers are the same on every rank after every step."""

    def _edges(self) -> list[torch.fx.Node]:
        return [node for node in self.lowered.module.graph.nodes if "edge" in node.meta]

    def load(self, values: Mapping[str, torch.Tensor]) -> None:
        """Set parameters and buffers to whole values."""
        self.shards.load(values)
        for name, buffer in self.buffers.items():
            buffer.copy_(values[name])

    # -- calls ------------------------------------------------------------------------------------

    def __call__(self, *inputs: torch.Tensor, evaluating: bool = False) -> tuple[torch.Tensor, ...]:
        """Results of the model on the global batch ``inputs`` (every rank passes the same).

        Args:
            evaluating: without dropout, and with the running statistics of batch norms.
        """
        training = self.training and torch.is_grad_enabled()
        self.held.gather()
        if self.strategy.micro_batches > 1:
            return self._micro_batches(inputs, training, evaluating)
        self.runtime.micro_batch = 0
        outputs = self._run(inputs, evaluating)
        self.runtime.step += training
        if training and outputs[0].requires_grad:
            outputs[0].register_hook(self._begin_backward)
        return outputs

    def _module(self, evaluating: bool) -> torch.fx.GraphModule:
        if not evaluating:
            return self.lowered.module
        if self._evaluator is None:
            self._evaluator = lower(self.strategy, self.runtime, evaluating=True).module.to(
                self.runtime.device
            )
        return self._evaluator

    def _run(self, inputs: Sequence[torch.Tensor], evaluating: bool) -> tuple[torch.Tensor, ...]:
        module = self._module(evaluating)
        waiting = {name: self.runtime.held[name] for name in self.held.waiting}
        parameters = {**self.shards.leaves, **waiting}
        arguments = (*inputs, *parameters.values(), *self.buffers.values())
        if self.gathers and torch.is_grad_enabled():
            with torch.autograd.graph.saved_tensors_hooks(self.keeper.pack, self.keeper.unpack):
                results = module(*arguments)
        else:
            results = module(*arguments)
        count = len(self.lowered.outputs)
        if not evaluating:
            for name, value in zip(self.lowered.mutations, results[count:], strict=True):
                self.buffers[name] = value.detach().clone()
        return results[:count]

    def _micro_batches(
        self, inputs: Sequence[torch.Tensor], training: bool, evaluating: bool
    ) -> tuple[torch.Tensor, ...]:
        if self._counts is not None:
            self.runtime.counts = self._counts.count(inputs, self.buffers)
        step = Pending()
        if training:
            self.shards.book.occupy(step)
            self.held.clear()
        parts: list[tuple[torch.Tensor, ...]] = []
        for index in range(self.strategy.micro_batches):
            self.runtime.micro_batch = index
            outputs = self._run(inputs, evaluating)
            if training:
                outputs[0].backward()
                outputs = (outputs[0].detach(),)
            parts.append(outputs)
        self.runtime.micro_batch = 0
        self.runtime.step += training
        if not self.training:
            return tuple(torch.cat(values) for values in zip(*parts, strict=True))
        loss = torch.stack([p[0] for p in parts]).sum(0)
        if not training:
            return (loss,)
        self.held.give_back(self.shards.book)
        self.shards.book.hide()
        return (_Deferred.apply(self._anchor, loss, self, step),)

    # -- gradients --------------------------------------------------------------------------------

    def _begin_backward(self, grad: torch.Tensor) -> None:
        """The loss's gradient is known, nothing has been accumulated yet."""
        if not self._in_backward:
            self._in_backward = True
            self.shards.book.occupy()
            self.held.clear()
            torch.autograd.Variable._execution_engine.queue_callback(self._end_of_backward)

    def _end_of_backward(self) -> None:
        self._in_backward = False
        self.held.give_back(self.shards.book)
        self.shards.book.finish()

    def finish(self, grad: torch.Tensor, step: Pending) -> None:
        """Scale what the micro-batches accumulated by the loss's incoming gradient, and reduce."""
        if step.done:
            raise RuntimeError("this loss was already used for backward(); run the model again")
        self.shards.book.recall(step)
        step.done = True
        if not _is_one(grad):
            self.shards.book.scale(grad)
        self.shards.book.finish()


def _is_one(grad: torch.Tensor) -> bool:
    """Whether a loss's gradient is 1; a fake one has no value, and only checks make it, without a scale."""
    return isinstance(grad, FakeTensor) or float(grad) == 1.0
