"""Tracing of a model's repeated blocks: of similar calls, two are traced, and later ones become one operator
each."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils import _pytree as pytree

from tensoropt.capture.blocks.likeness import (
    SIMPLE,
    Block,
    Layout,
    Likeness,
    Place,
    differing_places,
    repeated_blocks,
    same_value,
)

_LIBRARY = torch.library.Library("tensoropt_blocks", "DEF")
_LIBRARY.define("enter(Tensor[] tensors, int call) -> Tensor[]")
_LIBRARY.define("leave(Tensor[] tensors, int call) -> Tensor[]")
_LIBRARY.define("repeat(Tensor[] tensors, int call, int traced) -> Tensor[]")
OPS = torch.ops.tensoropt_blocks
"""Operators of the traced program: ``enter`` and ``leave`` pass on the inputs and outputs of a traced block;
``repeat`` stands for a whole block that is alike to the one traced in the call numbered ``traced``."""


class Unlike(Exception):  # noqa: N818 - never reaches a user; it says what is to be traced one by one
    """Raised when the trace of one block cannot represent the blocks of equal structure.

    Attributes:
        likeness: description of the structure of the modules that have to be traced one by one.
    """

    def __init__(self, likeness: Likeness, why: str):
        super().__init__(why)
        self.likeness = likeness


@dataclass
class Traced:
    """A traced call of a block.

    Attributes:
        number: index of this call among all calls of repeated blocks, counted from 0 in the order of calls.
        call: modes of autograd and autocast, and the arguments without tensor values; equal in similar calls.
        reads: attributes that the block read, among those that differ between alike modules.
        outputs: origin of each output: ``("input", i)`` for the i-th input tensor, ``("made", i)`` for the
            i-th new tensor, ``("value", v)`` for a value ``v`` that is no tensor.
        spec: pytree structure of the outputs.
        made: layouts of the new tensors.
        confirms: an earlier traced call of an alike block, which must compute the same as this call.
        confirmed: whether a second call was traced, to be compared with this one.
    """

    number: int
    block: Block
    call: Any
    reads: set[Place]
    outputs: Sequence[tuple[str, Any]]
    spec: pytree.TreeSpec
    made: Sequence[Layout]
    confirms: Traced | None = None
    confirmed: bool = False

    def stands_for(self, block: Block, call: Any) -> bool:
        """Return whether this trace also represents a call of ``block`` with the modes and arguments
        ``call``."""
        if self.block.likeness != block.likeness or self.call != call:
            return False
        return all(same_value(self.block.simple[place], block.simple[place]) for place in self.reads)

    def returned(self, inputs: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> Any:
        """Return the block's outputs, given the call's input tensors and new tensors."""
        tensors = {"input": inputs, "made": made}
        leaves = [value if kind == "value" else tensors[kind][value] for kind, value in self.outputs]
        return pytree.tree_unflatten(leaves, self.spec)


class TracedBlocks:
    """The repeated blocks of a model, and their calls, while the model is exported.

    Args:
        model: the exported model.
        apart: likenesses (descriptions of structure) of modules that are traced one by one.

    Attributes:
        called: the block of each call, indexed by the call's number.
        traced: the calls that were traced.
    """

    def __init__(self, model: nn.Module, apart: Container[Likeness] = ()):
        self.model = model
        blocks = repeated_blocks(model, apart)
        # Keyed by their attribute dicts: export wraps modules in proxies, which share them.
        self._of_attributes = {id(vars(block.module)): block for block in blocks}
        self._differing = differing_places(blocks)
        self._inside = False
        self.called: list[Block] = []
        self.traced: list[Traced] = []

    @contextlib.contextmanager
    def once(self) -> Iterator[None]:
        """While open, trace the first two similar calls of alike blocks, and replace each later
        similar call with one operator.

        Raises:
            Unlike: one trace cannot represent all modules of equal structure.
        """
        global _active
        before, _active = _active, self
        try:
            with contextlib.ExitStack() as stack:
                for cls in {type(block.module) for block in self._of_attributes.values()}:
                    stack.enter_context(mock.patch.object(cls, "forward", self._called(cls.forward)))
                if self._of_attributes:
                    cls = type(self.model)
                    stack.enter_context(mock.patch.object(cls, "forward", self._started(cls.forward)))
                yield
        finally:
            _active = before

    def _started(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def started(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if vars(module) is vars(self.model):
                self.called, self.traced = [], []
            return forward(module, *args, **kwargs)

        return started

    def _called(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            block = self._of_attributes.get(id(vars(module)))
            leaves, spec = pytree.tree_flatten((args, kwargs))
            # A block may change other objects (caches).
            if self._inside or block is None or not _all_known(leaves):
                return forward(module, *args, **kwargs)
            tensors = list({id(t): t for t in leaves if isinstance(t, torch.Tensor)}.values())
            call = _call(leaves, spec, tensors)
            number = len(self.called)
            self.called.append(block)
            like = next((t for t in self.traced if t.stands_for(block, call)), None)
            if like is not None and like.confirmed:
                made = OPS.repeat(tensors, number, like.number) if like.made else []
                return like.returned(tensors, made)
            entered = OPS.enter(tensors, number) if tensors else []
            inner = {id(t): e for t, e in zip(tensors, entered, strict=True)}
            arguments = pytree.tree_unflatten([inner.get(id(leaf), leaf) for leaf in leaves], spec)
            traced, made = self._trace(functools.partial(forward, module), block, call, entered, arguments)
            if like is not None:
                # Anything that blocks count outside themselves (a global, a tensor's version) shows in the
                # second trace.
                traced.confirms, like.confirmed = like, True
                if (traced.outputs, traced.spec, traced.made) != (like.outputs, like.spec, like.made):
                    raise Unlike(block.likeness, "returns something else the second time")
            return traced.returned(tensors, OPS.leave(made, number) if made else [])

        return called

    def _trace(
        self,
        forward: Callable[..., Any],
        block: Block,
        call: Any,
        entered: Sequence[torch.Tensor],
        arguments: tuple[Any, Any],
    ) -> tuple[Traced, list[torch.Tensor]]:
        versions = [t._version for t in entered]
        state, flat_arguments = block.state(), pytree.tree_flatten(arguments)
        self._inside = True
        try:
            with _watched(block, self._differing[block.likeness]) as (reads, written):
                result = forward(*arguments[0], **arguments[1])
        finally:
            self._inside = False
        if written:
            raise Unlike(block.likeness, f"sets {', '.join(sorted(written))}")
        if block.state() != state:
            raise Unlike(block.likeness, "changes what it holds")
        if versions != [t._version for t in entered] or not _same(
            flat_arguments, pytree.tree_flatten(arguments)
        ):
            raise Unlike(block.likeness, "changes its inputs")
        leaves, spec = pytree.tree_flatten(result)
        if not _all_known(leaves):
            raise Unlike(block.likeness, "returns objects that are no tensors")
        inputs = {id(t): i for i, t in enumerate(entered)}
        made: dict[int, torch.Tensor] = {}
        outputs: list[tuple[str, Any]] = []
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                outputs.append(("value", leaf))
            elif id(leaf) in inputs:
                outputs.append(("input", inputs[id(leaf)]))
            else:
                made.setdefault(id(leaf), leaf)
                outputs.append(("made", list(made).index(id(leaf))))
        _check_memory(block, made.values(), entered)
        layouts = [Layout.of(t) for t in made.values()]
        traced = Traced(len(self.called) - 1, block, call, reads, outputs, spec, layouts)
        self.traced.append(traced)
        return traced, list(made.values())


_active: TracedBlocks | None = None


def _fresh(tensors: Sequence[torch.Tensor], call: int) -> list[torch.Tensor]:
    return [Layout.of(t).empty() for t in tensors]


def _made(tensors: Sequence[torch.Tensor], call: int, traced: int) -> list[torch.Tensor]:
    assert _active is not None
    return [
        layout.empty()
        for traced_call in _active.traced
        if traced_call.number == traced
        for layout in traced_call.made
    ]


for _name, _results in (("enter", _fresh), ("leave", _fresh), ("repeat", _made)):
    torch.library.register_fake(f"tensoropt_blocks::{_name}", _results, lib=_LIBRARY)


def _all_known(leaves: Sequence[Any]) -> bool:
    return all(isinstance(leaf, (torch.Tensor, *SIMPLE)) for leaf in leaves)


def _same(before: tuple[list[Any], pytree.TreeSpec], after: tuple[list[Any], pytree.TreeSpec]) -> bool:
    """Return whether a call's flattened arguments are the same objects before and after the call."""
    return before[1] == after[1] and all(a is b for a, b in zip(before[0], after[0], strict=True))


def _call(leaves: Sequence[Any], spec: pytree.TreeSpec, tensors: Sequence[torch.Tensor]) -> Any:
    place = {id(t): i for i, t in enumerate(tensors)}
    values = [place[id(v)] if isinstance(v, torch.Tensor) else repr(v) for v in leaves]
    modes = (torch.is_grad_enabled(), *(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")))
    return (modes, repr(spec), values, [Layout.of(t) for t in tensors])


def _check_memory(block: Block, made: Sequence[torch.Tensor] | Any, entered: Sequence[torch.Tensor]) -> None:
    """Raise :class:`Unlike` if the tensors that a block made share memory with its inputs (``entered``), its
    parameters and buffers, or one another."""
    stored = (*block.module.parameters(), *block.module.buffers())
    storages = {t.untyped_storage()._cdata for t in (*entered, *stored)}
    for tensor in made:
        if (memory := tensor.untyped_storage()._cdata) in storages:
            raise Unlike(block.likeness, "returns views of its inputs, of what it stores or of one another")
        storages.add(memory)


@contextlib.contextmanager
def _watched(block: Block, places: set[Place]) -> Iterator[tuple[set[Place], set[str]]]:
    """While open, record the attributes among ``places`` that a block's code reads, and the names of all
    attributes that it sets."""
    reads: set[Place] = set()
    written: set[str] = set()
    parts = dict(block.module.named_modules(remove_duplicate=False))
    own = {id(vars(part)) for part in parts.values()}
    watched = {(id(vars(parts[path])), name): (path, name) for path, name in places}
    names = {name for _, name in places}

    def reading(original: Callable[..., Any]) -> Callable[..., Any]:
        def read(module: Any, name: str) -> Any:
            if name in names:
                place = watched.get((id(object.__getattribute__(module, "__dict__")), name))
                if place is not None:
                    reads.add(place)
            # nn.Module looks up parameters there; other code, such as vars(), may read anything.
            elif name == "__dict__" and not _called_by_torch():
                own_id = id(object.__getattribute__(module, "__dict__"))
                reads.update(place for (holder, _), place in watched.items() if holder == own_id)
            return original(module, name)

        return read

    def setting(original: Callable[..., Any]) -> Callable[..., Any]:
        def write(module: Any, name: str, value: Any) -> None:
            if id(vars(module)) in own:
                written.add(name)
            original(module, name, value)

        return write

    with contextlib.ExitStack() as stack:
        for cls in {type(parts[path]) for path, _ in places}:
            read = reading(cls.__getattribute__)
            stack.enter_context(mock.patch.object(cls, "__getattribute__", read))
        for cls in {type(part) for part in parts.values()}:
            stack.enter_context(mock.patch.object(cls, "__setattr__", setting(cls.__setattr__)))
        yield reads, written


def _called_by_torch() -> bool:
    reader = sys._getframe(2).f_globals.get("__name__", "")
    return reader == __name__ or reader.split(".")[0] == "torch"
