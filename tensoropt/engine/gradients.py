"""Gradients of a running plan: flat, persistent buckets, reduced once per step.

Autograd accumulates partial sums in views of the buckets. In the last backward of a step each bucket is
all-reduced over its mesh axes as soon as its last gradient is complete.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from tensoropt.engine.runtime import Runtime
from tensoropt.sharding.buckets import Bucket
from tensoropt.sharding.strategy import Scattered


class DeferredStep:
    """The state of a step from its forward until ``loss.backward()`` has run (``done``)."""

    done = False


_S = TypeVar("_S", bound=DeferredStep)


def whole_gradient(gradient: torch.Tensor) -> torch.Tensor:
    """Return a loss's gradient as a plain tensor, also if the script made it a DTensor."""
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


class _DeferredBackward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        loss: torch.Tensor,
        step: DeferredStep,
        finish: Callable[[Any, torch.Tensor], None],
    ) -> torch.Tensor:
        ctx.step, ctx.finish = step, finish
        # A function that returns its input as it is would hand out the input itself, with its own history.
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        # Autograd would call this once more for a retained graph; the gradients were added to `.grad` the
        # first time.
        if ctx.step.done:
            raise RuntimeError("this loss was already used for backward(); run the model again")
        ctx.step.done = True
        ctx.finish(ctx.step, whole_gradient(gradient))
        return None, None, None, None


def defer_backward(
    anchor: torch.Tensor, loss: torch.Tensor, step: _S, finish: Callable[[_S, torch.Tensor], None]
) -> torch.Tensor:
    """Return a copy of ``loss`` for the script; its backward calls ``finish(step, gradient of the loss)``.

    A second backward raises RuntimeError.

    Args:
        anchor: any tensor that requires a gradient, as autograd skips functions without such an input.
    """
    return _DeferredBackward.apply(anchor, loss, step, finish)


def is_deferred(node: Any) -> bool:
    """Return whether an autograd node belongs to a loss of :func:`defer_backward`."""
    return isinstance(node, _DeferredBackward._backward_cls)  # type: ignore[attr-defined]


def storage_key(value: torch.Tensor) -> int:
    """Return an identifier of a tensor's memory, equal for all of its views."""
    return value.untyped_storage()._cdata


class Pending(DeferredStep):
    """A step whose gradients wait for ``backward()``. ``saved``: copies of the gradients, if a later step has
    used the buckets meanwhile."""

    saved: list[torch.Tensor] | None = None


class Gradients:
    """Flat buckets of gradients, and the parameters in whose ``.grad`` scripts see them.

    Attributes:
        buckets: the buckets, in the order in which backward completes them.
        flats: the flat buffer of each bucket; None for one that needs no reduction.
        views: parameter -> gradient in the shard's shape: a view of a flat buffer, or a tensor of its own.
        owners: parameter -> the tensor whose ``.grad`` a user sees: the leaf, or its DTensor.
        delivered: the parameters whose gradients are scattered one block later and come through
            :meth:`add_late`.
        one_call: whether backward runs for one call of the model only; it then reduces buckets once full.
        shown: parameter -> the tensor shown as ``owners[name].grad``, which shares the view's memory.
    """

    def __init__(self, runtime: Runtime, buckets: tuple[Bucket, ...], leaves: Mapping[str, torch.Tensor]):
        self.runtime = runtime
        self.leaves = leaves
        self.buckets = buckets
        self.flats: list[torch.Tensor | None] = []
        self.views: dict[str, torch.Tensor] = {}
        for bucket in buckets:
            first = leaves[bucket.parameters[0]]
            sizes = [leaves[name].numel() for name in bucket.parameters]
            if runtime.group(bucket.axes) is None:
                self.flats.append(None)
                pieces = [torch.zeros(n, dtype=first.dtype, device=first.device) for n in sizes]
            else:
                flat = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
                self.flats.append(flat)
                pieces = list(flat.split(sizes))
            for name, piece in zip(bucket.parameters, pieces, strict=True):
                self.views[name] = piece.view(leaves[name].shape)
        self.owners: dict[str, torch.Tensor] = {name: leaves[name] for name in self.views}
        self.delivered: Mapping[str, Scattered] = {}
        self.one_call = True
        self.shown: dict[str, torch.Tensor] = dict(self.views)
        self.wrap: Callable[[str, torch.Tensor], torch.Tensor] = lambda name, value: value
        self._bucket_of = {n: i for i, bucket in enumerate(buckets) for n in bucket.parameters}
        # Storages of gradients that nothing reduces; what autograd makes may take their place (_may_stay).
        self._own = {storage_key(self.views[n]) for n, i in self._bucket_of.items() if self.flats[i] is None}
        # Weak: a loss that the script drops without a backward frees its step, whose gradients nobody needs.
        self._holder: weakref.ref[Pending] | None = None
        self._stash: list[list[torch.Tensor] | None] = [None] * len(buckets)
        # The part of the stash that users see while a step waits for its backward.
        self._hidden: dict[str, torch.Tensor] = {}
        # Gradients that others put into `.grad`, to be added to this plan's result.
        self._outside: dict[str, torch.Tensor] = {}
        self._committed = False
        self._eager = False
        self._absent: set[str] = set()
        self._missing = [0] * len(buckets)
        # The number of parts still to come of a gradient that comes in several parts.
        self._parts: dict[str, int] = {}
        self._works: list[Any] = []
        self._started: set[int] = set()
        for name in self.views:
            # Called each time that autograd has finished a leaf, after it wrote or added to ``.grad``.
            leaves[name].register_post_accumulate_grad_hook(functools.partial(self._arrived, name))

    def show_as(
        self, owners: Mapping[str, torch.Tensor], wrap: Callable[[str, torch.Tensor], torch.Tensor]
    ) -> None:
        """Let scripts find gradients in the ``.grad`` of ``owners``, each as ``wrap(name, view)``."""
        self.wrap = wrap
        self.owners = {name: owners[name] for name in self.views}
        self.shown = {name: wrap(name, view) for name, view in self.views.items()}

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The flat buffers, and the gradients that need no reduction."""
        return [tensor for index in range(len(self.buckets)) for tensor in self._contents(index)]

    def _contents(self, index: int) -> list[torch.Tensor]:
        flat = self.flats[index]
        return [self.views[name] for name in self.buckets[index].parameters] if flat is None else [flat]

    # -- users ------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Forget all gradients, as ``zero_grad`` does."""
        for owner in self.owners.values():
            owner.grad = None

    def _adopt(self) -> None:
        """Copy the parameters' ``.grad``, as the script left them, into the buckets; None counts as zeros."""
        for name, view in self.views.items():
            grad = self.owners[name].grad
            if grad is None:
                view.zero_()
            # The script put a tensor of its own there (a clipped one, say); changes in place are in the view
            # already.
            elif grad is not self.shown[name]:
                local = grad.to_local() if hasattr(grad, "to_local") else grad
                if local.data_ptr() != view.data_ptr():
                    view.copy_(local.reshape(view.shape))

    def _collect(self) -> None:
        """Set aside gradients in ``.grad`` that this plan did not compute, such as that of a penalty."""
        for name, owner in self.owners.items():
            grad = owner.grad
            if grad is None or grad is self.shown[name] or grad is self._hidden.get(name):
                continue
            if owner is self.leaves[name]:  # autograd's own place for what it makes
                continue
            before = self._outside.get(name)
            self._outside[name] = grad if before is None else before + grad
            owner.grad = None

    def _local(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        shown = self.shown[name]
        if isinstance(gradient, DTensor):
            if isinstance(shown, DTensor) and gradient.placements != shown.placements:
                whole = [Replicate()] * gradient.device_mesh.ndim
                gradient = gradient.redistribute(placements=whole).redistribute(placements=shown.placements)
            gradient = gradient.to_local()
        return gradient.reshape(self.views[name].shape)

    # -- a backward -------------------------------------------------------------------------------

    def occupy(self, pending: Pending | None = None) -> None:
        """Prepare the buckets for another backward, and set aside gradients in them that are still needed.

        Args:
            pending: the step that will own these gradients, if they wait for the user's ``backward()``.
        """
        # A loss that the script drops without a backward leaves reductions under way.
        self._wait()
        self._collect()
        holder = self._holder() if self._holder is not None else None
        self._absent = set(self.views)
        # The buckets belong to a step that waits for its backward: the copies are made before anything is
        # reset.
        if holder is not None and not holder.done:
            holder.saved = [tensor.clone() for tensor in self.tensors]
        # The script did not clear all gradients: what is there is to be added to, but must not be reduced
        # twice.
        elif self._committed and any(owner.grad is not None for owner in self.owners.values()):
            self._adopt()
            self._set_aside(keep_local=pending is None)
        self._committed = False
        if pending is None:
            # Gradients that come to `.grad` from elsewhere during this backward must not be mixed with those
            # that are reduced.
            for name, owner in self.owners.items():
                if owner is not self.leaves[name]:
                    owner.grad = None
        # Micro-batches add up before anything is reduced; see :meth:`begin_last`.
        self._eager = pending is None
        self._holder = weakref.ref(pending) if pending is not None else None
        # With no ``.grad`` autograd hands over the tensor that it made, instead of adding it to zeros.
        for name, view in self.views.items():
            self.leaves[name].grad = None if name in self._absent else view
        self._started = set()
        self._missing = [len(bucket.parameters) for bucket in self.buckets]
        self._parts = {name: parts.sums + parts.others for name, parts in self.delivered.items()}

    def begin_last(self) -> None:
        """Begin the last micro-batch's backward, in which each bucket is reduced after its last gradient."""
        self._eager = True

    def _set_aside(self, *, keep_local: bool) -> None:
        for index, bucket in enumerate(self.buckets):
            if keep_local and self.flats[index] is None:
                # Nothing reduces it, so autograd may continue adding to the same tensor.
                self._absent.difference_update(bucket.parameters)
            else:
                # These sums are reduced already. Added to before the all-reduce they would count once per
                # rank.
                self._stash[index] = [tensor.clone() for tensor in self._contents(index)]

    def _arrived(self, name: str, leaf: torch.Tensor) -> None:
        """Put a finished gradient into its bucket, and reduce the bucket if complete."""
        if leaf.grad is None:  # of one that is delivered otherwise
            return
        if name in self._absent:
            with torch.no_grad():
                # In `no_grad`, as writing into a view of a bucket is no part of the graph.
                if self._may_stay(name, leaf.grad):
                    self._replace(name, leaf.grad)
                else:
                    self.views[name].copy_(leaf.grad)
            self._absent.remove(name)
            leaf.grad = self.views[name]
        late = self.delivered.get(name)
        if late is None or (late.others and self.one_call):
            self._count(name)

    def take_in(self, name: str) -> None:
        """Put a leaf's gradient that came without autograd's hooks into its bucket."""
        self._arrived(name, self.leaves[name])

    def wait(self) -> None:
        """Reduce the remaining gradients and wait for all reductions."""
        self.start_rest()
        self._wait()

    def _may_stay(self, name: str, gradient: torch.Tensor) -> bool:
        """Return whether to store ``gradient`` without a copy: it is never reduced and shares no memory."""
        if self.flats[self._bucket_of[name]] is not None or gradient.layout is not torch.strided:
            return False
        # A slice of a larger tensor would keep all of that alive until the next step.
        whole = gradient.untyped_storage().nbytes() == gradient.numel() * gradient.element_size()
        return whole and gradient.is_contiguous() and storage_key(gradient) not in self._own

    def _replace(self, name: str, gradient: torch.Tensor) -> None:
        before, shown = self.views[name], self.shown[name]
        self._own.remove(storage_key(before))
        self._own.add(storage_key(gradient))
        self.views[name] = gradient
        if shown is before:
            self.shown[name] = gradient
        elif isinstance(shown, DTensor):  # which takes 50 us to make
            # The DTensor stays and gets other memory: the script may hold on to the very object.
            local = shown.to_local()
            local.data = gradient.view(local.shape)
        else:
            # With other memory it would still be a view of the old one, and keep that forever.
            self.shown[name] = self.wrap(name, gradient)

    def _count(self, name: str) -> None:
        if self._eager:
            self._parts[name] = self._parts.get(name, 1) - 1
            if self._parts[name]:
                return
            index = self._bucket_of[name]
            self._missing[index] -= 1
            if self._missing[index] == 0:
                self._start(index)

    @torch.no_grad()
    def add_late(self, name: str, gradient: torch.Tensor) -> None:
        """Add a gradient that was reduced outside autograd."""
        if name in self._absent:
            self.views[name].copy_(gradient)
            self._absent.remove(name)
            self.leaves[name].grad = self.views[name]
        else:
            self.views[name].add_(gradient)
        if self.one_call or name not in self.delivered:
            self._count(name)

    @contextmanager
    def of_earlier(self) -> Iterator[None]:
        """A context in which adding gradients starts no reduction, as in micro-batches before the last."""
        eager, self._eager = self._eager, False
        try:
            yield
        finally:
            self._eager = eager

    def complete(self) -> None:
        """Set missing gradients to zero."""
        for name in self._absent:
            self.views[name].zero_()
            self.leaves[name].grad = self.views[name]
        self._absent = set()

    def hide(self) -> None:
        """Hide the gradients that the call of the model has already computed: until the script calls
        ``backward()``, ``.grad`` has what it had before the call."""
        self.start_rest()
        hidden = {}
        for index, bucket in enumerate(self.buckets):
            pieces = self._stashed(index)
            for name in bucket.parameters:
                owner = self.owners[name]
                # The script has not called `backward()` yet: gradients of this step must not be seen, let
                # alone be stepped on.
                if not pieces or owner.grad is None:
                    owner.grad = self._outside.pop(name, None)
                else:
                    owner.grad = hidden[name] = self.wrap(name, pieces[name])
        self._hidden = hidden

    def _stashed(self, index: int) -> dict[str, torch.Tensor]:
        stash, names = self._stash[index], self.buckets[index].parameters
        if stash is None:
            return {}
        pieces = list(stash)
        if self.flats[index] is not None:
            pieces = list(stash[0].split([self.leaves[name].numel() for name in names]))
        return {n: p.view(self.leaves[n].shape) for n, p in zip(names, pieces, strict=True)}

    def _start(self, index: int) -> None:
        flat = self.flats[index]
        self._started.add(index)
        if flat is not None:
            group = self.runtime.group(self.buckets[index].axes)
            # This does not wait: the rest of backward runs meanwhile, and `finish` waits for all.
            self._works.append(dist.all_reduce(flat, group=group, async_op=True))

    def start_rest(self) -> None:
        """Reduce the buckets that backward has not completed."""
        self.complete()
        for index in range(len(self.buckets)):
            # Buckets with a gradient that never came (a parameter that the loss does not reach): the same
            # ones on all ranks, which run the same graph.
            if index not in self._started:
                self._start(index)

    def _wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works = []

    def recall(self, pending: Pending) -> None:
        """Put a step's gradients back into the buckets, if another step has used them since."""
        self._collect()
        holder = self._holder() if self._holder is not None else None
        if not self._committed:
            self._drop_cleared()
        if holder is pending:
            return
        # Another step has used the buckets since, and occupy() has saved what this one had there.
        saved = pending.saved
        assert saved is not None
        pending.saved = None
        self.occupy(pending)
        self._absent = set()
        # The saved gradients were already reduced.
        self._started = set(range(len(self.buckets)))
        for tensor, value in zip(self.tensors, saved, strict=True):
            tensor.copy_(value)

    def _drop_cleared(self) -> None:
        for index in range(len(self.buckets)):
            for name, piece in self._stashed(index).items():
                if self.owners[name].grad is None or self.owners[name].grad is not self._hidden.get(name):
                    piece.zero_()

    def finish(self, factor: torch.Tensor | None = None) -> None:
        """Reduce remaining buckets, multiply all by ``factor``, add gradients set aside, show the sums."""
        self._collect()
        self.wait()
        if factor is not None:
            for tensor in self.tensors:
                tensor.mul_(factor)
        for index, stash in enumerate(self._stash):
            if stash is not None:
                for tensor, piece in zip(self._contents(index), stash, strict=True):
                    tensor.add_(piece)
                self._stash[index] = None
        with torch.no_grad():
            for name, gradient in self._outside.items():
                self.views[name].add_(self._local(name, gradient))
        self._outside, self._hidden = {}, {}
        for name, owner in self.owners.items():
            # A parameter that the script has frozen since must have none, or optimizers would step it.
            owner.grad = self.shown[name] if owner.requires_grad else None
        self._holder = None
        self._committed = True
