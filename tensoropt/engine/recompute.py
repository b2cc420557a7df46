"""Activation checkpointing: nodes of a lowered graph become a module that runs again in backward."""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils.checkpoint import checkpoint

from tensoropt.engine.partly_recomputed import NodeRuns, PartlyRecomputed, SavingHooks
from tensoropt.engine.runtime import Runtime
from tensoropt.sharding.regions import recomputed
from tensoropt.sharding.reshard.redistribute import Ahead, EdgeSpec, travel


class _Note(NamedTuple):
    """The object that autograd saves in place of a view of a tensor; ``make`` recreates that tensor."""

    make: Callable[[], torch.Tensor]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int | torch.SymInt


class _Copy:
    """A gathered copy of an activation, which backward remakes once.

    Attributes:
        saved: whether autograd has saved it since the last :func:`gather_again`.
        again: the copy made by backward; None before.
    """

    __slots__ = ("__weakref__", "_micro_batch", "_source", "_spec", "_version", "again", "saved")

    def __init__(self, source: torch.Tensor, spec: EdgeSpec, micro_batch: int):
        self._source, self._spec, self._micro_batch = source.detach(), spec, micro_batch
        self._version = source._version
        self.saved = False
        self.again: torch.Tensor | None = None

    def make(self, runtime: Runtime) -> torch.Tensor:
        """Return the copy, remade if needed; RuntimeError if its source has been changed in place."""
        if self.again is None:
            if self._source._version != self._version:
                raise RuntimeError(
                    f"{self._spec.name}, which backward gathers again, has been modified by an inplace "
                    f"operation: it is at version {self._source._version}, expected {self._version}; change "
                    "a copy of it"
                )
            # The group's shards are those of the micro-batch that forward ran.
            runtime.micro_batch = self._micro_batch
            with torch.no_grad():
                self.again = travel(runtime, self._source, self._spec)
        return self.again


def _copy_in(value: torch.Tensor) -> _Copy | None:
    # An attribute of the storage, which lives as long as the memory does, whichever tensors lie in it.
    return getattr(value.untyped_storage(), "gathered_again", None)


def gather_again(runtime: Runtime, made: torch.Tensor, *copies: torch.Tensor) -> None:
    """Regather those ``copies`` that autograd saved, when backward reaches the node that made ``made``."""
    if torch.compiler.is_compiling() or made.grad_fn is None:
        return
    for value in copies:
        copy = _copy_in(value)
        if copy is not None and copy.saved:
            copy.saved = False
            made.grad_fn.register_prehook(functools.partial(_make, weakref.ref(copy), runtime))


def _make(copy: weakref.ref[_Copy], runtime: Runtime, _: Any) -> None:
    if (there := copy()) is not None:
        there.make(runtime)


def keep_gathered(runtime: Runtime, gathered: torch.Tensor) -> None:
    """Let autograd save ``gathered`` (:meth:`RegatheredParameters.keep`); called by a node of the graph."""
    if not torch.compiler.is_compiling():
        runtime.kept(gathered)


class RegatheredParameters:
    """Saved-tensor hooks that save, in place of a gathered or cast tensor, a function that remakes it."""

    def __init__(self, runtime: Runtime):
        self.runtime = runtime
        # By storage, as autograd also saves views (a transposed weight). The weak reference tells a
        # parameter from another tensor that was later given the same storage address.
        self._known: dict[int, tuple[list[weakref.ref], torch.Tensor, EdgeSpec]] = {}

    def note(self, gathered: torch.Tensor, shard: torch.Tensor, spec: EdgeSpec) -> None:
        """Record that ``gathered`` was made from ``shard`` by a resharding."""
        if spec.gathered_again:
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():
                copy = _Copy(shard, spec, self.runtime.micro_batch)
                gathered.untyped_storage().gathered_again = copy  # type: ignore[attr-defined]
            return
        key, readers = gathered.untyped_storage()._cdata, [weakref.ref(gathered)]
        noted = self._known.get(key)
        # Groups that read one gathered parameter have separate tensors with the same storage.
        if noted is not None and noted[2] is spec:
            readers += [reader for reader in noted[0] if reader() is not None]
        self._known[key] = (readers, shard.detach(), spec)

    def keep(self, gathered: torch.Tensor) -> None:
        """Let autograd save ``gathered`` itself from now on, because operators of other groups read it."""
        key = gathered.untyped_storage()._cdata
        if (noted := self._known.get(key)) is None:
            return
        readers = [reader for reader in noted[0] if reader() is not None and reader() is not gathered]
        if readers:
            self._known[key] = (readers, *noted[1:])
        else:
            del self._known[key]

    def pack(self, value: torch.Tensor) -> torch.Tensor | _Note:
        make = self._maker(value)
        # As a view, by shape, stride and offset: the storage that is made again lies as the first one did.
        return value if make is None else _Note(make, value.shape, value.stride(), value.storage_offset())

    def _maker(self, value: torch.Tensor) -> Callable[[], torch.Tensor] | None:
        """Return a function that makes a saved tensor's storage again; None if autograd keeps it."""
        if (copy := _copy_in(value)) is not None:
            copy.saved = True
            return functools.partial(copy.make, self.runtime)
        noted = self._known.get(value.untyped_storage()._cdata) if self._known else None
        # A stored parameter that is used whole shares the storage of what was "gathered": it exists anyway.
        if noted is None or isinstance(value, torch.nn.Parameter):
            return None
        if not any(reader() is not None for reader in noted[0]):
            return None
        _, shard, spec = noted
        runtime = self.runtime
        if spec.block is not None:
            runtime.ahead.note(spec)
        return functools.partial(self._gathered_again, shard, spec, runtime.ahead, runtime.micro_batch)

    def unpack(self, packed: torch.Tensor | _Note) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        return packed.make().as_strided(packed.shape, packed.stride, packed.offset)

    @torch.no_grad()
    def _gathered_again(
        self, shard: torch.Tensor, spec: EdgeSpec, ahead: Ahead, micro_batch: int
    ) -> torch.Tensor:
        # The gather's group and shard are those of the micro-batch that forward ran.
        self.runtime.micro_batch = micro_batch
        whole = ahead.take_again(spec) if spec.block is not None else None
        return travel(self.runtime, shard, spec) if whole is None else whole


class Recomputed(torch.nn.Module):
    """Runs a region's graph so that backward recomputes its intermediate tensors.

    Args:
        part: the region's graph if backward reruns only a part of it; None if backward reruns all of it. A
            compiled model reruns all of it in any case.
    """

    def __init__(self, body: fx.GraphModule, runtime: Runtime, part: PartlyRecomputed | None = None):
        super().__init__()
        self.body = body
        self.runtime = runtime
        self.part = part

    def forward(self, *inputs: Any) -> Any:
        # In part, the inputs come in one list, so that nothing outside holds what forward is past.
        values: Any = inputs if self.part is None else inputs[0]
        # There will be no backward; running the body directly avoids the hooks.
        if not torch.is_grad_enabled():
            return self.body(*values)
        # Dropout's masks and shards of the batch depend on where the step was when forward ran.
        runtime = self.runtime
        forward_at = runtime.step, runtime.micro_batch, runtime.ahead

        @contextmanager
        def placed() -> Iterator[None]:
            position = runtime.step, runtime.micro_batch, runtime.ahead
            runtime.step, runtime.micro_batch, runtime.ahead = forward_at
            try:
                yield
            finally:
                # Backward of what follows the region continues with its own counters.
                runtime.step, runtime.micro_batch, runtime.ahead = position

        def run(*given: Any) -> Any:
            with placed():
                return self.body(*given)

        if torch.compiler.is_compiling():  # a compiler knows PyTorch's own way, and makes it its own
            return checkpoint(run, *values, use_reentrant=False, early_stop=False)
        return recomputed(run, *values) if self.part is None else self.part(values, placed)


def extract_regions(
    root: torch.nn.Module,
    units: Iterable[tuple[str | None, Sequence[fx.Node]]],
    runtime: Runtime,
    runs: Mapping[fx.Node, NodeRuns],
) -> fx.Graph:
    """Move each region's nodes into a submodule of ``root``; return the graph that calls them.

    Args:
        units: pairs of a region's name and its nodes, in topological order. The name is None for nodes
            outside of regions.
        runs: node of a region -> whether it runs once, or again in backward.
    """
    result = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for name, nodes in units:
        if name is None:
            copies.update((node, result.node_copy(node, lambda n: copies[n])) for node in nodes)
            continue
        inputs, outputs, body = _body(root, nodes)
        # Names of submodules have no dots, and fx makes attributes of them.
        target = "recompute_" + name.replace(".", "_").replace("#", "_")
        of_region = {node: runs[node] for node in nodes}
        part = None
        if not all(each.again for each in of_region.values()):
            part = PartlyRecomputed(root, inputs, outputs, of_region, SavingHooks(*runtime.saving))
        root.add_module(target, Recomputed(body, runtime, part))
        given = tuple(copies[n] for n in inputs)
        call = result.call_module(target, given if part is None else (result.call_function(list, (given,)),))
        for index, node in enumerate(outputs):
            copies[node] = result.call_function(operator.getitem, (call, index))
    return result


def _body(
    root: torch.nn.Module, nodes: Sequence[fx.Node]
) -> tuple[list[fx.Node], list[fx.Node], fx.GraphModule]:
    inside = set(nodes)
    # Parameters' shards come in as inputs: gathers are inside the region and are repeated with it.
    inputs = list(dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in inside))
    outputs = [node for node in nodes if any(user not in inside for user in node.users)]
    graph = fx.Graph()
    copies = {n: graph.placeholder(n.name) for n in inputs}
    for node in nodes:
        copies[node] = graph.node_copy(node, lambda n: copies[n])
    graph.output(tuple(copies[n] for n in outputs))
    return inputs, outputs, fx.GraphModule(root, graph, class_name="Region")
