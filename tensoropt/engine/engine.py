"""The engine that runs a plan on a rank, for every kind of plan."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

import torch

from tensoropt.engine.counts import TargetCounts
from tensoropt.engine.deferred import DeferredStep, defer_backward
from tensoropt.engine.local_parameters import LocalParameters
from tensoropt.engine.nodes import Lowered
from tensoropt.engine.regather import RegatheredParameters
from tensoropt.engine.runtime import Runtime
from tensoropt.graph import OperatorGraph
from tensoropt.ranks.allocator import keep_freed_memory

L = TypeVar("L", bound=Lowered)
S = TypeVar("S", bound=DeferredStep)


class Engine(ABC, Generic[L, S]):
    """Runs a plan on this rank: calls of the model, their backward, its parameters and buffers.

    Each kind of plan is a subclass. It lowers its strategy to a module (:meth:`_lower`), calls the module
    as the plan says (:meth:`_call`), and sets the attributes that are listed as its own. Scripts, checkpoints
    and checks use a running plan only through this class.

    Args:
        source: the captured graph.
        runtime: this rank's position in the job.

    Attributes:
        training: whether the graph is a training graph.
        regathered: keeps autograd from saving gathered and cast parameters.
        shards: the parameters of this rank and their gradients; set by the subclass.
        buffers: the buffers; every rank has all of them, up to date at least where it reads them; set by the
            subclass.
        counts: the counts of mean losses, if the step needs them before it begins; set by the subclass.
    """

    shards: LocalParameters
    buffers: dict[str, torch.Tensor]
    counts: TargetCounts | None

    def __init__(self, source: OperatorGraph, runtime: Runtime):
        self.source = source
        self.training = source.training
        self.runtime = runtime
        # glibc gives freed memory back and maps it again at every step: 8 % of a GPT-2's step on one rank
        # (README).
        if runtime.device.type == "cpu":
            keep_freed_memory()
        self.regathered = RegatheredParameters(runtime)
        runtime.gathered, runtime.kept = self.regathered.note, self.regathered.keep
        self._anchor = torch.zeros((), requires_grad=True, device=runtime.device)
        # Lowered at its first use: most jobs never evaluate, and subclasses need their strategy for it.
        self._lowered: dict[bool, L] = {}

    # -- what kinds of plans differ in -------------------------------------------------------------

    @abstractmethod
    def _lower(self, *, evaluating: bool) -> L:
        """Return the plan as a module for this rank; with ``evaluating``, one that computes as
        ``model.eval()`` does."""

    @abstractmethod
    def _call(
        self, inputs: Sequence[torch.Tensor], *, training: bool, evaluating: bool
    ) -> tuple[torch.Tensor, ...]:
        """Return the model's results on a global batch, with a backward if ``training``."""

    def sync_buffers(self) -> None:
        """Bring buffers up to date on every rank. All ranks must call it; many plans have nothing to do."""

    def lowered_modules(self) -> list[torch.fx.GraphModule]:
        """Return every module that runs on this rank, each called with all of the model's inputs first."""
        return [self.module]

    def reads(self) -> list[bool]:
        """Return whether this rank reads each of the model's inputs, for operators or for counts
        beforehand."""
        modules = self.lowered_modules()
        if self.counts is not None and self.counts.module is not None:
            modules.append(self.counts.module)
        found = [False] * len(self.source.inputs)
        for module in modules:
            places = [node for node in module.graph.nodes if node.op == "placeholder"]
            found = [read or bool(p.users) for read, p in zip(found, places, strict=False)]
        return found

    # -- calls ------------------------------------------------------------------------------------

    def __call__(self, *inputs: torch.Tensor, evaluating: bool = False) -> tuple[torch.Tensor, ...]:
        """Return the results of the model on the global batch; every rank passes the same batch, and gets the
        same results.

        Args:
            inputs: the graph's inputs, whole.
            evaluating: without dropout, and with the running statistics of batch norms.
        """
        training = self.training and torch.is_grad_enabled()
        if self.counts is not None:
            self.runtime.counts = self.counts.count(inputs, self.buffers)
        outputs = self._call(inputs, training=training, evaluating=evaluating)
        # A call without gradients is no step. Backward comes after this: what it makes again goes back to the
        # step of its forward (`recompute.py`).
        self.runtime.step += training
        return outputs

    def _run_lowered(
        self, inputs: Sequence[torch.Tensor], parameters: Mapping[str, torch.Tensor], *, evaluating: bool
    ) -> tuple[torch.Tensor, ...]:
        """Run the lowered module on the inputs, with these parameters and the current buffers, and return its
        results."""
        lowered = self._lowered_for(evaluating)
        arguments = [parameters[name] for name in lowered.parameters]
        arguments += [self.buffers[name] for name in lowered.buffers]
        results: tuple[torch.Tensor, ...] = lowered.module(*inputs, *arguments)
        return results

    def _defer(self, loss: torch.Tensor, step: S) -> torch.Tensor:
        """Return the loss that the script gets, whose backward is :meth:`_finish_backward`."""
        return defer_backward(self._anchor, loss, step, self._finish_backward)

    @abstractmethod
    def _finish_backward(self, step: S, gradient: torch.Tensor) -> None:
        """Make the gradients of a step that returned its loss by :meth:`_defer`.

        Args:
            gradient: the gradient of the loss, from whatever the script did with it.
        """

    # -- lowered modules ---------------------------------------------------------------------------

    def _lowered_for(self, evaluating: bool) -> L:
        if evaluating not in self._lowered:
            lowered = self._lower(evaluating=evaluating)
            lowered.module.to(self.runtime.device)
            self._lowered[evaluating] = lowered
        return self._lowered[evaluating]

    @property
    def lowered(self) -> L:
        """The plan as it runs in training, or in inference if the graph is for that."""
        return self._lowered_for(False)

    @property
    def module(self) -> torch.fx.GraphModule:
        """The module of :attr:`lowered`."""
        return self.lowered.module

    # -- parameters and buffers --------------------------------------------------------------------

    def load(self, values: Mapping[str, torch.Tensor]) -> None:
        """Set parameters and buffers to whole values, by graph name."""
        self.shards.load(values)
        for name, buffer in self.buffers.items():
            buffer.copy_(values[name])

    def parameter_tensors(self) -> list[torch.Tensor]:
        """Return all tensors in which parameters lie on this rank between two steps."""
        return [leaf.detach() for leaf in self.shards.leaves.values()]

    def gradient_tensors(self) -> list[torch.Tensor]:
        """Return all tensors in which gradients lie on this rank between two steps."""
        return self.shards.accumulated.tensors


def device_of(values: Mapping[str, torch.Tensor]) -> torch.device:
    """Return the device of a model's parameters and buffers; the CPU for a model without any."""
    return next((value.device for value in values.values()), torch.device("cpu"))
