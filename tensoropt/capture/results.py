"""All that a model returns: a wrapper module that returns the tensors alone, and what makes the model's own
output of them again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tensoropt.capture.loss import Returned, attributes_of
from tensoropt.errors import CaptureError


@dataclass(frozen=True)
class _Tensor:
    """Stands for a tensor of an output: its number among those that are returned."""

    number: int


@dataclass(frozen=True)
class OutputPlaces:
    """The places of the tensors in an output of a model.

    Attributes:
        kind: the class of an output that pytree does not take apart; otherwise None.
        spec: pytree of the output, or of what such an output holds by name.
        leaves: the leaves of that, with a :class:`_Tensor` for each tensor.
        loss: the number of the loss among the tensors; None if there is none.
    """

    kind: type | None
    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]
    loss: int | None

    @classmethod
    def of(
        cls, output: Any, returned: Returned | None, *, everything: bool = True
    ) -> tuple[OutputPlaces, tuple[torch.Tensor, ...]]:
        """Return the places of an output's tensors, and the tensors.

        Args:
            returned: how the model returns its loss; None for a model without one.
            everything: False for the loss alone, if there is one, with None in place of other tensors.
        """
        leaves, spec = pytree.tree_flatten(output)
        kind = None
        if len(leaves) == 1 and leaves[0] is output and not isinstance(output, torch.Tensor):
            kind = type(output)
            leaves, spec = pytree.tree_flatten(_contents(output))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        loss = None
        if returned is not None:
            # A call without targets has no loss, and what lies in its place may be something else.
            with contextlib.suppress(Exception):
                value = returned.loss_in(output)
                if isinstance(value, torch.Tensor) and value.numel() == 1:
                    loss = next(i for i, tensor in enumerate(tensors) if tensor is value)
        if loss is not None and not everything:
            kept = tensors[loss]
            leaves = [None if isinstance(v, torch.Tensor) and v is not kept else v for v in leaves]
            tensors, loss = [v for v in leaves if v is kept], 0
        numbers = iter(range(len(tensors)))
        places = tuple(_Tensor(next(numbers)) if isinstance(v, torch.Tensor) else v for v in leaves)
        return cls(kind, spec, places, loss), tuple(tensors)

    def rebuild(self, tensors: Sequence[torch.Tensor | None]) -> Any:
        """Return the model's output with these tensors in it."""
        leaves = [tensors[leaf.number] if isinstance(leaf, _Tensor) else leaf for leaf in self.leaves]
        contents = pytree.tree_unflatten(leaves, self.spec)
        if self.kind is None:
            return contents
        kind: Any = self.kind
        made = kind.__new__(kind)
        if issubclass(kind, dict):
            made.update(contents)
            return made
        for name, value in contents.items():
            object.__setattr__(made, name, value)  # a frozen class refuses others
        return made


def _contents(output: Any) -> dict[str, Any]:
    if isinstance(output, Mapping):
        return dict(output)
    return {name: getattr(output, name) for name in attributes_of(output)}


class _Cell:
    """Outside of the module's own attributes, which export forbids setting."""

    results: OutputPlaces | None = None


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
        self._cell = _Cell()

    @property
    def results(self) -> OutputPlaces:
        """The places of the tensors in the output of the last call."""
        assert self._cell.results is not None, "called once"
        return self._cell.results

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        output = self.model(*args, **kwargs)
        if self.loss is not None:
            output = self.loss(output)
        self._cell.results, tensors = OutputPlaces.of(output, self._returned, everything=self._everything)
        if not tensors:
            raise CaptureError(f"the model returns no tensor in this call, but {type(output).__name__}")
        return tensors
