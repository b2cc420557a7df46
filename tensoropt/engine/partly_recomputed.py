"""Selective activation checkpointing: backward recomputes only a part of a region (a repeated block)."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.autograd.graph import saved_tensors_hooks

from tensoropt.sharding.regions import autocast_now, no_backward


@dataclass(frozen=True)
class NodeRuns:
    """Whether a node of a region's graph runs once, or also in the second forward.

    Attributes:
        again: whether the second forward, in backward, runs the node.
        moves: whether it is a resharding, which the second forward runs only if its source is recomputed and
            its result needed.
    """

    again: bool
    moves: bool = False


class SavingHooks(NamedTuple):
    """The pack and unpack hooks for tensors that autograd saves."""

    pack: Callable[[torch.Tensor], Any]
    unpack: Callable[[Any], torch.Tensor]


class PartlyRecomputed:
    """A region's graph, part of which runs again in backward.

    Args:
        root: the module whose attributes the nodes refer to.
        inputs: the nodes outside of the region whose results the region reads.
        outputs: the region's nodes whose results nodes outside of it read.
        nodes: the region's nodes in order, with how often each runs.
        saving: saved-tensor hooks for operators that run once.
    """

    def __init__(
        self,
        root: torch.nn.Module,
        inputs: Sequence[fx.Node],
        outputs: Sequence[fx.Node],
        nodes: Mapping[fx.Node, NodeRuns],
        saving: SavingHooks,
    ):
        self._root, self._nodes, self.saving = root, list(nodes), saving
        self._inputs, self._outputs = list(inputs), list(outputs)
        self.runs = list(nodes.values())
        self._number = {node: number for number, node in enumerate((*nodes, *inputs))}
        # What each node gives to the second forward.
        self._gives = {
            node: [n for n in node.all_input_nodes if n not in nodes or not nodes[n].again]
            for node, runs in nodes.items()
            if runs.again
        }
        self.moved_from = {
            self._number[node]: self._number[source]
            for node, runs in nodes.items()
            if runs.moves
            for source in node.all_input_nodes
            if source in nodes and not nodes[source].again
        }
        """Node number of a resharding -> node number of its source, for sources that run once."""
        self._first = self._first_forward()
        self._second: dict[frozenset[int], tuple[fx.GraphModule, list[int]]] = {}

    def __call__(
        self, inputs: list[Any], placed: Callable[[], AbstractContextManager[Any]]
    ) -> tuple[Any, ...]:
        """Run the region's forward.

        Args:
            inputs: a list that the call empties, so that each input is freed after its last reader.
            placed: a function that makes the context in which each forward runs.
        """
        call = _Call(self, inputs, placed)
        with saved_tensors_hooks(call.leave, call.take), placed():
            results: tuple[Any, ...] = self._first(call, inputs)
        return results

    def _first_forward(self) -> fx.GraphModule:
        graph = fx.Graph()
        call, inputs = graph.placeholder("call"), graph.placeholder("inputs")
        copies = {node: graph.call_method("pop", (inputs, 0)) for node in self._inputs}
        for node in self._nodes:
            given = tuple(copies[n] for n in self._gives.get(node, ()))
            names = tuple(self._number[n] for n in self._gives.get(node, ()))
            step = functools.partial(_first, _function(node), self._number[node], names)
            copies[node] = _copied(graph, node, step, (call, given), copies)
        graph.output(tuple(copies[node] for node in self._outputs))
        return fx.GraphModule(self._root, graph, class_name="Region")

    def second(self, needed: frozenset[int], views: Mapping[int, _Lies]) -> tuple[fx.GraphModule, list[int]]:
        """Return the module of the second forward, and the node numbers of its inputs.

        Args:
            needed: the numbers of nodes that normally run once, but whose results backward needs.
            views: node number -> position of its value in a recomputed tensor, for nodes that run once.
        """
        if needed in self._second:
            return self._second[needed]
        runs = [n for i, n in enumerate(self._nodes) if self.runs[i].again or i in needed]
        running = set(runs)
        graph = fx.Graph()
        call = graph.placeholder("call")
        reads = dict.fromkeys(n for node in runs for n in node.all_input_nodes if n not in running)
        starts = [n for n in reads if self._number[n] not in views]
        copies = {node: graph.placeholder(node.name) for node in starts}
        for node in runs:
            for read in node.all_input_nodes:
                if read not in copies:
                    number = self._number[read]
                    owner = copies[self._nodes[views[number].owner]]
                    copies[read] = graph.call_method("view", (call, number, owner))
            step = functools.partial(_second, _function(node), self._number[node])
            copies[node] = _copied(graph, node, step, (call,), copies)
        graph.output(())
        module = fx.GraphModule(self._root, graph, class_name="SecondForward")
        made = self._second[needed] = module, [self._number[n] for n in starts]
        return made


def _function(node: fx.Node) -> Callable[..., Any]:
    assert callable(node.target), "a region calls functions only"
    return node.target


def _copied(
    graph: fx.Graph,
    node: fx.Node,
    step: functools.partial[Any],
    args: tuple[Any, ...],
    copies: Mapping[fx.Node, fx.Node],
) -> fx.Node:
    """Add a call of ``step`` with ``args``, followed by the node's own arguments as ``copies`` maps them."""
    step.__name__ = node.name  # type: ignore[attr-defined]  # fx names the call after its target
    own = fx.map_arg((node.args, dict(node.kwargs)), lambda n: copies[n])
    copy = graph.call_function(step, (*args, *own[0]), own[1])
    copy.meta.update(node.meta)
    return copy


class _Lies(NamedTuple):
    """A tensor's position (shape, strides, offset) in the storage of a node's result.

    Attributes:
        owner: the number of the node that made the storage.
        item: the index, among that node's results, of the result with the storage.
        learns: whether the tensor requires a gradient.
    """

    owner: int
    item: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int | torch.SymInt
    learns: bool

    def of(self, value: Any) -> torch.Tensor:
        owner: torch.Tensor = _tensors(value)[self.item].detach()
        return owner.as_strided(self.shape, self.stride, self.offset)


class _Given:
    """An input of the second forward, kept alive by the saved tensors that need it (``claims``)."""

    __slots__ = ("__weakref__", "_unpack", "claims", "learns", "value", "version")

    def __init__(self, value: torch.Tensor, saving: SavingHooks):
        kept = saving.pack(value)
        self.value = kept.detach() if isinstance(kept, torch.Tensor) else kept
        self.learns, self.version, self._unpack = value.requires_grad, value._version, saving.unpack
        self.claims: list[weakref.ref[_Saved]] = []

    def take(self) -> torch.Tensor:
        """Return the value; RuntimeError if it has since been changed in place."""
        if isinstance(self.value, torch.Tensor):
            _check_version(self.value, self.version)
        return self._unpack(self.value).detach().requires_grad_(self.learns)


def _check_version(value: torch.Tensor, version: int) -> None:
    if value._version != version:
        raise RuntimeError(
            "a tensor that a partly recomputed region needs in backward has been modified by an inplace "
            f"operation: it is at version {value._version}, expected {version}; change a copy of it"
        )


class _Saved:
    """The object that autograd keeps in place of a saved tensor.

    Attributes:
        key: the number of a tensor to recompute; None if the tensor itself is kept.
        kept, version: the kept tensor, as the region's hooks pack it, and its version counter.
        given: the inputs of the second forward that this object keeps alive.
    """

    __slots__ = ("__weakref__", "given", "kept", "key", "version")

    def __init__(self, given: list[_Given], key: int | None = None, kept: Any = None, version: int = 0):
        self.given, self.key, self.kept, self.version = given, key, kept, version
        for box in given:
            box.claims.append(weakref.ref(self))


class _Call:
    """The state of one call of a region, alive as long as autograd may unpack a tensor that it saved."""

    def __init__(
        self,
        region: PartlyRecomputed,
        inputs: Sequence[Any],
        placed: Callable[[], AbstractContextManager[Any]],
    ):
        self._region, self._placed = region, placed
        self._autocast = autocast_now(inputs)
        self._current = -1
        self._saves = 0
        # By the number of its node: tensors that do not change hands by autograd, and those that do.
        self._given: dict[int, weakref.ref[_Given] | Any] = {}
        # Those that the next saved tensor claims; those that this call keeps alive.
        self._unclaimed: list[_Given] = []
        self._kept: list[_Given] = []
        self._views: dict[int, _Lies] = {}
        # The storages that the second forward makes again: tensors that lie in each, and who made it.
        self._remade: dict[int, tuple[list[weakref.ref[torch.Tensor]], int, int]] = {}
        # The keys of the tensors that each operator saves, in order, and of those that are values of others.
        self._own: dict[int, list[int]] = {}
        self._values: dict[int, list[tuple[int, _Lies]]] = {}
        self._needed = set[int]()
        self._made: dict[int, torch.Tensor] = {}
        self._has_run = False

    # -- forward ------------------------------------------------------------------------------------

    def begin(self, number: int, names: Sequence[int], given: Sequence[Any]) -> None:
        for name, value in zip(names, given, strict=True):
            if name in self._views:
                continue
            if name not in self._given:
                self._give(name, value)
            # Every reader claims it: autograd drops those whose results lead nowhere.
            if isinstance(known := self._given.get(name), weakref.ref) and (box := known()) is not None:
                self._unclaimed.append(box)
        self._current = number

    def _give(self, name: int, value: Any) -> None:
        if not isinstance(value, torch.Tensor):
            self._given[name] = value
        elif (lies := self._lies(value)) is not None:
            self._views[name] = lies
        else:
            # Whether anything claims it is known only when the second forward runs.
            self._kept.append(box := _Given(value, self._region.saving))
            self._given[name] = weakref.ref(box)

    def end(self, number: int, args: Sequence[Any], made: Any) -> None:
        runs = self._region.runs[number]
        again = runs.again
        if runs.moves and not again:
            lies = [lies for arg in _tensors(args) if (lies := self._lies(arg)) is not None]
            again = bool(lies)
            if again and number in self._region.moved_from:
                (self._views[self._region.moved_from[number]],) = lies
        for item, tensor in enumerate(_tensors(made)):
            found = self._find(tensor)
            if found is not None:
                found[0].append(weakref.ref(tensor))
            elif again:
                self._remade[tensor.untyped_storage()._cdata] = [weakref.ref(tensor)], number, item

    def _find(self, tensor: torch.Tensor) -> tuple[list[weakref.ref[torch.Tensor]], int, int] | None:
        found = self._remade.get(tensor.untyped_storage()._cdata)
        # Another tensor may have got the address of a storage that is no longer there.
        return found if found is not None and any(ref() is not None for ref in found[0]) else None

    def _lies(self, tensor: torch.Tensor) -> _Lies | None:
        if (found := self._find(tensor)) is None:
            return None
        lies = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
        return _Lies(found[1], found[2], *lies, tensor.requires_grad)

    def leave(self, tensor: torch.Tensor) -> _Saved:
        given, self._unclaimed = self._unclaimed, []
        number, key = self._current, self._saves
        self._saves += 1
        if self._region.runs[number].again:
            self._own.setdefault(number, []).append(key)
            return _Saved(given, key)
        if (lies := self._lies(tensor)) is not None:
            self._values.setdefault(lies.owner, []).append((key, lies))
            if not self._region.runs[lies.owner].again:
                self._needed.add(lies.owner)
            return _Saved(given, key)
        # Not the tensor itself: as a result of the operator that saves it, it would keep its own graph alive.
        kept = self._region.saving.pack(tensor)
        kept = kept.detach() if isinstance(kept, torch.Tensor) else kept
        return _Saved(given, kept=kept, version=tensor._version)

    # -- backward -----------------------------------------------------------------------------------

    def take(self, saved: _Saved) -> torch.Tensor:
        if not self._has_run or (saved.key is not None and saved.key not in self._made):
            self._run_again()
        if saved.key is not None:
            return self._made.pop(saved.key)
        if isinstance(saved.kept, torch.Tensor):
            _check_version(saved.kept, saved.version)
        return self._region.saving.unpack(saved.kept)

    def _run_again(self) -> None:
        self._has_run = True
        self._made.clear()
        body, starts = self._region.second(frozenset(self._needed), self._views)
        values = [self._start(number) for number in starts]
        hooks = saved_tensors_hooks(self._save, no_backward)
        with hooks, torch.enable_grad(), self._autocast(), self._placed():
            body(self, *values)
        # From now on what is claimed goes with the last claim. A graph that is kept may need the rest again.
        self._unclaimed.clear()
        self._kept = [box for box in self._kept if all(claim() is None for claim in box.claims)]

    def _start(self, number: int) -> Any:
        given = self._given[number]
        if not isinstance(given, weakref.ref):
            return given
        box = given()
        if box is None:
            raise RuntimeError("an earlier backward freed what a recomputed block needs; run the model again")
        return box.take()

    def begin_again(self, number: int) -> None:
        self._current = number
        self._left = list(reversed(self._own.get(number, ())))

    def end_again(self, number: int, made: Any) -> None:
        if self._left:
            saved = len(self._own[number])
            raise RuntimeError(
                f"an operator of a recomputed region saved {saved} tensors in forward and "
                f"{saved - len(self._left)} when it ran again; it must save the same tensors each time"
            )
        for key, lies in self._values.get(number, ()):
            self._made[key] = lies.of(made)

    def view(self, number: int, owner: Any) -> torch.Tensor:
        lies = self._views[number]
        return lies.of(owner).requires_grad_(lies.learns)

    def _save(self, tensor: torch.Tensor) -> None:
        if not self._region.runs[self._current].again:
            return
        if not self._left:
            raise RuntimeError(
                "an operator of a recomputed region saved more tensors when it ran again than the "
                f"{len(self._own.get(self._current, ()))} of its forward; it must save the same each time"
            )
        self._made[self._left.pop()] = tensor.detach()


def _first(
    function: Callable[..., Any],
    number: int,
    names: Sequence[int],
    call: _Call,
    given: Sequence[Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    call.begin(number, names, given)
    made = function(*args, **kwargs)
    call.end(number, args, made)
    return made


def _second(function: Callable[..., Any], number: int, call: _Call, *args: Any, **kwargs: Any) -> Any:
    call.begin_again(number)
    made = function(*args, **kwargs)
    call.end_again(number, made)
    return made


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for one in value for tensor in _tensors(one)] if isinstance(value, (tuple, list)) else []
