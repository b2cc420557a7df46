"""The live memory while operators run, and its peaks: a dispatch mode that tracks storages."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tensoropt.profiling.flops import flops_of


class LiveTensors(TorchDispatchMode):
    """A mode that tracks the storages that operators create while it is active.

    Attributes:
        now, peak: the live bytes, and their maximum since :meth:`restart`.
        own, own_peak: the same without what was made while ``lent`` was set.
        lent: what is made now also belongs to another owner, which counts it.
        before: called before each operator.
        traffic: bytes that operators read and wrote, except those that only make views.
        flops: multiply-adds counted as two.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = self.own = self.own_peak = 0
        self.lent = False
        self.before: Callable[[], None] = lambda: None
        self.traffic = self.flops = 0
        self._seen: dict[int, weakref.ref] = {}

    @property
    def storages(self) -> Mapping[int, weakref.ref]:
        """The storages that it knows, each with its reference."""
        return self._seen

    def ignore(self, tensor: torch.Tensor) -> None:
        """Do not count a tensor's storage, which another owner made."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        # When it dies, a new storage, which then has to count, may reuse its address.
        self._seen[key] = weakref.ref(storage, lambda _: self._seen.pop(key, None))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.before()
        result = func(*args, **kwargs)
        if (count := flops_of(func)) is not None:
            self.flops += count(*args, **kwargs, out_val=result)
        fresh = 0  # bytes; 0 for a view, which shares a known storage
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                # If a storage is larger than its tensor, the rest is not written.
                fresh += min(self._track(tensor), tensor.numel() * tensor.element_size())
        if fresh:
            # Views read and write nothing; only operators that make a storage count as traffic.
            reads = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            self.traffic += fresh + sum(t.numel() * t.element_size() for t in reads)
        return result

    def _track(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        known = self._seen.get(key)
        if known is not None and known() is not None:
            return 0

        own = 0 if self.lent else size

        # The storage itself reports when it dies: its tensors may come and go.
        def gone(_: Any) -> None:
            self._seen.pop(key, None)
            self._count(-size, -own)

        self._seen[key] = weakref.ref(storage, gone)
        self._count(size, own)
        return size

    def _count(self, size: int, own: int) -> None:
        self.now, self.own = self.now + size, self.own + own
        self.peak, self.own_peak = max(self.peak, self.now), max(self.own_peak, self.own)

    def restart(self) -> None:
        """Start tracking the peaks from now on."""
        self.peak, self.own_peak = self.now, self.own


class Peak(NamedTuple):
    """The peak of live memory, and the peak of the part that no other owner counts."""

    most: int
    own: int


class Activity(NamedTuple):
    """The activity during which memory is alive, as far as parameters matter.

    Attributes:
        reads: parameters that are read now.
        made: the parameters whose gradients were made before.
    """

    reads: frozenset[str] = frozenset()
    made: frozenset[str] = frozenset()


class PeakBytes(NamedTuple):
    """Peak bytes, by the activity during which they occurred."""

    of: Mapping[Activity, Peak]

    def above(self, kept: int, *, reading: bool = False, own: bool = False) -> int:
        """The highest peak above ``kept``; ``reading``: only of those while parameters were read."""
        found = [peak.own if own else peak.most for at, peak in self.of.items() if at.reads or not reading]
        return max(0, max(found, default=0) - kept)


class PeakTracker:
    """Separates the peaks of live tensors by activity.

    In backward, an autograd node that asks for a parameter begins an activity, which ends with the node.
    """

    def __init__(self, live: LiveTensors):
        self.live = live
        self._of: dict[Activity, Peak] = {}
        self._node: Any = None
        self._activity = Activity()
        self._arrived: set[str] = set()

    def read(self, name: str) -> None:
        """Record that the currently running node of backward asks for a parameter."""
        # What was alive until now belongs to the previous activity: the parameter is gathered from here on.
        self.close()
        self.book(self._activity)
        self._node = torch._C._current_autograd_node()
        self._activity = self._activity._replace(reads=self._activity.reads | {name})

    def arrived(self, name: str) -> None:
        """Record that a parameter's gradient was made; it is released before the next operator."""
        self._arrived.add(name)

    def close(self, *, ended: bool = False) -> None:
        """Record activities that are over by now: a node that reads parameters, the making of gradients."""
        # Autograd does not report when a node ends: the next operator that runs in another node shows it.
        other = self._node is not None and torch._C._current_autograd_node() is not self._node
        if ended or other or self._arrived:
            self.book(self._activity)
            reads = frozenset() if other or ended else self._activity.reads
            self._activity = Activity(reads, self._activity.made | self._arrived)
            self._node, self._arrived = None if other else self._node, set()
        if ended:
            self.book(self._activity)

    def book(self, activity: Activity) -> None:
        """Count the peak since the last recording as that of an activity."""
        before = self._of.get(activity, Peak(0, 0))
        self._of[activity] = Peak(max(before.most, self.live.peak), max(before.own, self.live.own_peak))
        self.live.restart()

    def take(self) -> PeakBytes:
        """Return the peaks by activity since the last call."""
        found, self._of = PeakBytes(self._of), {}
        return found
