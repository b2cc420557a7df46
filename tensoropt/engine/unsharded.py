"""Held copies: parameters that live sharded, gathered once per call and read from there by all micro-batches.

ZeRO's stages 1 and 2 (Rajbhandari et al., SC 2020, section 5). A copy stays from one step to the next, where
it is made anew: whatever changed the shards in between, an optimizer or a checkpoint, is seen. Copies are
never written in place, so a step that still waits for its backward keeps those it saw.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tensoropt.engine.gradients import Gradients
from tensoropt.engine.runtime import Runtime
from tensoropt.sharding.reshard.redistribute import EdgeSpec, run_steps, travel
from tensoropt.sharding.strategy import Strategy


class HeldCopies:
    """The held copies of a strategy's parameters on this rank, found at ``runtime.held``.

    Attributes:
        waiting: per parameter whose gradient waits for the last micro-batch where it adds up.
    """

    def __init__(self, strategy: Strategy, runtime: Runtime, leaves: Mapping[str, torch.Tensor]):
        self.runtime = runtime
        self.leaves = leaves
        self.specs: dict[str, EdgeSpec] = {}
        self.waiting: dict[str, torch.Tensor] = {}
        for name, edge in strategy.unsharded.items():
            tensor = strategy.tensor(name)
            forward, backward = strategy.steps(edge)
            cast = getattr(torch, tensor.dtype) if tensor.master_dtype is not None else None
            atoms, mesh = strategy.atoms(name), strategy.mesh
            self.specs[name] = EdgeSpec(
                name, atoms, mesh, edge.source, edge.target, forward, backward, dtype=cast
            )
            if strategy.reduced_last(name):
                shape = strategy.local_shape(name, edge.target, runtime.place)
                dtype = getattr(torch, tensor.dtype)
                self.waiting[name] = torch.zeros(shape, dtype=dtype, device=leaves[name].device)

    @torch.no_grad()
    def gather(self) -> None:
        """Make all copies from the shards as they are now."""
        for name, spec in self.specs.items():
            self.runtime.held.pop(name, None)
            copy = travel(self.runtime, self.leaves[name].detach(), spec)
            if name in self.waiting:
                copy.requires_grad_()
                copy.grad = self.waiting[name]
            self.runtime.held[name] = copy

    def clear(self) -> None:
        """Forget gradients of a backward that did not end."""
        for gradient in self.waiting.values():
            gradient.zero_()

    @torch.no_grad()
    def give_back(self, book: Gradients) -> None:
        """Bring the gradients that waited to those of the shards."""
        for name, gradient in self.waiting.items():
            shard = run_steps(self.runtime, gradient, self.specs[name], backward=True)
            book.bring(name, shard.to(self.leaves[name].dtype))
            gradient.zero_()
