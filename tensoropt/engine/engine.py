"""The engine that runs a plan on one rank; each kind of plan has a subclass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Generic, TypeVar

import torch
from torch.autograd.graph import saved_tensors_hooks

from tensoropt.engine.batch_share import BatchShare
from tensoropt.engine.gradients import DeferredStep, defer_backward
from tensoropt.engine.lower import Lowered, lower
from tensoropt.engine.lowered_call import CallGraph, LoweredCall
from tensoropt.engine.other_batches import ignore_index
from tensoropt.engine.parameters import LocalParameters
from tensoropt.engine.recompute import RegatheredParameters
from tensoropt.engine.runtime import Runtime
from tensoropt.errors import PlanError
from tensoropt.graph import Tensor
from tensoropt.ops.families.losses import is_mean, target_mass
from tensoropt.ops.layouts import REPLICATE
from tensoropt.ops.registry import spec_of
from tensoropt.sharding.configurations import Configuration
from tensoropt.sharding.groups import GroupGraph
from tensoropt.sharding.strategy import ParallelStrategy, Strategy


def unsplit_strategy(graph: GroupGraph) -> Strategy:
    """Return the strategy that runs the whole model on one device."""
    return Strategy(
        graph=graph,
        mesh=(1,),
        configurations={g.name: Configuration(g, (g.unsplit,)) for g in graph.groups},
        hubs=dict.fromkeys(graph.hubs, (REPLICATE,)),
        stored={t.name: (REPLICATE,) for t in graph.atoms.graph.parameters},
    )


class TargetCounts:
    """Counts the targets of each mean loss in a whole batch, by which every micro-batch's loss is divided.

    Attributes:
        reads: the names of the inputs and buffers from which the targets are computed.

    Raises:
        PlanError: the targets depend on parameters.
    """

    def __init__(self, graph: GroupGraph, device: torch.device):
        source = graph.atoms.graph
        self.reads = frozenset[str]()
        self.losses = [op for op in source.operators if spec_of(op.target).counted_targets and is_mean(op)]
        self.module = self._targets(graph, device) if self.losses else None

    def _targets(self, graph: GroupGraph, device: torch.device) -> torch.fx.GraphModule:
        # Lowered whole and then reduced to the targets, which are thus made by the very calls of the model.
        lowered = lower(unsplit_strategy(graph), Runtime((1,), device=device))
        kept, names = lowered.module.graph, {op.name for op in self.losses}
        losses = {n.meta["operator"]: n for n in kept.nodes if n.meta.get("operator") in names}
        (output,) = kept.find_nodes(op="output")
        output.args = (tuple((losses[op.name].args[1], _weight_of(losses[op.name])) for op in self.losses),)
        # All arguments keep their places, read or not.
        kept.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
        self.parameters = len(lowered.program.parameters)
        self.reads = frozenset(str(node.target) for node in kept.find_nodes(op="placeholder") if node.users)
        if not self.reads.isdisjoint(lowered.program.parameters):
            raise PlanError(
                "the targets of the loss depend on parameters, so they cannot be counted before the "
                "micro-batches run; use a plan with 1 micro-batch that does not cut the loss"
            )
        # Constants among the targets (a mask, a shift) are on the CPU as captured.
        return torch.fx.GraphModule(lowered.module, kept).to(device)

    @torch.no_grad()
    def count(
        self, inputs: Sequence[torch.Tensor], buffers: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return loss operator -> number (or total weight) of its targets that are not ignored."""
        if self.module is None:
            return {}
        # The kept part reads no parameter (_targets refuses it), but keeps their places among the arguments.
        targets = self.module(*inputs, *(None for _ in range(self.parameters)), *buffers.values())
        return {
            op.name: target_mass(target, weight, ignore_index(op))
            for op, (target, weight) in zip(self.losses, targets, strict=True)
        }


def _weight_of(call: torch.fx.Node) -> Any:
    return call.args[2] if len(call.args) > 2 else call.kwargs.get("weight")


_S = TypeVar("_S", bound=DeferredStep)


class Engine(ABC, Generic[_S]):
    """Runs a plan on this rank: calls of the model, backward, parameters and buffers.

    Each kind of plan is a subclass with its own :meth:`_lower` and :meth:`_call`. Scripts, checkpoints and
    checks use a running plan only through this class.

    Args:
        values: whole parameters and buffers by graph name, on any device.

    Attributes:
        uncompiled: the reason why ``torch.compile`` must skip the model; "" if it may compile it.
        regathered: the saved-tensor hooks that keep autograd from saving gathered and cast parameters.
        buffers: all buffers by graph name; only ranks that read a buffer have its current value.
        after_backward: a function that is called when a deferred backward has made all gradients.
        shards: this rank's parts of parameters and gradients.
        counts: the counter of targets in the whole batch, by whose number mean losses are divided; None if
            losses need no count before the step.
        share: the rows of the global batch that this rank passes to the model; all rows, unless
            :meth:`share_batch` has divided them among ranks.
    """

    uncompiled: str = ""

    shards: LocalParameters
    counts: TargetCounts | None

    def __init__(self, strategy: ParallelStrategy, values: Mapping[str, torch.Tensor], runtime: Runtime):
        self.strategy = strategy
        self.source = strategy.graph.atoms.graph
        self.training = self.source.training
        self.runtime = runtime
        self.share = BatchShare(None, runtime)
        self.buffers = {
            tensor.name: values[tensor.name].detach().to(runtime.device, copy=True)
            for tensor in self.source.tensors.values()
            if tensor.kind == "buffer"
        }
        self.after_backward: Callable[[], None] = lambda: None
        self.regathered = RegatheredParameters(runtime)
        runtime.gathered, runtime.kept = self.regathered.note, self.regathered.keep
        runtime.saving = self.regathered.pack, self.regathered.unpack
        self._anchor = torch.zeros((), requires_grad=True, device=runtime.device)
        # Lowered at its first use: most jobs never evaluate, and subclasses need their strategy for it.
        self._lowered: dict[bool, Lowered] = {}

    # -- hooks for subclasses ----------------------------------------------------------------------

    @abstractmethod
    def _lower(self, *, evaluating: bool) -> Lowered:
        """Lower the plan to this rank's module; with ``evaluating``, as in eval mode."""

    @abstractmethod
    def _call(
        self, inputs: Sequence[torch.Tensor], *, training: bool, evaluating: bool
    ) -> tuple[torch.Tensor, ...]:
        """Return the model's results on a batch; with ``training``, the loss supports ``backward()``."""

    @abstractmethod
    def lowered_call(self, call: CallGraph) -> LoweredCall:
        """Lower the graph of a call in eval mode; PlanError if it splits a sharded parameter's dim into other
        factors than the plan."""

    def _broadcast(self, value: torch.Tensor, place: int) -> torch.Tensor:
        """Broadcast ``value`` from device group number ``place``; a contiguous ``value`` receives it."""
        return value

    def _make_counts(self) -> TargetCounts | None:
        # With one micro-batch the loss's own kernel counts, by a collective where rows are split.
        several = self.strategy.micro_batches > 1
        return TargetCounts(self.strategy.graph, self.runtime.device) if several else None

    def shown_otherwise(self) -> str:
        """Return a warning if scripts see parameters in another shape than the model's; otherwise ""."""
        return ""

    def lowered_modules(self) -> list[torch.fx.GraphModule]:
        """Return every module that runs on this rank; the first arguments of each are the model's inputs."""
        return [self.module]

    def reads(self) -> list[bool]:
        """Return, for each of the model's inputs, whether this rank reads it."""
        modules = self.lowered_modules()
        if self.counts is not None and self.counts.module is not None:
            modules.append(self.counts.module)
        is_read = [False] * len(self.source.inputs)
        for module in modules:
            places = [node for node in module.graph.nodes if node.op == "placeholder"]
            is_read = [read or bool(p.users) for read, p in zip(is_read, places, strict=False)]
        return is_read

    def share_batch(self) -> BatchShare:
        """Let every rank pass only its rows of the global batch from now on; return the division into rows.

        Plans whose ranks run different operators keep passing the global batch.
        """
        return self.share

    # -- calls ------------------------------------------------------------------------------------

    def __call__(self, *inputs: torch.Tensor, evaluating: bool = False) -> tuple[torch.Tensor, ...]:
        """Run the model on the global batch; every rank gets the same results.

        Args:
            inputs: the graph's inputs: whole, or only this rank's rows after :meth:`share_batch`.
            evaluating: whether to run in eval mode.
        """
        training = self.training and torch.is_grad_enabled()
        # A plan has gradients of parameters only. Each rank would compute that of an input for its own part,
        # and gather parameters again for it.
        inputs = tuple(value.detach() if value.requires_grad else value for value in inputs)
        if self.counts is not None:
            counted = self.share.with_whole(inputs, self.counts.reads)
            self.runtime.counts = self.counts.count(counted, self.buffers)
        own = self.share.with_whole(inputs, self.share.gathered)
        outputs = self._call(own, training=training, evaluating=evaluating)
        # A call without gradients is no step. Backward comes after this: what it makes again goes back to the
        # step of its forward (`recompute.py`).
        self.runtime.step += training
        return outputs

    def _run_lowered(
        self, inputs: Sequence[torch.Tensor], parameters: Mapping[str, torch.Tensor], *, evaluating: bool
    ) -> tuple[torch.Tensor, ...]:
        lowered = self._lowered_for(evaluating)
        arguments = [parameters[name] for name in lowered.program.parameters]
        arguments += [self.buffers[name] for name in lowered.program.buffers]
        # Hooks cost time for every saved tensor: only where something is made again.
        drops = lowered.gathers and torch.is_grad_enabled()
        again = self.regathered
        with saved_tensors_hooks(again.pack, again.unpack) if drops else nullcontext():
            results: tuple[torch.Tensor, ...] = lowered.module(*inputs, *arguments)
        return results

    def _defer(self, loss: torch.Tensor, step: _S) -> torch.Tensor:
        return defer_backward(self._anchor, loss, step, self._end_backward)

    def _end_backward(self, step: _S, gradient: torch.Tensor) -> None:
        self._finish_backward(step, gradient)
        self.after_backward()

    @abstractmethod
    def _finish_backward(self, step: _S, gradient: torch.Tensor) -> None:
        """Run the backward of a step that :meth:`_defer` postponed, given the gradient of its loss."""

    # -- results and buffers -----------------------------------------------------------------------

    def _of_batch(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        # Inference: outputs have the batch in front, or micro-batches would have been refused
        # (configurations.py). In training each micro-batch's mean divides by the whole batch's count, so
        # losses add up.
        return torch.stack(list(parts)).sum(0) if self.training else torch.cat(list(parts))

    def _on_all_ranks(self, tensor: Tensor, value: torch.Tensor | None, place: int) -> torch.Tensor:
        """Broadcast a tensor's ``value`` from device group number ``place``; other ranks pass None."""
        dtype = getattr(torch, tensor.dtype)
        if value is None:
            value = torch.empty(tensor.shape, dtype=dtype, device=self.runtime.device)
        # Not all backends send booleans.
        sent = value.to(torch.uint8) if dtype == torch.bool else value
        return self._broadcast(sent, place).to(dtype)

    @torch.no_grad()
    def _send_buffer(self, name: str, place: int) -> None:
        value = self.buffers[name]
        sent = self._broadcast(value, place)
        if sent is not value:
            value.copy_(sent)

    def sync_buffers(self) -> None:
        """Broadcast the buffers that steps change, so that all ranks have their last values; a collective."""
        for name, new in self.source.mutations.items():
            if (maker := self.strategy.maker(new)) is not None:
                self._send_buffer(name, self.strategy.place_of(maker))

    # -- lowered modules ---------------------------------------------------------------------------

    def _lowered_for(self, evaluating: bool) -> Lowered:
        if evaluating not in self._lowered:
            lowered = self._lower(evaluating=evaluating)
            lowered.module.to(self.runtime.device)
            self._lowered[evaluating] = lowered
        return self._lowered[evaluating]

    @property
    def lowered(self) -> Lowered:
        """The lowered plan, in the mode in which the graph was captured (training or inference)."""
        return self._lowered_for(False)

    @property
    def module(self) -> torch.fx.GraphModule:
        return self.lowered.module

    # -- parameters and buffers --------------------------------------------------------------------

    def load(self, values: Mapping[str, torch.Tensor]) -> None:
        """Copy whole values, by graph name, into this rank's parameters and buffers."""
        self.shards.load(values)
        for name, buffer in self.buffers.items():
            buffer.copy_(values[name])

    def parameter_tensors(self) -> list[torch.Tensor]:
        """Return all tensors that store parameters on this rank between steps."""
        return [leaf.detach() for leaf in self.shards.leaves.values()]

    def gradient_tensors(self) -> list[torch.Tensor]:
        """Return all tensors that store gradients on this rank between steps."""
        return [tensor for part in self.shards.buckets for tensor in part.tensors]


def device_of(values: Mapping[str, torch.Tensor]) -> torch.device:
    """Return the device of a model's values; the CPU if there are none."""
    return next((value.device for value in values.values()), torch.device("cpu"))
