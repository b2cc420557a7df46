"""Gradients of a running plan: flat, persistent buckets, reduced once per backward.

A gradient is copied into its view of a bucket as soon as autograd has made it, those of later micro-batches
are added there by autograd itself. They stay partial sums until the end of a backward, when each bucket is
all-reduced over its axes (started as soon as its last gradient is there). Buckets are not cleared first: a
parameter without a gradient gets its zeros at the end, which spares two passes over the memory of all others.
What a user sees as ``.grad`` is such a view, and a user may accumulate over several backward calls, clear
some gradients, or run further forward passes in between; so a bucket that holds something is set aside
before it is used again. In the usual loop (clear, forward, backward, step) nothing ever is.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from tensoropt.execute.runtime import Runtime
from tensoropt.sharding.buckets import Bucket


class Pending:
    """Gradients of a step whose micro-batches have run, waiting for the user's ``backward()``."""

    def __init__(self) -> None:
        self.saved: list[torch.Tensor] | None = None
        self.done = False


class Gradients:
    """Buckets and who owns their contents.

    Attributes:
        buckets: (bucket, flat buffer) in the order in which backward completes them.
        views: per trained parameter its piece, in the shard's shape.
        owners: per trained parameter the tensor whose ``.grad`` a user sees: the leaf itself, or the
            DTensor parameter that stands for it.
        shown: per trained parameter what is put into ``owners[name].grad``; shares the view's storage.
    """

    def __init__(self, runtime: Runtime, buckets: tuple[Bucket, ...], leaves: Mapping[str, torch.Tensor]):
        self.runtime = runtime
        self.leaves = leaves
        self.buckets: list[tuple[Bucket, torch.Tensor]] = []
        self.views: dict[str, torch.Tensor] = {}
        for bucket in buckets:
            first = leaves[bucket.parameters[0]]
            sizes = [leaves[name].numel() for name in bucket.parameters]
            flat = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
            self.buckets.append((bucket, flat))
            for name, piece in zip(bucket.parameters, flat.split(sizes), strict=True):
                self.views[name] = piece.view(leaves[name].shape)
        self.owners: dict[str, torch.Tensor] = {name: leaves[name] for name in self.views}
        self.shown: dict[str, torch.Tensor] = dict(self.views)
        self.wrap: Callable[[str, torch.Tensor], torch.Tensor] = lambda name, value: value
        self._bucket_of = {n: i for i, (bucket, _) in enumerate(self.buckets) for n in bucket.parameters}
        self._holder: weakref.ref[Pending] | None = None
        self._stash: list[torch.Tensor | None] = [None] * len(self.buckets)
        self._committed = False
        self._eager = False
        self._absent: set[str] = set()
        self._missing = [0] * len(self.buckets)
        self._works: list[Any] = []
        self._started: set[int] = set()
        for name in self.views:
            leaves[name].register_post_accumulate_grad_hook(functools.partial(self._arrived, name))

    def show_as(
        self, owners: Mapping[str, torch.Tensor], wrap: Callable[[str, torch.Tensor], torch.Tensor]
    ) -> None:
        """Show gradients on ``owners`` from now on, as ``wrap(name, view)``."""
        self.wrap = wrap
        self.owners = {name: owners[name] for name in self.views}
        self.shown = {name: wrap(name, view) for name, view in self.views.items()}

    # -- users ------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Forget all gradients, as ``zero_grad`` does."""
        for owner in self.owners.values():
            owner.grad = None

    def _visible(self, name: str) -> bool:
        return self.owners[name].grad is not None

    def _adopt(self) -> None:
        """Bring the views up to what the user left in ``.grad``: cleared, kept or replaced."""
        for name, view in self.views.items():
            grad = self.owners[name].grad
            if grad is None:
                view.zero_()
            elif grad is not self.shown[name]:
                local = grad.to_local() if hasattr(grad, "to_local") else grad
                if local.data_ptr() != view.data_ptr():
                    view.copy_(local.reshape(view.shape))

    # -- a backward -------------------------------------------------------------------------------

    def occupy(self, pending: Pending | None = None) -> None:
        """Make room for a new accumulation; what the buckets held is set aside.

        Args:
            pending: whose gradients these will be, if they have to wait for the user's ``backward()``.
        """
        holder = self._holder() if self._holder is not None else None
        self._absent = set(self.views)
        if holder is not None and not holder.done:
            holder.saved = [flat.clone() for _, flat in self.buckets]
        elif self._committed and any(self._visible(name) for name in self.views):
            self._adopt()
            self._set_aside(keep_local=pending is None)
        self._committed = False
        self._eager = pending is None
        self._holder = weakref.ref(pending) if pending is not None else None
        for name, view in self.views.items():
            self.leaves[name].grad = None if name in self._absent else view
        self._works, self._started = [], set()
        self._missing = [len(bucket.parameters) for bucket, _ in self.buckets]

    def _set_aside(self, *, keep_local: bool) -> None:
        """Stash committed buckets; one that needs no reduction simply goes on adding up."""
        for index, (bucket, flat) in enumerate(self.buckets):
            if keep_local and self.runtime.group(bucket.axes) is None:
                self._absent.difference_update(bucket.parameters)
            else:
                self._stash[index] = flat.clone()

    def _arrived(self, name: str, leaf: torch.Tensor) -> None:
        """Autograd is through with a leaf: its gradient goes to its bucket, and a bucket that has all of its
        own on its way."""
        if name in self._absent:
            assert leaf.grad is not None
            with torch.no_grad():
                self.views[name].copy_(leaf.grad)
            self._absent.remove(name)
            leaf.grad = self.views[name]
        if self._eager:
            index = self._bucket_of[name]
            self._missing[index] -= 1
            if self._missing[index] == 0:
                self._start(index)

    @torch.no_grad()
    def bring(self, name: str, gradient: torch.Tensor) -> None:
        """Take a gradient that waited elsewhere, as if autograd had just added it."""
        if name in self._absent:
            self.leaves[name].grad = gradient
        else:
            self.views[name].add_(gradient)
        self._arrived(name, self.leaves[name])

    def complete(self) -> None:
        """No further gradient comes: those that have not are zero."""
        for name in self._absent:
            self.views[name].zero_()
            self.leaves[name].grad = self.views[name]
        self._absent = set()

    def hide(self) -> None:
        """While micro-batches wait for ``backward()``, users see what was there before the step."""
        self.complete()
        for bucket, flat, stash in self._stashed():
            pieces = (
                stash.split([self.leaves[n].numel() for n in bucket.parameters])
                if stash is not None
                else None
            )
            for i, name in enumerate(bucket.parameters):
                owner = self.owners[name]
                if pieces is None or owner.grad is None:
                    owner.grad = None
                else:
                    owner.grad = self.wrap(name, pieces[i].view(self.leaves[name].shape))
            del flat

    def _stashed(self) -> list[tuple[Bucket, torch.Tensor, torch.Tensor | None]]:
        return [(b, flat, stash) for (b, flat), stash in zip(self.buckets, self._stash, strict=True)]

    def _start(self, index: int) -> None:
        bucket, flat = self.buckets[index]
        group = self.runtime.group(bucket.axes)
        self._started.add(index)
        if group is not None:
            self._works.append(dist.all_reduce(flat, group=group, async_op=True))

    def recall(self, pending: Pending) -> None:
        """Make the buckets hold the gradients of this step again."""
        holder = self._holder() if self._holder is not None else None
        if holder is pending:
            self._drop_cleared()
            return
        saved = pending.saved
        assert saved is not None
        pending.saved = None
        self.occupy(pending)
        self._absent = set()
        for (_, flat), value in zip(self.buckets, saved, strict=True):
            flat.copy_(value)

    def _drop_cleared(self) -> None:
        """Of what was set aside before a waiting step, forget what the user has cleared since."""
        for bucket, _, stash in self._stashed():
            if stash is None:
                continue
            for name, piece in zip(
                bucket.parameters,
                stash.split([self.leaves[n].numel() for n in bucket.parameters]),
                strict=True,
            ):
                if not self._visible(name):
                    piece.zero_()

    def scale(self, factor: torch.Tensor) -> None:
        for _, flat in self.buckets:
            flat.mul_(factor)

    def finish(self) -> None:
        """Reduce what is not reduced yet, add what was set aside, and show the result."""
        self.complete()
        for index in range(len(self.buckets)):
            if index not in self._started:
                self._start(index)
        for work in self._works:
            work.wait()
        self._works = []
        for index, (_, flat) in enumerate(self.buckets):
            stash = self._stash[index]
            if stash is not None:
                flat.add_(stash)
                self._stash[index] = None
        for name, owner in self.owners.items():
            owner.grad = self.shown[name]
        self._holder = None
        self._committed = True
