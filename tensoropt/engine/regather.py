"""Gathered or cast parameters that autograd does not keep: backward makes them anew (ZeRO, stage 3).

Rajbhandari et al., SC 2020, section 5: parameters are gathered for a layer's forward, dropped, and gathered
once more for its backward.
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch

from tensoropt.engine.runtime import Runtime
from tensoropt.sharding.reshard.redistribute import Ahead, EdgeSpec, travel


class _Note(NamedTuple):
    """A note that autograd saves in place of a view of a gathered parameter: how to make it anew."""

    shard: torch.Tensor
    spec: EdgeSpec
    ahead: Ahead
    micro_batch: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int | torch.SymInt


def keep_gathered(runtime: Runtime, gathered: torch.Tensor) -> None:
    """Node of the lowered graph: see :meth:`RegatheredParameters.keep`."""
    if not torch.compiler.is_compiling():
        runtime.kept(gathered)


class RegatheredParameters:
    """Saved-tensor hooks that replace each gathered or cast parameter that autograd would save by a note.

    Backward unpacks the note by casting the stored shard and issuing the edge's gather once more.
    """

    def __init__(self, runtime: Runtime):
        self.runtime = runtime
        # By storage, as autograd also saves views (a transposed weight). The weak reference tells a
        # parameter from another tensor that was later given the same storage address.
        self._known: dict[int, tuple[list[weakref.ref], torch.Tensor, EdgeSpec]] = {}

    def note(self, gathered: torch.Tensor, shard: torch.Tensor, spec: EdgeSpec) -> None:
        """Remember that ``gathered`` was made from ``shard`` along an edge."""
        key, readers = gathered.untyped_storage()._cdata, [weakref.ref(gathered)]
        known = self._known.get(key)
        # Groups that read one gathered parameter have separate tensors with the same storage.
        if known is not None and known[2] is spec:
            readers += [reader for reader in known[0] if reader() is not None]
        self._known[key] = (readers, shard.detach(), spec)

    def keep(self, gathered: torch.Tensor) -> None:
        """Let autograd keep what it saves of ``gathered`` from now on: views of it have left for other
        groups, whose backward does not know that there is something to gather."""
        key = gathered.untyped_storage()._cdata
        if (known := self._known.get(key)) is None:
            return
        readers = [reader for reader in known[0] if reader() is not None and reader() is not gathered]
        if readers:
            self._known[key] = (readers, *known[1:])
        else:
            del self._known[key]

    def hooks(self) -> AbstractContextManager[None]:
        """Return the context in which a forward has to run for its gathered parameters to be dropped."""
        hooks: AbstractContextManager[None] = torch.autograd.graph.saved_tensors_hooks(
            self._pack, self._unpack
        )
        return hooks

    def _pack(self, value: torch.Tensor) -> torch.Tensor | _Note:
        known = self._known.get(value.untyped_storage()._cdata) if self._known else None
        # A stored parameter that is used whole shares the storage of what was "gathered": it exists anyway.
        if known is None or isinstance(value, torch.nn.Parameter):
            return value
        if not any(reader() is not None for reader in known[0]):
            return value
        _, shard, spec = known
        # As a view, by shape, stride and offset: the storage that is gathered again lies as the first one
        # did.
        runtime = self.runtime
        if spec.block is not None:
            runtime.ahead.note(spec)
        lies = tuple(value.shape), value.stride(), value.storage_offset()
        return _Note(shard, spec, runtime.ahead, runtime.micro_batch, *lies)

    def _unpack(self, packed: torch.Tensor | _Note) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        # The gather's group and shard are those of the micro-batch that forward ran.
        self.runtime.micro_batch = packed.micro_batch
        with torch.no_grad():
            whole = packed.ahead.take_again(packed.spec) if packed.spec.block is not None else None
            if whole is None:
                whole = travel(self.runtime, packed.shard, packed.spec)
        return whole.as_strided(packed.shape, packed.stride, packed.offset)
