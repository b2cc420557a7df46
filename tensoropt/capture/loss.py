"""The search for the loss in a model's output, and a wrapper module that returns only the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from tensoropt.capture.results import Cell, Returned, attributes_of
from tensoropt.errors import CaptureError


class WithLoss(torch.nn.Module):
    """A wrapper that returns only a model's scalar loss: ``forward(*args) = loss(model(*args))``.

    After a call, ``returned`` describes the model's own output: its type and the position of the loss in it.
    The description is in a :class:`Cell`, because ``torch.export`` restores a module's attributes.
    """

    def __init__(self, model: torch.nn.Module, loss: Callable[[Any], torch.Tensor] | None):
        super().__init__()
        self.model = model
        self.loss = loss
        self._cell = Cell()

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user on other values in the output of the last call that have a gradient."""
        return self._cell.notes

    @property
    def returned(self) -> Returned | None:
        """The position of the loss in the model's output of the last call; None before the first call."""
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


def find_loss(output: Any) -> tuple[Returned, torch.Tensor]:
    """Return (position of the loss in a model's output, the loss). The loss is the output itself, the value
    called ``loss``, or the only scalar with a gradient in the output.

    Raises:
        CaptureError: there is no differentiable scalar, or there are several and none is called ``loss``.
    """
    if _is_loss(output):
        return Returned(None, None), output
    # Before the items: outputs of `transformers` are mappings with other scalars, including auxiliary losses.
    if _is_loss(getattr(output, "loss", None)):
        return Returned.inside(output, "loss", output.loss, item=False), output.loss
    items = _items(output)
    losses = {key: value for key, value in items if _is_loss(value)}
    if "loss" in losses:
        losses = {"loss": losses["loss"]}
    if len(losses) == 1:
        ((key, value),) = losses.items()
        item = isinstance(output, (Mapping, tuple, list))
        return Returned.inside(output, key, value, item=item), value
    if places := [place for place, _ in _losses_below(output)]:
        raise CaptureError(
            f"the model returns {len(places)} loss{'es' if len(places) > 1 else ''} ({', '.join(places)}), "
            "and none of them as 'loss', so it does not say what to train; pass loss=lambda out: "
            f"{' + '.join(places)} (a model file returns it as the fourth item: model, args, kwargs, loss), "
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
    """Yield (expression such as ``out.a['b']``, value) for each scalar of an output that has a gradient."""
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
    trained = returned.loss_in(output)
    untrained = {id(value): place for place, value in _losses_below(output) if value is not trained}
    if not untrained:
        return ()
    return (
        f"of the model's outputs only '{returned.key}' is trained; {', '.join(untrained.values())} could be "
        f"trained, too, but is left out unless '{returned.key}' includes it",
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
