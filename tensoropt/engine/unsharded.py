"""Unsharded parameters: stored sharded, gathered once per step, and read whole by all its micro-batches.

ZeRO's stages 1 and 2 (Rajbhandari et al., SC 2020, section 5): a gradient leaves in every micro-batch
(reduced to the shard, stage 2), or adds up unreduced beside the unsharded parameter until the last one
(stage 1).

An unsharded parameter stays from one step to the next, where it is made anew: whatever changed the shards in
between, an optimizer or a checkpoint, is seen. It is never written in place, so a step whose backward is
still to come keeps the one it saw.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tensoropt.engine.gradients import Gradients
from tensoropt.engine.runtime import Runtime
from tensoropt.sharding.reshard.redistribute import EdgeSpec, run_steps, travel
from tensoropt.sharding.strategy import Strategy


class UnshardedParameters:
    """The unsharded parameters of a strategy on this rank, which edges find at ``runtime.unsharded``.

    Attributes:
        unreduced: the gradients that are reduced last, per parameter, in the shape of the unsharded one.
    """

    def __init__(self, strategy: Strategy, runtime: Runtime, leaves: Mapping[str, torch.Tensor]):
        self.runtime = runtime
        self.leaves = leaves
        self.specs: dict[str, EdgeSpec] = {}
        self.unreduced: dict[str, torch.Tensor] = {}
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
                # The type of the unsharded copy: autograd adds gradients of a leaf in the leaf's own type.
                dtype = getattr(torch, tensor.dtype)
                self.unreduced[name] = torch.zeros(shape, dtype=dtype, device=leaves[name].device)

    @property
    def values(self) -> Mapping[str, torch.Tensor]:
        """The unsharded parameters as the last step gathered them."""
        return self.runtime.unsharded

    @torch.no_grad()
    def gather(self) -> None:
        """Make all unsharded parameters from the shards as they are now."""
        for name, spec in self.specs.items():
            # The old one goes first: both at once would be one parameter more than the plan counts.
            self.runtime.unsharded.pop(name, None)
            whole = travel(self.runtime, self.leaves[name].detach(), spec)
            if name in self.unreduced:
                # A leaf of its own: autograd adds the gradients of all micro-batches into the one tensor.
                whole.requires_grad_()
                whole.grad = self.unreduced[name]
            self.runtime.unsharded[name] = whole

    def clear(self) -> None:
        """Forget gradients of a backward that did not end."""
        for gradient in self.unreduced.values():
            gradient.zero_()

    @torch.no_grad()
    def reduce_last(self, accumulated: Gradients) -> None:
        """Reduce the gradients that were not yet, and add them to those of the shards."""
        for name, gradient in self.unreduced.items():
            shard = run_steps(self.runtime, gradient, self.specs[name], backward=True)
            accumulated.add_late(name, shard.to(self.leaves[name].dtype))
            gradient.zero_()
