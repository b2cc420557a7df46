"""Prefetch parameters one block ahead, and reduce-scatter gradients one block after their backward.

A block is a repeated part of the model, such as a layer. When a block begins, the engine waits for all
collectives in flight, gathers the next block's parameters and, in backward, reduce-scatters the previous
block's gradients, each in one coalesced collective per process group and dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as _  # noqa: F401

from tensoropt.engine import runtime
from tensoropt.engine.gradients import Gradients
from tensoropt.engine.runtime import Runtime
from tensoropt.ops.layouts import Layout
from tensoropt.sharding.program import EdgeSteps
from tensoropt.sharding.reshard.redistribute import (
    Ahead,
    EdgeSpec,
    Packed,
    as_received,
    as_sent,
    packed_gather,
    packed_scatter,
    run_steps,
    travel,
)
from tensoropt.sharding.strategy import Strategy

# Registers the coalesced collectives, and what the compiler has to know of them.


def gather(values: Sequence[torch.Tensor], group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Start one coalesced all-gather of flat tensors; return its results, which are still in flight."""
    return _flying(torch.ops._c10d_functional.all_gather_into_tensor_coalesced, values, group)


def scatter(values: list[torch.Tensor], group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Start a coalesced reduce-scatter of flat tensors; ``values`` then has what must live until its end."""
    # Gloo reduces what is coalesced one value after the other; NCCL does it together, without a copy.
    if len(values) == 1 or values[0].device.type != "cpu":
        return _scatter(values, group)
    sizes = [value.numel() // group.size() for value in values]
    packed = values[0].new_empty(group.size(), sum(sizes))
    for place in packed.split(sizes, 1):
        place.copy_(values.pop(0).view(place.shape))
    values.append(packed.flatten())
    (scattered,) = _scatter(values, group)
    # All values lie in one storage, for which it waits.
    return list(scattered.split(sizes))


def _scatter(values: Sequence[torch.Tensor], group: dist.ProcessGroup) -> list[torch.Tensor]:
    return _flying(torch.ops._c10d_functional.reduce_scatter_tensor_coalesced, values, group, "sum")


def _flying(
    collective: Callable[..., list[torch.Tensor]],
    values: Sequence[torch.Tensor],
    group: dist.ProcessGroup,
    *reduction: str,
) -> list[torch.Tensor]:
    device, dtype = values[0].device, values[0].dtype
    staged = runtime.through_host(device)
    sent = [as_sent(value.cpu() if staged else value) for value in values]
    results = [as_received(v, dtype) for v in collective(sent, *reduction, group.size(), group.group_name)]
    # Copies on a GPU have arrived: only the original result can be waited for.
    return [wait(value).to(device) for value in results] if staged else results


def wait(value: torch.Tensor) -> torch.Tensor:
    return torch.ops._c10d_functional.wait_tensor(value)


def edge_spec(strategy: Strategy, steps: EdgeSteps, order: tuple[int, ...] | None = None) -> EdgeSpec:
    """Return a strategy's resharding ``steps`` in executable form; ``order``: the tensor's memory order."""
    edge = steps.edge
    return EdgeSpec(
        edge.tensor,
        strategy.atoms(edge.tensor),
        strategy.mesh,
        edge.source,
        edge.target,
        steps.forward,
        steps.backward,
        parameter=edge.kind == "parameter",
        dtype=getattr(torch, strategy.tensor(edge.tensor).dtype) if steps.casts else None,
        back=edge.back,
        order=order,
        block=edge.block,
        behind=edge.behind,
        readers=len(steps.readers),
        zigzag=steps.zigzag,
        gathered_again=steps.gathered_again,
    )


class _Sum(NamedTuple):
    """A parameter's gradient that waits for its reduce-scatter.

    Attributes:
        spec: the resharding of the parameter for one of its uses.
        value: the gradient, summed over all uses so far.
        own: whether nothing else refers to ``value``, so that it may be changed in place.
    """

    spec: EdgeSpec
    value: torch.Tensor
    own: bool


class _PendingCollective(NamedTuple):
    """A collective in flight.

    Attributes:
        specs: the reshardings of the parameters in it.
        routes: the functions that pack and unpack each parameter.
        sent: tensors to keep alive until it completes.
        arriving: its results.
    """

    specs: Sequence[EdgeSpec]
    routes: Sequence[Packed]
    sent: Sequence[torch.Tensor]
    arriving: Sequence[torch.Tensor]

    def wait(self) -> list[tuple[EdgeSpec, Packed, torch.Tensor]]:
        arrived = [wait(value) for value in self.arriving]
        return list(zip(self.specs, self.routes, arrived, strict=True))


def begin_block(
    runtime: Runtime,
    block: int,
    own: Sequence[EdgeSpec],
    following: Sequence[EdgeSpec],
    *shards: torch.Tensor,
) -> None:
    """In forward, wait for a block's parameters (``own``) and prefetch the next block's (``following``)."""
    if not torch.compiler.is_compiling() and isinstance(runtime.ahead, CallAhead):
        runtime.ahead.begin(block, own, following, shards)


def begin_block_backward(runtime: Runtime, block: int, made: torch.Tensor) -> None:
    """Call :meth:`CallAhead.begin_backward` when autograd reaches the node that made the tensor ``made``."""
    ahead = runtime.ahead
    if torch.compiler.is_compiling() or not isinstance(ahead, CallAhead) or ahead.is_backward:
        return
    if isinstance(made, torch.Tensor) and made.grad_fn is not None:
        # Not a hook of the tensor, which autograd calls when it is through with the last reader: other blocks
        # may come in between.
        made.grad_fn.register_prehook(lambda _: ahead.begin_backward(block))


class CallAhead(Ahead):
    """Prefetching of parameters and delayed scattering of gradients in one call, forward and backward.

    Args:
        behind: block -> the block that follows it in backward.
        recomputed: block -> reshardings of the parameters that its recomputation reads.
        deliver: a function that receives a parameter's name and the shard of its gradient.
        begun: a list of the calls whose backward has begun, to which this call adds itself.
        copies: the unsharded parameters that this call's forward gathers block by block.
    """

    def __init__(
        self,
        runtime: Runtime,
        behind: Mapping[int, int],
        recomputed: Mapping[int, Sequence[EdgeSpec]],
        deliver: Callable[[str, torch.Tensor], None],
        begun: list[CallAhead],
        copies: UnshardedParameters | None = None,
    ):
        self._runtime = runtime
        self._behind = behind
        self._recomputed = recomputed
        self._deliver = deliver
        self._calls = begun
        self._copies = copies
        self._copying: list[_PendingCollective] = []
        self._gathering: list[_PendingCollective] = []
        self._scattering: list[_PendingCollective] = []
        self._ready: dict[EdgeSpec, Callable[[], torch.Tensor]] = {}
        # The parameters that further groups of the block will take, each with the number of these groups.
        self._taken: dict[EdgeSpec, tuple[torch.Tensor, int]] = {}
        self._whole: dict[EdgeSpec, torch.Tensor] = {}
        # For each block: the parameters that backward will request, how often, and their shards.
        self._noted: dict[int, dict[EdgeSpec, int]] = {}
        self._shards: dict[EdgeSpec, torch.Tensor] = {}
        # By block: sums of the gradients of uses that read a parameter alike; gradients that waited for the
        # last micro-batch.
        self._gradients: dict[int, dict[tuple[str, Layout], _Sum]] = {}
        self._last: dict[int, list[_Sum]] = {}
        self._begun: set[int] = set()
        self.micro_batch = runtime.micro_batch

    @property
    def is_backward(self) -> bool:
        """Whether backward has begun; forward operators that run now are recomputed ones."""
        return bool(self._begun)

    # -- forward ----------------------------------------------------------------------------------

    @torch.no_grad()
    def begin(
        self,
        block: int,
        own: Sequence[EdgeSpec],
        following: Sequence[EdgeSpec],
        shards: Sequence[torch.Tensor],
    ) -> None:
        """Wait for a block's parameters and prefetch the next block's, in forward.

        Args:
            own: the reshardings of the block's parameters.
            following: the reshardings of the next block's parameters.
            shards: the shards of the parameters in ``own``, then in ``following``.
        """
        self.arrive()
        self._shards.update(zip((*own, *following), (shard.detach() for shard in shards), strict=True))
        if block == 0:
            self._begin_gathering(own, block)
            self.arrive()
        self._begin_gathering(following, block + 1)

    def _begin_gathering(self, specs: Sequence[EdgeSpec], block: int) -> None:
        self._gathering += self._sent({spec: self._shards[spec] for spec in specs})
        self.begin_copies([block])

    @torch.no_grad()
    def begin_copies(self, blocks: Iterable[int]) -> None:
        """Start to gather the unsharded parameters of some blocks, block by block."""
        if self._copies is not None:
            for block in blocks:
                self._copying += self._sent(self._copies.of(block))

    def take(self, spec: EdgeSpec) -> torch.Tensor | None:
        if any(spec in collective.specs for collective in self._gathering):
            self.arrive()
        if (unpack := self._ready.pop(spec, None)) is not None:
            whole, left = unpack(), spec.readers
        elif spec in self._taken:
            whole, left = self._taken.pop(spec)
        else:
            return None
        if left > 1:
            self._taken[spec] = whole, left - 1
        # Each reader gets a tensor of its own, which is part of another graph.
        return whole if spec.readers == 1 else whole.detach()

    def note(self, spec: EdgeSpec) -> None:
        """Record that backward needs a gathered parameter again, which :meth:`take_again` then returns."""
        assert spec.block is not None
        counts = self._noted.setdefault(spec.block, {})
        counts[spec] = counts.get(spec, 0) + 1

    # -- backward ---------------------------------------------------------------------------------

    @torch.no_grad()
    def begin_backward(self, block: int) -> None:
        """Begin a block's backward, if not begun: prefetch the next block, and scatter finished gradients."""
        if block in self._begun:
            return
        self._begun.add(block)
        self._register()
        self.arrive()
        if block not in self._behind.values():
            # Backward begins with it, so nobody has regathered its parameters.
            self._gather_again(block)
            self.arrive()
        self._gather_again(self._behind.get(block, -1))
        self._scatter_behind(block)

    def _gather_again(self, block: int) -> None:
        specs = {*self._noted.get(block, ()), *self._recomputed.get(block, ())}
        # In the order in which forward gathered them, which is the same on all ranks.
        self._gathering += self._sent({spec: shard for spec, shard in self._shards.items() if spec in specs})

    def take_again(self, spec: EdgeSpec) -> torch.Tensor | None:
        if (whole := self._whole.get(spec)) is None:
            if (whole := self.take(spec)) is None:
                return None
            # For all readers, as often as they noted.
            self._taken.pop(spec, None)
            self._whole[spec] = whole
        counts = self._noted[spec.block or 0]
        counts[spec] -= 1
        if counts[spec] <= 0:
            del self._whole[spec]
        return whole

    def collect(self, spec: EdgeSpec, gradient: torch.Tensor) -> bool:
        """Add a gradient to its parameter's sum, which is scattered after the last block that adds to it."""
        assert spec.behind is not None
        self._register()
        sums, key = self._gradients.setdefault(spec.behind, {}), (spec.name, spec.target)
        if (pending := sums.get(key)) is None:
            sums[key] = _Sum(spec, gradient, own=False)
        elif pending.own:
            pending.value.add_(gradient)
        else:
            # Autograd may have given the first gradient to others, too.
            sums[key] = _Sum(spec, pending.value + gradient, own=True)
        return True

    def collect_last(self, spec: EdgeSpec, gradient: torch.Tensor) -> None:
        """Keep a gradient summed over micro-batches, to be scattered after its block's backward."""
        assert spec.block is not None
        self._register()
        self._last.setdefault(spec.block, []).append(_Sum(spec, gradient, own=False))

    def _register(self) -> None:
        if not any(call is self for call in self._calls):
            self._calls.append(self)

    @torch.no_grad()
    def leave(self) -> None:
        """Scatter the remaining gradients at the end of backward; :meth:`finish` waits for them."""
        # As at the beginning of a block: what has arrived completes buckets first.
        self.arrive()
        self._scatter_behind(-1)
        self._ready.clear()
        self._taken.clear()
        self._whole.clear()

    def finish(self) -> None:
        """Wait for the gradients in flight at the end of backward, and deliver them."""
        self.leave()
        self.arrive()

    # -- collectives ------------------------------------------------------------------------------

    def _sent(self, shards: Mapping[EdgeSpec, torch.Tensor]) -> list[_PendingCollective]:
        self._runtime.micro_batch = self.micro_batch
        sent = [
            (spec, route := packed_gather(self._runtime, spec), route.pack(shard))
            for spec, shard in shards.items()
        ]
        return _coalesced(sent, gather)

    def _scatter_behind(self, block: int) -> None:
        for behind in _above(block, self._gradients):
            self._scatter(list(self._gradients.pop(behind).values()))
        for behind in _above(block, self._last):
            self._scatter(self._last.pop(behind))

    def _scatter(self, gradients: list[_Sum]) -> None:
        sent = []
        while gradients:
            spec, gradient = gradients.pop(0)[:2]
            route = packed_scatter(self._runtime, spec)
            sent.append((spec, route, route.pack(gradient)))
            # The whole tensors are no longer needed once they are packed into pieces.
            del gradient
        self._scattering += _coalesced(sent, scatter)

    @torch.no_grad()
    def arrive(self) -> None:
        """Wait for all collectives in flight; keep gathered parameters, and deliver scattered gradients."""
        for collective in self._gathering:
            for spec, route, flat in collective.wait():
                self._ready[spec] = functools.partial(route.unpack, flat)
        self._gathering.clear()
        while self._copying:
            arrived = self._copying.pop(0).wait()
            while arrived:
                spec, route, flat = arrived.pop(0)
                assert self._copies is not None
                self._copies.put(spec.name, route.unpack(flat))
                del flat
        while self._scattering:
            arrived = self._scattering.pop(0).wait()
            for spec, route, flat in arrived:
                self._deliver(spec.name, route.unpack(flat))


def _above(block: int, waiting: Mapping[int, object]) -> list[int]:
    return [number for number in sorted(waiting, reverse=True) if number > block]


def _coalesced(
    sent: list[tuple[EdgeSpec, Packed, torch.Tensor]],
    collective: Callable[[list[torch.Tensor], dist.ProcessGroup], list[torch.Tensor]],
) -> list[_PendingCollective]:
    """Start one collective per process group and dtype for the tensors in ``sent``, and empty ``sent``."""
    by_group: dict[tuple[int, torch.dtype], list[tuple[EdgeSpec, Packed, torch.Tensor]]] = {}
    while sent:
        by_group.setdefault((id(sent[0][1].group), sent[0][2].dtype), []).append(sent.pop(0))
    under_way = []
    for key in list(by_group):
        specs, routes, values = map(list, zip(*by_group.pop(key), strict=True))
        group = routes[0].group
        assert group is not None
        # First: it may change what has to stay.
        arriving = collective(values, group)
        under_way.append(_PendingCollective(specs, routes, values, arriving))
    return under_way


class UnshardedParameters:
    """This rank's unsharded parameters: copies that are gathered once per step (ZeRO-1 and 2).

    Attributes:
        values: parameter -> its copy, as the last step gathered it.
        unreduced: parameter -> unsharded gradient, summed over micro-batches in the stored dtype, then
            reduce-scattered.
        last: whether the running micro-batch is the last of several.
    """

    def __init__(self, strategy: Strategy, runtime: Runtime, leaves: Mapping[str, torch.Tensor]):
        self.runtime, self.values = runtime, runtime.unsharded
        self.leaves = leaves
        self.last = False
        self.specs: dict[str, EdgeSpec] = {}
        self.unreduced: dict[str, torch.Tensor] = {}
        self._of_block: dict[int, list[EdgeSpec]] = {}
        for name, edge in strategy.unsharded.items():
            spec = self.specs[name] = edge_spec(strategy, EdgeSteps.of(strategy, edge))
            if edge.block is not None:
                self._of_block.setdefault(edge.block, []).append(spec)
            if strategy.reduced_last(name):
                shape = strategy.local_shape(name, edge.target, runtime.place)
                self.unreduced[name] = leaves[name].detach().new_zeros(shape)

    @property
    def blocks(self) -> list[int]:
        """The numbers of the blocks that gather unsharded parameters, ascending."""
        return sorted(self._of_block)

    # -- copies -----------------------------------------------------------------------------------

    @torch.no_grad()
    def gather(self) -> None:
        """Gather the unsharded parameters from current shards, except those that forward gathers by block."""
        # A compiled module has no blocks.
        at_once = torch.compiler.is_compiling()
        for name, spec in self.specs.items():
            # The old one is freed first: both at once would be one parameter more than the plan counts.
            self.values.pop(name, None)
            if spec.block is None or at_once:
                self.put(name, travel(self.runtime, self.leaves[name].detach(), spec))
            elif name in self.unreduced:
                # A buffer that will be filled before it is read: the lowered module takes it now.
                narrow = spec.dtype or self.leaves[name].dtype
                self.values[name] = torch.empty(0, dtype=narrow, device=self.leaves[name].device)

    def of(self, block: int) -> Mapping[EdgeSpec, torch.Tensor]:
        return {spec: self.leaves[spec.name].detach() for spec in self._of_block.get(block, ())}

    @torch.no_grad()
    def put(self, name: str, whole: torch.Tensor) -> None:
        place = self.values.setdefault(name, whole)
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
        """Accumulate an unsharded parameter's gradient after a micro-batch; scatter it after the last one."""
        waiting, spec = self.unreduced[name], self.specs[name]
        if leaf.grad is not waiting and leaf.grad is not None:
            # For a narrow copy: sums over micro-batches are not narrow.
            waiting.add_(leaf.grad)
            leaf.grad = None
        if self.last and spec.block is not None and isinstance(self.runtime.ahead, CallAhead):
            self.runtime.ahead.collect_last(spec, waiting if spec.dtype is None else waiting.to(spec.dtype))

    def clear(self) -> None:
        """Discard the gradients of an aborted backward."""
        for gradient in self.unreduced.values():
            gradient.zero_()

    def scattered(self, name: str) -> None:
        if name in self.unreduced:
            self.unreduced[name].zero_()

    @torch.no_grad()
    def reduce_last(self, accumulated: Gradients) -> None:
        """Reduce-scatter the unsharded gradients left after backward; add them to the shards' gradients."""
        for name, gradient in self.unreduced.items():
            spec = self.specs[name]
            if self.last and spec.block is not None and not torch.compiler.is_compiling():
                continue
            sent = gradient if spec.dtype is None else gradient.to(spec.dtype)
            shard = run_steps(self.runtime, sent, spec, backward=True)
            accumulated.add_late(name, shard.to(self.leaves[name].dtype))
            gradient.zero_()
        self.last = False
