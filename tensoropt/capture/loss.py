"""The loss of a model: how a module returns it, and a wrapper module that returns nothing else."""

from __future__ import annotations

import contextlib
import copyreg
import inspect
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch

from tensoropt.errors import CaptureError


class WithLoss(torch.nn.Module):
    """A model that returns its scalar loss and nothing else: ``forward(*args) = loss(model(*args))``.

    After a call, ``returned`` describes what the model itself returned: its type and where the loss was. It
    is stored in a cell, because ``torch.export`` restores attributes, including lists.
    """

    def __init__(self, model: torch.nn.Module, loss: Callable[[Any], torch.Tensor] | None):
        super().__init__()
        self.model = model
        self.loss = loss
        self._cell = _Cell()

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on other returned values of the last call that could be trained."""
        return self._cell.notes

    @property
    def returned(self) -> Returned | None:
        """The way in which the model itself returned its loss in the last call; None before the first
        call.
        """
        return self._cell.returned

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        output = self.model(*args, **kwargs)
        if self.loss is not None:
            # With `loss=` the parallelized model returns the loss itself.
            self._cell.returned = Returned(None, None)
            return _checked(self.loss(output))
        self._cell.returned, value = find_loss(output)
        self._cell.notes = _left_out(output, self._cell.returned)
        return value


class _Cell:
    """A cell for what a call returned, outside the module's own attributes (which export forbids setting)."""

    returned: Returned | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Returned:
    """Position of the loss in a model's output: alone (``container`` None), or in a container under ``key``.

    ``keys`` are all positions of a mapping or a sequence, so that callers that unpack it still can; empty if
    the loss is an attribute. ``attributes`` are those of the object that has the loss as an attribute.
    """

    container: type | None
    key: Any
    keys: tuple[Any, ...] = ()
    attributes: tuple[str, ...] = ()

    def rebuild(self, loss: torch.Tensor) -> Any:
        """Rebuild the model's output, with None in place of everything but the loss.

        Raises:
            CaptureError: objects of this class cannot be built from the loss alone.
        """
        if self.container is None:
            return loss
        for make in (self._made, self._made_bare):
            # Whatever a user's class does when it is given None.
            with contextlib.suppress(Exception):
                output = make(self.container, loss)
                if self.loss_in(output) is loss:
                    return output
        name = f"{self.container.__module__}.{self.container.__qualname__}"
        raise CaptureError(
            f"the model returns its loss in {name}, and no such object can be made that holds only the "
            "loss, as a plan returns it in training; give its other fields defaults, or return a dict, a "
            "tuple or the loss"
        )

    def loss_in(self, output: Any) -> Any:
        """Return the loss in an output of the model."""
        if self.container is None:
            return output
        return output[self.key] if self.keys else getattr(output, self.key)

    def _made(self, container: type, loss: torch.Tensor) -> Any:
        """Return an object built by its class's own constructor, with None for every argument without a
        default.
        """
        contents = dict.fromkeys(self.keys) | {self.key: loss}
        if fields := getattr(container, "_fields", None):
            return container(
                *(loss if field in (self.key, self._field(fields)) else None for field in fields)
            )
        if not self.keys:
            needed = dict.fromkeys(_needed(container))
            return container(**needed | {self.key: loss})
        return container(contents if issubclass(container, Mapping) else contents.values())  # type: ignore[call-arg]

    def _field(self, fields: tuple[str, ...]) -> str | None:
        return fields[self.key] if self.keys and isinstance(self.key, int) else None

    def _made_bare(self, container: Any, loss: torch.Tensor) -> Any:
        """Return an object made without its constructor, for a class whose constructor does not accept
        None.
        """
        instance = container.__new__(container)
        if isinstance(instance, MutableMapping):
            instance.__init__()  # type: ignore[misc]
            instance.update(dict.fromkeys(self.keys) | {self.key: loss})
            return instance
        for name in self.attributes:
            # Bypasses the class's own method, with which a frozen class refuses.
            object.__setattr__(instance, name, loss if name == self.key else None)
        return instance


def _needed(container: type) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    arguments = inspect.signature(container).parameters.values()
    return [a.name for a in arguments if a.kind in kinds and a.default is inspect.Parameter.empty]


def attributes_of(value: Any) -> tuple[str, ...]:
    """Return the names of an object's own attributes, whether in slots or not."""
    slots = [name for kind in type(value).__mro__ for name in copyreg._slotnames(kind) or ()]  # type: ignore[attr-defined]
    return tuple(dict.fromkeys(name for name in (*getattr(value, "__dict__", ()), *slots)))


def find_loss(output: Any) -> tuple[Returned, torch.Tensor]:
    """Return the scalar loss in a model's output: the output itself, the value called ``loss``, or the only
    scalar in it.

    Raises:
        CaptureError: there is no differentiable scalar, or there are several and none is called ``loss``.
    """
    if _is_loss(output):
        return Returned(None, None), output
    # Before the items: outputs of `transformers` are mappings with other scalars, including auxiliary losses.
    if _is_loss(getattr(output, "loss", None)):
        return Returned(type(output), "loss", attributes=attributes_of(output)), output.loss
    items = _items(output)
    losses = {key: value for key, value in items if _is_loss(value)}
    if "loss" in losses:
        losses = {"loss": losses["loss"]}
    if len(losses) > 1:
        raise CaptureError(_ambiguous(output, list(losses)))
    if losses:
        ((key, value),) = losses.items()
        if not isinstance(output, (Mapping, tuple, list)):
            return Returned(type(output), key, attributes=attributes_of(output)), value
        return Returned(type(output), key, tuple(k for k, _ in items)), value
    if below := [place for place, _ in _losses_below(output)]:
        raise CaptureError(
            f"the model returns its {'loss' if len(below) == 1 else 'losses'} inside another value that it "
            f"returns ({_named(below)}), and does not say what to train; pass loss=lambda out: "
            f"{' + '.join(below)} (a model file returns it as the fourth item: model, args, kwargs, loss), "
            "or return the one to train as 'loss'"
        )
    raise CaptureError(_none_found(output, [output, *(value for _, value in items)]))


def _is_loss(value: Any) -> bool:
    # A scalar without a gradient is a statistic (an accuracy), not a loss.
    return isinstance(value, torch.Tensor) and value.numel() == 1 and value.requires_grad


def _items(output: Any) -> list[tuple[Any, Any]]:
    if isinstance(output, Mapping):
        return list(output.items())
    if isinstance(output, (tuple, list)):
        return list(enumerate(output))
    if is_dataclass(output) and not isinstance(output, type):
        return [(field.name, getattr(output, field.name)) for field in fields(output)]
    return []


def _losses_below(output: Any, place: str = "out") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each differentiable scalar of an output at any depth, with the expression that reads it from
    ``out``.
    """
    for key, value in _items(output) or [(name, getattr(output, name)) for name in _own_attributes(output)]:
        indexed = isinstance(output, (Mapping, tuple, list))
        inner = f"{place}[{key!r}]" if indexed else f"{place}.{key}"
        if _is_loss(value):
            yield inner, value
        elif isinstance(value, (Mapping, tuple, list)) or is_dataclass(value):
            yield from _losses_below(value, inner)


def _own_attributes(output: Any) -> tuple[str, ...]:
    is_tensor = isinstance(output, torch.Tensor)
    return () if is_tensor or not hasattr(output, "loss") else attributes_of(output)


def _left_out(output: Any, returned: Returned) -> tuple[str, ...]:
    if returned.container is None:
        return ()
    trained = output[returned.key] if returned.keys else getattr(output, returned.key)
    untrained = {id(value): place for place, value in _losses_below(output) if value is not trained}
    if not untrained:
        return ()
    return (
        f"of what the model returns '{returned.key}' is trained; {_named(list(untrained.values()))} could be "
        f"too, and {'is' if len(untrained) == 1 else 'are'} left out unless '{returned.key}' has it in it",
    )


def _ambiguous(output: Any, keys: list[Any]) -> str:
    names = _named([str(key) if isinstance(output, (tuple, list)) else f"'{key}'" for key in keys])
    place = "at the places " if isinstance(output, (tuple, list)) else ""
    total = "sum(out)" if isinstance(output, (tuple, list)) else "sum(out.values())"
    if not isinstance(output, (Mapping, tuple, list)):
        total = " + ".join(f"out.{key}" for key in keys)
    elif len(_items(output)) != len(keys):
        total = " + ".join(f"out[{key!r}]" for key in keys)
    return (
        f"the model returns {len(keys)} losses ({type(output).__name__}: {place}{names}) and none is called "
        f"'loss', so it does not say what to train; pass loss=lambda out: {total} (a model file returns it "
        "as the fourth item: model, args, kwargs, loss), or return the one to train as 'loss'"
    )


def _none_found(output: Any, values: list[Any]) -> str:
    scalars = [v for v in values if isinstance(v, torch.Tensor) and v.numel() == 1]
    if not scalars:
        return (
            f"the model returns {_described(output)} without a scalar that depends on its parameters; "
            "training needs a loss: return one from forward, or pass loss=function(output)"
        )
    return (
        "the model returns a scalar that depends on no trained parameter; its parameters are frozen, or "
        "the loss is computed under no_grad or inference_mode, or from detached tensors (detach(), .data; "
        "for a forward pass alone use mode inference)"
    )


def _named(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _checked(loss: Any) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise CaptureError(f"loss= returns {_described(loss)}; it has to return a scalar tensor")
    if not loss.requires_grad:
        raise CaptureError(
            "the result of loss= depends on no trained parameter; are all of them frozen, or is it computed "
            "from detached tensors?"
        )
    return loss


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return "nothing" if value is None else type(value).__name__
