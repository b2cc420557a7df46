"""The outputs of a model: a wrapper module that returns only their tensors, the rebuilding of the model's own
output from these, and the position of the loss in it."""

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
    """A placeholder for a tensor of an output: the tensor's number among those that are returned."""

    number: int


@dataclass(frozen=True)
class OutputPlaces:
    """The places of the tensors in an output of a model.

    Attributes:
        kind: the class of an output that pytree cannot flatten; otherwise None.
        spec: pytree of the output, or of its contents by name if pytree cannot flatten it.
        leaves: the leaves of ``spec``, with a :class:`_Tensor` for each tensor.
        loss: the number of the loss among the tensors; None if there is none.
    """

    kind: type | None
    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]
    loss: int | None

    @classmethod
    def of(
        cls, output: Any, loss: Any, *, everything: bool = True
    ) -> tuple[OutputPlaces, tuple[torch.Tensor, ...]]:
        """Return the places of an output's tensors, and the tensors.

        Args:
            loss: the value at the position of the loss; None for a model without one.
            everything: False to keep, if there is a loss, only that, numbers and texts, with None in place of
                all else.
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
        """Return the model's output with these tensors in it."""
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
    """Position of the loss in a model's output: alone (``container`` None), or in a container under ``key``.

    ``item`` distinguishes items from attributes.
    """

    container: type | None
    key: Any
    item: bool = False
    places: OutputPlaces | None = None

    @classmethod
    def inside(cls, output: Any, key: Any, loss: torch.Tensor, *, item: bool) -> Returned:
        """Return the position of a loss that an output holds."""
        return cls(type(output), key, item, OutputPlaces.of(output, loss, everything=False)[0])

    def rebuild(self, loss: torch.Tensor) -> Any:
        """Rebuild the model's output, with None in place of other tensors.

        Raises:
            CaptureError: objects of this class cannot be built from the loss alone.
        """
        if self.container is None:
            return loss
        if self.places is None or self.places.loss is None:
            raise CaptureError(
                f"the model returns its loss in {self.container.__module__}.{self.container.__qualname__}, "
                "and no object of this class can be made with the loss alone, all that a plan returns in "
                "training; return it in an attribute, a dict or a tuple, or alone"
            )
        return self.places.rebuild([loss])

    def loss_in(self, output: Any) -> Any:
        """Return the value at the position of the loss in an output of the model; None if there is no such
        position."""
        if self.container is None:
            return output
        with contextlib.suppress(Exception):  # whatever a user's class does
            return output[self.key] if self.item else getattr(output, self.key)
        return None


class Cell:
    """A cell for what the last call returned, outside the module's attributes (which export forbids
    setting)."""

    results: OutputPlaces | None = None
    returned: Returned | None = None
    notes: tuple[str, ...] = ()


class WithResults(torch.nn.Module):
    """A model that returns the tensors of its output, and nothing else.

    Args:
        model: the model.
        loss: maps its output to the loss, which is then all that is returned.
        returned: how the model returns its loss.
        everything: False to return the loss alone, if there is one.
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
        """The places of the tensors in the output of the last call."""
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
