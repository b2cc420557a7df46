"""Values in a model's code that can only be one thing, known during export although tensors have no values.

A tensor that is made from no input, no parameter and nothing that the model stores (positions counted from 0,
a mask of ones) has the same value in every call. In eager mode a model may branch on it, and ``transformers``
does: it omits a mask that hides nothing, and uses the flag for a causal one. Export refuses such a branch,
which is why ``transformers`` asks whether it is being exported and then makes every mask.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

_RECIPE = "_tensoropt_recipe"
_FACTORIES = frozenset({"arange", "ones", "zeros", "full", "tensor", "scalar_tensor", "eye", "linspace"})
_RANDOM = (
    "rand",
    "bernoulli",
    "dropout",
    "normal",
    "multinomial",
    "poisson",
    "empty",
    "exponential",
    "rrelu",
)
"""Parts of the names of functions whose results differ from call to call."""
_READS = frozenset({"bool", "item", "int", "float", "index"})
"""The ways in which Python reads a number to branch on."""
_ELEMENTS = 1 << 24
"""The element count above which tensors are not followed: values that a model branches on are small, and are
computed."""


@dataclass(frozen=True)
class _Recipe:
    """The recipe for computing a tensor from nothing but numbers and other such tensors."""

    function: Callable[..., Any]
    args: Any
    kwargs: Mapping[str, Any]
    version: int

    def value(self, results: dict[int, torch.Tensor]) -> torch.Tensor:
        if id(self) not in results:

            def known(leaf: Any) -> Any:
                return leaf.value(results) if isinstance(leaf, _Recipe) else leaf

            args, kwargs = pytree.tree_map(known, (self.args, dict(self.kwargs)))
            if kwargs.get("device") is not None:
                kwargs["device"] = "cpu"
            results[id(self)] = self.function(*args, **kwargs)
        return results[id(self)]


class _KnownValues(TorchFunctionMode):
    """A mode that follows values computed from constants only, and answers when the model asks for one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "").strip("_")
        if name in _READS and args and isinstance(args[0], torch.Tensor):
            value = known_value(args[0])
            if value is not None and value.numel() == 1:
                with _without_tracing():
                    return func(value)
        result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor):
            self._follow(func, name, args, kwargs, result)
        return result

    @staticmethod
    def _follow(func: Any, name: str, args: Any, kwargs: Any, result: torch.Tensor) -> None:
        if any(part in name for part in _RANDOM):
            return
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        # A call that changes a tensor returns that tensor, which is then no longer known.
        if any(tensor is result for tensor in tensors) or (not tensors and name not in _FACTORIES):
            return
        recipes = {id(tensor): _recipe_of(tensor) for tensor in tensors}
        # The size is checked last: for an input's view, export would record the question as a condition.
        if None in recipes.values() or result.numel() > _ELEMENTS:
            return
        steps = [recipes[id(leaf)] if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(steps, spec)
        setattr(result, _RECIPE, _Recipe(func, args, kwargs, result._version))


def _recipe_of(tensor: torch.Tensor) -> _Recipe | None:
    recipe = getattr(tensor, _RECIPE, None)
    # Views share the version of their base: whatever changed the memory counts.
    return recipe if recipe is not None and recipe.version == tensor._version else None


def known_value(tensor: torch.Tensor) -> torch.Tensor | None:
    """The value of a tensor of the model that is being exported; None if it is not known."""
    recipe = _recipe_of(tensor)
    if recipe is None:
        return None
    with _without_tracing():
        try:
            return recipe.value({})
        except Exception:  # a function that accepts no plain tensors: then the value is not known
            return None


@contextlib.contextmanager
def _without_tracing() -> Iterator[None]:
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        yield


@contextlib.contextmanager
def known_values() -> Iterator[None]:
    """While a model is exported, allow it to branch on values that are the same in every call.

    ``transformers`` then behaves accordingly: its masks are those of eager mode. A mask or positions passed
    from outside are unknown, and anything made from them stays.
    """
    with contextlib.ExitStack() as stack:
        # It is not imported for this purpose: if it is not loaded, no model comes from it.
        masks = sys.modules.get("transformers.masking_utils")
        for name, answer in _ANSWERS.items():
            if masks is not None and hasattr(masks, name):
                stack.enter_context(mock.patch.object(masks, name, answer))
        stack.enter_context(_KnownValues())
        yield


def _not_exporting() -> bool:
    return False


def _is_tracing(tensor: torch.Tensor | None = None) -> bool:
    return tensor is not None and known_value(tensor) is None


_ANSWERS: Mapping[str, Callable[..., bool]] = {
    "is_torchdynamo_exporting": _not_exporting,
    "is_torchdynamo_compiling": _not_exporting,
    "is_tracing": _is_tracing,
}
