"""A wrapper module that returns only the tensors of a model's output, and the structure of that output, which
serves to rebuild the output and to find the loss in it."""

from __future__ import annotations

import contextlib
import copyreg
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tensoropt.errors import CaptureError


@dataclass(frozen=True)
class _Tensor:
    """A placeholder for a tensor in an output; ``number`` is its index (from 0) in the returned tensors."""

    number: int


@dataclass(frozen=True)
class OutputPlaces:
    """The structure of a model's output, with a placeholder for each tensor.

    Attributes:
        kind: class of an output that pytree cannot flatten; otherwise None.
        spec: pytree structure of the output, or of its contents by name if pytree cannot flatten it.
        leaves: leaves of ``spec``, with a :class:`_Tensor` in place of each tensor.
        loss: position of the loss among the output's tensors; None if there is no loss.
    """

    kind: type | None
    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]
    loss: int | None

    @classmethod
    def of(
        cls, output: Any, loss: Any, *, everything: bool = True
    ) -> tuple[OutputPlaces, tuple[torch.Tensor, ...]]:
        """Return (structure of an output, the output's tensors).

        Args:
            loss: the value at the position of the loss; None for a model without a loss.
            everything: whether all leaves are kept. If False and there is a loss, None replaces all leaves
                except the loss, numbers and texts.
        """
        leaves, spec = pytree.tree_flatten(output)
        kind = None
        if len(leaves) == 1 and leaves[0] is output and not isinstance(output, torch.Tensor):
            kind = type(output)
            leaves, spec = pytree.tree_flatten(_contents(output))
        # A call without targets has no loss, and what lies in its place may be something else.
        is_one = isinstance(loss, torch.Tensor) and loss.numel() == 1
        if is_one and not everything:
            leaves = [v if v is loss or isinstance(v, (int, float, str)) else None for v in leaves]
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        place = next((i for i, tensor in enumerate(tensors) if is_one and tensor is loss), None)
        numbers = iter(range(len(tensors)))
        places = tuple(_Tensor(next(numbers)) if isinstance(v, torch.Tensor) else v for v in leaves)
        return cls(kind, spec, places, place), tuple(tensors)

    def rebuild(self, tensors: Sequence[torch.Tensor | None]) -> Any:
        """Return the model's output with ``tensors`` in place of the placeholders."""
        leaves = [tensors[leaf.number] if isinstance(leaf, _Tensor) else leaf for leaf in self.leaves]
        contents = pytree.tree_unflatten(leaves, self.spec)
        if self.kind is None:
            return contents
        kind: Any = self.kind
        made = kind.__new__(kind)
        if issubclass(kind, MutableMapping):
            if not issubclass(kind, dict):
                made.__init__()
            made.update(contents)
            return made
        for name, value in contents.items():
            object.__setattr__(made, name, value)  # a frozen class refuses others
        return made


def _contents(output: Any) -> dict[str, Any]:
    if isinstance(output, Mapping):
        return dict(output)
    return {name: getattr(output, name) for name in attributes_of(output) if hasattr(output, name)}


def attributes_of(value: Any) -> tuple[str, ...]:
    """Return the names of an object's own attributes, whether in slots or not."""
    slots = [name for kind in type(value).__mro__ for name in copyreg._slotnames(kind) or ()]  # type: ignore[attr-defined]
    return tuple(dict.fromkeys((*getattr(value, "__dict__", ()), *slots)))


@dataclass(frozen=True)
class Returned:
    """The position of the loss in a model's output.

    The output is the loss itself if ``container`` is None. Otherwise ``container`` is the output's class, and
    the loss is the output's item ``key`` (if ``item``) or its attribute ``key``.
    """

    container: type | None
    key: Any
    item: bool = False
    places: OutputPlaces | None = None

    @classmethod
    def inside(cls, output: Any, key: Any, loss: torch.Tensor, *, item: bool) -> Returned:
        """Return the position of a loss that is the item or attribute ``key`` of an output."""
        return cls(type(output), key, item, OutputPlaces.of(output, loss, everything=False)[0])

    def rebuild(self, loss: torch.Tensor) -> Any:
        """Return the model's output with ``loss`` in it, and None in place of other tensors.

        Raises:
            CaptureError: an object of the output's class cannot be built from the loss alone.
        """
        if self.container is None:
            return loss
        if self.places is None or self.places.loss is None:
            raise CaptureError(
                f"the model returns its loss in {self.container.__module__}.{self.container.__qualname__}, "
                "and no object of this class can be made from the loss alone, which is all that a plan "
                "returns in training; return the loss in an attribute, a dict or a tuple, or alone"
            )
        return self.places.rebuild([loss])

    def loss_in(self, output: Any) -> Any:
        """Return the value at the position of the loss in an output; None if there is none."""
        if self.container is None:
            return output
        with contextlib.suppress(Exception):  # whatever a user's class does
            return output[self.key] if self.item else getattr(output, self.key)
        return None


class Cell:
    """A holder for the structure of a module's last output. Export forbids that forward sets the module's own
    attributes, but not that it changes this object."""

    results: OutputPlaces | None = None
    returned: Returned | None = None
    notes: tuple[str, ...] = ()


class WithResults(torch.nn.Module):
    """A wrapper that returns only the tensors of a model's output.

    Args:
        model: the model.
        loss: function of the model's output that returns the loss; only the loss is then returned.
        returned: position of the loss in the model's output.
        everything: whether all tensors are returned. If False and there is a loss, only the loss is returned.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss: Callable[[Any], torch.Tensor] | None = None,
        returned: Returned | None = None,
        *,
        everything: bool = True,
    ):
        super().__init__()
        self.model = model
        self.loss = loss
        self._returned, self._everything = returned, everything
        self._cell = Cell()

    @property
    def results(self) -> OutputPlaces:
        """The structure of the last call's output."""
        assert self._cell.results is not None, "called once"
        return self._cell.results

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        output = self.model(*args, **kwargs)
        if self.loss is not None:
            output = self.loss(output)
        loss = None if self._returned is None else self._returned.loss_in(output)
        self._cell.results, tensors = OutputPlaces.of(output, loss, everything=self._everything)
        if not tensors:
            raise CaptureError(f"the model returns no tensor in this call, but {type(output).__name__}")
        return tensors
