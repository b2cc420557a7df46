"""Conversion of a user's call of the model to the graph's inputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tensoropt.capture import Capture
from tensoropt.engine.batch_share import BatchShare
from tensoropt.engine.other_batches import filled
from tensoropt.errors import PlanError
from tensoropt.sharding.groups import batch_inputs

_REMEDY = "call it with the arguments that it was explored with, or explore it with these"


@dataclass(frozen=True)
class _InputSlot:
    """A stand-in for one value (pytree leaf) of the captured call's arguments, by its index."""

    index: int


class CallingConvention:
    """Flattens the arguments of ``forward`` as the capture did, whether passed by position or by keyword.

    Arguments are matched by name. A missing argument has its default; None in ``**kwargs`` counts as missing.

    Args:
        share: the rows of the global batch that this rank passes; None if every rank passes all rows.
        ignored: a function that returns input -> the target that the loss ignores, or the reason why the loss
            can ignore none (:func:`~tensoropt.engine.other_batches.ignored_targets`).
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        captured: Capture,
        share: BatchShare | None = None,
        ignored: Callable[[], Mapping[str, int] | str] = lambda: "",
    ):
        self.signature = inspect.signature(forward)
        self.example = captured.example
        self.share, self.ignored = share, ignored
        self.batch = set(batch_inputs(captured.graph))
        # Position among the leaves of the example call -> the graph's input.
        tensors = [i for i, value in enumerate(self.example) if isinstance(value, torch.Tensor)]
        self.name_of = dict(zip(tensors, captured.graph.inputs, strict=True))
        slots = [_InputSlot(index) for index in range(len(self.example))]
        args, kwargs = pytree.tree_unflatten(slots, captured.in_spec)
        bound = self._bound(args, kwargs)
        # A place in the captured call -> its value, or the default's if it was left out.
        self.wanted = dict(_places(bound))
        self.labels = {
            value.index: _label(place)
            for place, value in self.wanted.items()
            if isinstance(value, _InputSlot)
        }

    def _bound(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        try:
            arguments = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            # The captured call itself has no names yet.
            plan = f"; the plan is for a call with {self._names()}" if hasattr(self, "labels") else ""
            raise PlanError(f"the model cannot be called like this: {error}{plan}") from None
        arguments.apply_defaults()
        bound: dict[str, Any] = {}
        for name, value in arguments.arguments.items():
            # `forward(**kwargs)` binds all of these as one dict; a call may also name them one by one.
            if self.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
                bound.update({key: value[key] for key in value if not self._is_none(value[key])})
            else:
                bound[name] = value
        return {name: bound[name] for name in sorted(bound)}

    def _is_none(self, value: Any) -> bool:
        return value is None or (isinstance(value, _InputSlot) and self.example[value.index] is None)

    def _names(self) -> str:
        return _listed(self.labels[i] for i, value in enumerate(self.example) if value is not None)

    def input_names(self) -> list[str]:
        """Return the user's name of each graph input: an argument of ``forward``, or a path inside of one."""
        return [self.labels[i] for i, value in enumerate(self.example) if isinstance(value, torch.Tensor)]

    def inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """Return the graph's inputs for a call; a batch with fewer rows than the plan's is padded.

        Raises:
            PlanError: the call differs from the captured one in more than the values of its tensors.
        """
        bound = self._bound(args, kwargs)
        # By place: containers may differ from the captured call's in order, type or Nones.
        passed = {place: value for place, value in _places(bound) if value is not None}
        for place in passed.keys() ^ self.wanted.keys():
            if place in passed or not self._is_none(self.wanted[place]):
                raise self._other_arguments(bound)
        values: list[Any] = [None] * len(self.example)
        for place, expected in self.wanted.items():
            leaf = passed.get(place)
            if isinstance(expected, _InputSlot):
                values[expected.index] = leaf
            elif not _equal(leaf, expected):
                raise self._other_arguments(bound)
        tensors = []
        rows, whole = self._rows(values)
        fewer = rows < whole
        for index, (value, example) in enumerate(zip(values, self.example, strict=True)):
            if (value is None) != (example is None):
                raise self._other_arguments(bound)
            if self._checked(index, value, example, fewer=fewer):
                tensors.append(self._filled(index, value) if fewer else value)
        return tensors

    def fits(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Return whether the plan's graph can compute a call."""
        try:
            self.inputs(args, kwargs)
        except PlanError:
            return False
        return True

    def names_in(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[int, str]:
        """Return ``id`` of a tensor in a call -> its name in the graph; PlanError for an unknown argument."""
        bound, named = self._bound(args, kwargs), {}
        for place, value in _places(bound):
            expected = self.wanted.get(place)
            slot = expected if isinstance(expected, _InputSlot) else None
            if isinstance(value, torch.Tensor) and slot is not None and slot.index in self.name_of:
                named[id(value)] = self.name_of[slot.index]
            elif value is not None and not (
                place in self.wanted and _equal(value, expected if slot is None else self.example[slot.index])
            ):
                raise self._other_arguments(bound)
        return named

    def shape(self, index: int) -> torch.Size:
        """Return the shape in which a rank passes the tensor with this index in the example call."""
        shape: torch.Size = self.example[index].shape
        return shape if self.share is None else self.share.shape(self.name_of[index], shape)

    def _rows(self, values: list[Any]) -> tuple[int, int]:
        found, wanted = set[int | None](), set[int]()
        for index, name in self.name_of.items():
            if name in self.batch:
                value = values[index]
                found.add(len(value) if isinstance(value, torch.Tensor) and value.dim() else None)
                wanted.add(self.shape(index)[0])
        (rows, *others), (whole, *more) = found or {None}, wanted or {0}
        return (0, 0) if rows is None or others or more else (rows, whole)

    def _filled(self, index: int, value: torch.Tensor) -> torch.Tensor:
        name = self.name_of[index]
        if name not in self.batch:
            return value
        ignored = self.ignored()
        assert not isinstance(ignored, str)
        return filled(value, self.shape(index)[0], ignored.get(name))

    def _other_arguments(self, bound: dict[str, Any]) -> PlanError:
        differences: list[tuple[int, str]] = []
        for place, value in _places(bound):
            expected = self.wanted.get(place)
            is_input = isinstance(expected, _InputSlot)
            # A default that the captured call also left out makes no difference.
            if value is None or (place in self.wanted and not is_input and _equal(value, expected)):
                continue
            tells = place in self.wanted and not is_input and not isinstance(value, torch.Tensor)
            name = f"{_label(place)} = {value!r}" if tells else _label(place)
            position = expected.index if isinstance(expected, _InputSlot) else len(self.example)
            differences.append((position, name))
        return PlanError(
            f"the plan is for a call with {self._names()}, but this one has "
            f"{_listed(name for _, name in sorted(differences, key=lambda item: item[0]))}; {_REMEDY}"
        )

    def _checked(self, index: int, value: Any, example: Any, *, fewer: bool) -> bool:
        """Check one value of a call, and return whether it is a tensor.

        Args:
            fewer: whether the call has fewer rows than the plan.

        Raises:
            PlanError: the value differs from the captured one in shape, type or, for a constant, value.
        """
        name = self.labels[index]
        if not isinstance(example, torch.Tensor):
            # Constants are compiled into the graph: another value would be silently ignored.
            if not _equal(value, example):
                described = "a tensor" if isinstance(value, torch.Tensor) else repr(value)
                raise PlanError(
                    f"the plan is for calls with the constant {name} = {example!r}, but this one has "
                    f"{described}; {_REMEDY}"
                )
            return False
        if not isinstance(value, torch.Tensor):
            raise PlanError(
                f"the plan is for a call with {self._names()}, but {name} of this one is {value!r}, not a "
                f"tensor; {_REMEDY}"
            )
        shape = self.shape(index)
        fits = value.shape == shape
        if fewer and self.name_of[index] in self.batch:
            fits = value.shape[1:] == shape[1:] and not isinstance(self.ignored(), str)
        if not fits or value.dtype != example.dtype:
            raise PlanError(
                f"the plan is for {self._described(index)} {example.dtype}, but this call has "
                f"{tuple(value.shape)} {value.dtype} in {name}; {self._shape_remedy(index, value)}"
            )
        if value.requires_grad and torch.is_grad_enabled():
            raise PlanError(
                f"a plan computes gradients of the model's parameters only, but {name} requires a gradient; "
                f"pass {name}.detach(), or explore a module that also computes {name}"
            )
        return True

    def _described(self, index: int) -> str:
        whole, shape = tuple(self.example[index].shape), tuple(self.shape(index))
        if whole == shape:
            return f"inputs of shape {whole}"
        return f"global batches of shape {whole}, of which each rank passes a share of shape {shape}:"

    def _shape_remedy(self, index: int, value: torch.Tensor) -> str:
        example, shape = self.example[index], self.shape(index)
        if value.shape == shape:
            return f"convert it (.to({example.dtype})), or explore the model with this type"
        if value.dim() == example.dim() and value.shape[1:] == example.shape[1:]:
            if shape != example.shape and value.shape == example.shape:
                return "use tensoropt.sampler, or pass batch='global' to parallelize"
            reason = self.ignored()
            rest = ""
            if isinstance(reason, str) and reason:
                what = (
                    "smaller batch cannot be filled up"
                    if len(value) < shape[0]
                    else "larger one cannot be cut"
                )
                rest = f"; a {what}, because {reason}"
            elif len(value) > shape[0]:
                rest = "; without gradients (model.eval() and torch.no_grad()) a batch may have more rows"
            if shape != example.shape:
                return f"use tensoropt.sampler, which gives each rank its rows{rest}"
            return (
                "every rank passes the global batch (drop a smaller last one), or pass batch='share' to "
                f"parallelize for ranks that pass their own rows{rest}"
            )
        tokens = ""
        if value.dim() == example.dim() > 1 and not value.is_floating_point():
            tokens = f' (a tokenizer does: padding="max_length", truncation=True, max_length={shape[1]})'
        return (
            f"pad or cut it to {tuple(shape)}{tokens}, explore the model with this shape, or evaluate it by "
            "the module that `with tensoropt.whole(model) as plain:` gives"
        )


def _equal(value: Any, example: Any) -> bool:
    """Compare two constants of a call; tensors and arrays, which compare by element, are never equal."""
    if value is example:
        return True
    if isinstance(value, torch.Tensor) or isinstance(example, torch.Tensor):
        return False
    # True == 1 and 1 == 1.0, but a model may tell them apart.
    if type(value) is not type(example):
        return False
    try:
        # NaN is the one value that does not equal itself.
        return bool(value == example) or bool(value != value and example != example)
    except Exception:
        return False


def _places(bound: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    return [(tuple(path), leaf) for path, leaf in pytree.tree_flatten_with_path(dict(bound))[0]]


def _label(place: Any) -> str:
    return str(place[0].key) + pytree.keystr(place[1:])


def _listed(names: Any) -> str:
    return ", ".join(names) or "no arguments"
