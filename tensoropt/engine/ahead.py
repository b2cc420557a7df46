"""Parameters gathered one block ahead of their use, and gradients scattered one block after their backward.

As a block begins, in forward or in backward, the engine waits for all that is under way; then it gathers the
parameters of the next block and, in backward, scatters the gradients of the previous one, each in one
coalesced collective per group of ranks and dtype. So at most one block of each is under way, and every rank
issues the same collectives in the same order: that of the blocks. What was not foreseen (a block that
backward never begins, a graph that is traversed twice) is gathered and scattered where it is needed.

ZeRO: Rajbhandari et al., SC 2020, section 7.2.2. PyTorch's FSDP: Zhao et al., VLDB 2023, section 3.3.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from tensoropt.engine.coalesced import gather, scatter, wait
from tensoropt.engine.runtime import Runtime
from tensoropt.ops.layouts import Layout
from tensoropt.sharding.reshard.packed import Packed, packed_gather, packed_scatter
from tensoropt.sharding.reshard.redistribute import EdgeSpec

Deliver = Callable[[str, torch.Tensor], None]
"""Receives the shard of a parameter's gradient."""


class Copies(Protocol):
    """Unsharded copies of parameters, which the first micro-batch's forward makes block by block."""

    def of(self, block: int) -> Mapping[EdgeSpec, torch.Tensor]:
        """Return the copies that a block uses, each with the shard that it is made from."""
        ...

    def put(self, name: str, whole: torch.Tensor) -> None:
        """Store a copy that has arrived."""
        ...


class Sum(NamedTuple):
    """A gradient that waits to be scattered.

    Attributes:
        spec: the edge of the use that was added last.
        value: the sum over all uses so far.
        own: whether nothing else refers to the tensor.
    """

    spec: EdgeSpec
    value: torch.Tensor
    own: bool


class UnderWay(NamedTuple):
    """A collective for which nobody has waited yet.

    Attributes:
        specs: the edges of the parameters in it.
        routes: the route of each parameter.
        sent: the tensors that must stay alive until it is over.
        arriving: the tensors that will be complete then.
    """

    specs: Sequence[EdgeSpec]
    routes: Sequence[Packed]
    sent: Sequence[torch.Tensor]
    arriving: Sequence[torch.Tensor]

    def wait(self) -> list[tuple[EdgeSpec, Packed, torch.Tensor]]:
        """Wait for the collective, and return what has arrived."""
        arrived = [wait(value) for value in self.arriving]
        return list(zip(self.specs, self.routes, arrived, strict=True))


def begin_block(
    runtime: Runtime,
    block: int,
    own: Sequence[EdgeSpec],
    following: Sequence[EdgeSpec],
    *shards: torch.Tensor,
) -> None:
    """Node of the lowered graph: begin a block in forward, see :meth:`CallAhead.begin`."""
    if not torch.compiler.is_compiling() and isinstance(runtime.ahead, CallAhead):
        runtime.ahead.begin(block, own, following, shards)


def begin_block_backward(runtime: Runtime, block: int, made: torch.Tensor) -> None:
    """Node of the lowered graph: begin a block's backward when autograd reaches what made ``made``."""
    ahead = runtime.ahead
    if torch.compiler.is_compiling() or not isinstance(ahead, CallAhead) or ahead.is_backward:
        return
    if isinstance(made, torch.Tensor) and made.grad_fn is not None:
        # Not a hook of the tensor, which autograd calls when it is through with the last reader: other blocks
        # may come in between.
        made.grad_fn.register_prehook(lambda _: ahead.begin_backward(block))


class CallAhead:
    """The gathering ahead and the scattering behind in one call of the model, forward and backward.

    Args:
        behind: for each block, the one that backward begins next.
        recomputed: the edges in recomputed regions, whose second forward needs them all.
        deliver: receives the shards of gradients.
        begun: collects the calls whose backward has begun.
        copies: the unsharded copies that this call makes, by block.
    """

    def __init__(
        self,
        runtime: Runtime,
        behind: Mapping[int, int],
        recomputed: Mapping[int, Sequence[EdgeSpec]],
        deliver: Deliver,
        begun: list[CallAhead],
        copies: Copies | None = None,
    ):
        self._runtime = runtime
        self._behind = behind
        self._recomputed = recomputed
        self._deliver = deliver
        self._calls = begun
        self._copies = copies
        self._copying: list[UnderWay] = []
        self._gathering: list[UnderWay] = []
        self._scattering: list[UnderWay] = []
        self._ready: dict[EdgeSpec, Callable[[], torch.Tensor]] = {}
        # What further groups of the block will take, and how many these are.
        self._taken: dict[EdgeSpec, tuple[torch.Tensor, int]] = {}
        self._whole: dict[EdgeSpec, torch.Tensor] = {}
        # For each block: what backward will ask for, how often, and the shard that it is made from.
        self._noted: dict[int, dict[EdgeSpec, int]] = {}
        self._shards: dict[EdgeSpec, torch.Tensor] = {}
        # By block: gradients of uses, those added up that read a parameter alike; those that waited for the
        # last micro-batch.
        self._gradients: dict[int, dict[tuple[str, Layout], Sum]] = {}
        self._last: dict[int, list[Sum]] = {}
        self._begun: set[int] = set()
        self.micro_batch = runtime.micro_batch

    @property
    def is_backward(self) -> bool:
        """Return whether backward has begun: what runs forward now is recomputed."""
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
        """Begin a block in forward.

        Args:
            own: the edges of the first block's parameters, for which it waits.
            following: the edges of the next block's parameters.
            shards: the shards of both.
        """
        self._arrive()
        self._shards.update(zip((*own, *following), (shard.detach() for shard in shards), strict=True))
        if block == 0:
            self._begin_gathering(own, block)
            self._arrive()
        self._begin_gathering(following, block + 1)

    def _begin_gathering(self, specs: Sequence[EdgeSpec], block: int) -> None:
        self._gathering += self._sent({spec: self._shards[spec] for spec in specs})
        self.begin_copies([block])

    @torch.no_grad()
    def begin_copies(self, blocks: Iterable[int]) -> None:
        """Gather the copies of some blocks, block by block, if this call makes them."""
        if self._copies is not None:
            for block in blocks:
                self._copying += self._sent(self._copies.of(block))

    def take(self, spec: EdgeSpec) -> torch.Tensor | None:
        """Return a parameter that was gathered ahead, at its use."""
        if any(spec in one.specs for one in self._gathering):
            self._arrive()
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
        """Note that autograd would have saved a gathered parameter: backward will ask for it
        (:meth:`take_again`)."""
        assert spec.block is not None
        counts = self._noted.setdefault(spec.block, {})
        counts[spec] = counts.get(spec, 0) + 1

    # -- backward ---------------------------------------------------------------------------------

    @torch.no_grad()
    def begin_backward(self, block: int) -> None:
        """Begin a block in backward; only once, however often autograd traverses it."""
        if block in self._begun:
            return
        self._begun.add(block)
        self._register()
        self._arrive()
        if block not in self._behind.values():
            # Backward begins with it, so nobody has regathered its parameters.
            self._gather_again(block)
            self._arrive()
        self._gather_again(self._behind.get(block, -1))
        self._scatter_behind(block)

    def _gather_again(self, block: int) -> None:
        wanted = {*self._noted.get(block, ()), *self._recomputed.get(block, ())}
        # In the order in which forward gathered them, which is the same on all ranks.
        self._gathering += self._sent({spec: one for spec, one in self._shards.items() if spec in wanted})

    def take_again(self, spec: EdgeSpec) -> torch.Tensor | None:
        """Return a parameter that backward asks for, if it was gathered ahead; it is kept until backward has
        asked as often as noted."""
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
        """Take over the gradient of a use until backward has left the first block that uses the parameter in
        this way."""
        assert spec.behind is not None
        self._register()
        sums, key = self._gradients.setdefault(spec.behind, {}), (spec.name, spec.target)
        if (known := sums.get(key)) is None:
            sums[key] = Sum(spec, gradient, own=False)
        elif known.own:
            known.value.add_(gradient)
        else:
            # Autograd may have given the first gradient to others, too.
            sums[key] = Sum(spec, known.value + gradient, own=True)
        return True

    def collect_last(self, spec: EdgeSpec, gradient: torch.Tensor) -> None:
        """Take over a gradient to which all micro-batches have added, in the same way."""
        assert spec.block is not None
        self._register()
        self._last.setdefault(spec.block, []).append(Sum(spec, gradient, own=False))

    def _register(self) -> None:
        if not any(call is self for call in self._calls):
            self._calls.append(self)

    @torch.no_grad()
    def leave(self) -> None:
        """End backward: send what is left of its gradients, which is under way until :meth:`finish`."""
        # As at the beginning of a block: what has arrived completes buckets first.
        self._arrive()
        self._scatter_behind(-1)
        self._ready.clear()
        self._taken.clear()
        self._whole.clear()

    def finish(self) -> None:
        """Complete backward, so that its gradients are where they belong."""
        self.leave()
        self.arrive()

    # -- collectives ------------------------------------------------------------------------------

    def _sent(self, shards: Mapping[EdgeSpec, torch.Tensor]) -> list[UnderWay]:
        """Begin to gather parameters from their shards."""
        self._runtime.micro_batch = self.micro_batch
        sent = [
            (spec, route := packed_gather(self._runtime, spec), route.pack(shard))
            for spec, shard in shards.items()
        ]
        return _coalesced(sent, gather)

    def _scatter_behind(self, block: int) -> None:
        """Scatter the gradients of all blocks after one, whose backward is over."""
        for behind in _above(block, self._gradients):
            self._scatter(list(self._gradients.pop(behind).values()))
        for behind in _above(block, self._last):
            self._scatter(self._last.pop(behind))

    def _scatter(self, gradients: list[Sum]) -> None:
        sent = []
        while gradients:
            spec, gradient = gradients.pop(0)[:2]
            route = packed_scatter(self._runtime, spec)
            sent.append((spec, route, route.pack(gradient)))
            # What was packed into pieces is no longer needed as a whole.
            del gradient
        self._scattering += _coalesced(sent, scatter)

    @torch.no_grad()
    def arrive(self) -> None:
        """Wait for all that is under way."""
        self._arrive()

    def _arrive(self) -> None:
        for one in self._gathering:
            for spec, route, flat in one.wait():
                self._ready[spec] = _unpacking(route, flat)
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
    """Return the blocks after one, in the order of backward."""
    return [number for number in sorted(waiting, reverse=True) if number > block]


def _unpacking(route: Packed, flat: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: route.unpack(flat)


def _coalesced(
    sent: list[tuple[EdgeSpec, Packed, torch.Tensor]],
    collective: Callable[[list[torch.Tensor], dist.ProcessGroup], list[torch.Tensor]],
) -> list[UnderWay]:
    """Issue one collective for all that is sent among the same ranks in the same type, in the order of the
    first; takes over what is sent."""
    together: dict[tuple[int, torch.dtype], tuple[list[EdgeSpec], list[Packed], list[torch.Tensor]]] = {}
    while sent:
        spec, route, value = sent.pop(0)
        specs, routes, values = together.setdefault((id(route.group), value.dtype), ([], [], []))
        specs.append(spec)
        routes.append(route)
        values.append(value)
        del value
    found = []
    for specs, routes, values in together.values():
        group = routes[0].group
        assert group is not None
        # First: it may change what has to stay.
        arriving = collective(values, group)
        found.append(UnderWay(specs, routes, values, arriving))
    return found
