"""Unsharded parameters: stored sharded, gathered once per step, and read whole by all its micro-batches.

These are ZeRO's stages 1 and 2 (Rajbhandari et al., SC 2020, section 5): a gradient leaves in every
micro-batch (reduced to the shard, stage 2), or accumulates unreduced beside the unsharded parameter until the
last one (stage 1). Copies are made block by block in the first micro-batch's forward, and the gradients of
stage 1 are reduced block by block in the last one's backward (:mod:`tensoropt.engine.ahead`); what cannot be
combined with others is moved before the first and after the last.

An unsharded parameter stays until the next step, which makes it anew: any change of the shards in between, by
an optimizer or a checkpoint, takes effect. It is never written in place, so a step whose backward is still to
come keeps the one it saw.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch

from tensoropt.engine.ahead import CallAhead
from tensoropt.engine.gradients import Gradients
from tensoropt.engine.runtime import Runtime
from tensoropt.sharding.reshard.redistribute import EdgeSpec, run_steps, travel
from tensoropt.sharding.strategy import Strategy


class UnshardedParameters:
    """The unsharded parameters of a strategy on this rank, which edges find at ``runtime.unsharded``.

    Attributes:
        unreduced: the gradients that are reduced last, by parameter, in the shape of the unsharded one and
            the type in which the parameter is stored, so that micro-batches accumulate in that type.
        last: whether the running micro-batch is the last of several.
    """

    def __init__(self, strategy: Strategy, runtime: Runtime, leaves: Mapping[str, torch.Tensor]):
        self.runtime = runtime
        self.leaves = leaves
        self.last = False
        self.specs: dict[str, EdgeSpec] = {}
        self.unreduced: dict[str, torch.Tensor] = {}
        self._of_block: dict[int, list[EdgeSpec]] = {}
        for name, edge in strategy.unsharded.items():
            tensor = strategy.tensor(name)
            forward, backward = strategy.steps(edge)
            cast = getattr(torch, tensor.dtype) if tensor.master_dtype is not None else None
            atoms, mesh = strategy.atoms(name), strategy.mesh
            spec = self.specs[name] = EdgeSpec(
                name, atoms, mesh, edge.source, edge.target, forward, backward, dtype=cast, block=edge.block
            )
            if edge.block is not None:
                self._of_block.setdefault(edge.block, []).append(spec)
            if strategy.reduced_last(name):
                shape = strategy.local_shape(name, edge.target, runtime.place)
                self.unreduced[name] = torch.zeros(
                    shape, dtype=leaves[name].dtype, device=leaves[name].device
                )

    @property
    def values(self) -> Mapping[str, torch.Tensor]:
        """The unsharded parameters as the last step gathered them."""
        return self.runtime.unsharded

    @property
    def goes_ahead(self) -> bool:
        """Whether any copy is made block by block."""
        return bool(self._of_block)

    @property
    def blocks(self) -> list[int]:
        """Return the blocks that use copies, in order."""
        return sorted(self._of_block)

    # -- copies -----------------------------------------------------------------------------------

    @torch.no_grad()
    def gather(self) -> None:
        """Make unsharded parameters from the current shards, except those that forward is going to make block
        by block."""
        # A compiled module has no blocks, see engine/ahead.py.
        at_once = torch.compiler.is_compiling()
        for name, spec in self.specs.items():
            # The old one is freed first: both at once would be one parameter more than the plan counts.
            self.runtime.unsharded.pop(name, None)
            if spec.block is None or at_once:
                self.put(name, travel(self.runtime, self.leaves[name].detach(), spec))
            elif name in self.unreduced:
                # A buffer that will be filled before it is read: the lowered module takes it now.
                narrow = spec.dtype or self.leaves[name].dtype
                self.runtime.unsharded[name] = torch.empty(0, dtype=narrow, device=self.leaves[name].device)

    def of(self, block: int) -> Mapping[EdgeSpec, torch.Tensor]:
        """Return the copies that a block uses and that are made for it, each with its shard."""
        return {spec: self.leaves[spec.name].detach() for spec in self._of_block.get(block, ())}

    @torch.no_grad()
    def put(self, name: str, whole: torch.Tensor) -> None:
        """Store a copy that has arrived."""
        place = self.runtime.unsharded.setdefault(name, whole)
        if place is not whole:
            place.data = whole
        if name in self.unreduced:
            # A leaf of its own: autograd adds the gradients of all micro-batches into the one tensor.
            place.requires_grad_()
            if place.dtype == self.unreduced[name].dtype:
                place.grad = self.unreduced[name]
            place.register_post_accumulate_grad_hook(functools.partial(self._arrived, name))

    # -- gradients --------------------------------------------------------------------------------

    @torch.no_grad()
    def _arrived(self, name: str, leaf: torch.Tensor) -> None:
        """Handle the gradient that autograd has added to a copy's in a micro-batch."""
        waiting, spec = self.unreduced[name], self.specs[name]
        if leaf.grad is not waiting and leaf.grad is not None:
            # For a narrow copy: sums over micro-batches are not narrow.
            waiting.add_(leaf.grad)
            leaf.grad = None
        if self.last and spec.block is not None and isinstance(self.runtime.ahead, CallAhead):
            self.runtime.ahead.collect_last(spec, waiting if spec.dtype is None else waiting.to(spec.dtype))

    def clear(self) -> None:
        """Forget the gradients of a backward that did not end."""
        for gradient in self.unreduced.values():
            gradient.zero_()

    def scattered(self, name: str) -> None:
        """Clear the unreduced gradient of a parameter, which has been reduced."""
        if name in self.unreduced:
            self.unreduced[name].zero_()

    @torch.no_grad()
    def reduce_last(self, accumulated: Gradients) -> None:
        """Reduce the gradients that are not reduced yet, and add them to those of the shards."""
        for name, gradient in self.unreduced.items():
            spec = self.specs[name]
            if self.last and spec.block is not None and not torch.compiler.is_compiling():
                continue
            sent = gradient if spec.dtype is None else gradient.to(spec.dtype)
            shard = run_steps(self.runtime, sent, spec, backward=True)
            accumulated.add_late(name, shard.to(self.leaves[name].dtype))
            gradient.zero_()
        self.last = False
