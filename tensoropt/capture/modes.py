"""The mode (training or evaluation) of each module of a model while it is captured.

The attributes that the forward of a kind of module reads, in its own code and in the code that it
calls.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from tensoropt.capture.convert import Mode
from tensoropt.capture.lines import is_own


@functools.cache
def names_read(kind: type[nn.Module]) -> frozenset[str]:
    """The names of the attributes that the forward of a kind of module reads, including those read in the
    methods and the user's functions that it calls."""
    attribute_names: set[str] = set()
    waiting: list[Any] = [kind.forward]
    looked_at: set[Any] = set()
    while waiting:
        function = waiting.pop()
        for wrapped in ("fget", "func", "__func__"):  # properties, cached ones, class and static methods
            function = getattr(function, wrapped, function)
        function = inspect.unwrap(function) if callable(function) else None
        code = getattr(function, "__code__", None)
        if code is None or code in looked_at:
            continue
        looked_at.add(code)
        names = {name for part in _codes(code) for name in part.co_names}
        attribute_names |= names
        # For every class, because a method may call those of its base classes.
        own = [vars(base) for base in kind.__mro__ if base not in nn.Module.__mro__]
        waiting += [members[name] for members in own for name in names & members.keys()]
        waiting += _called(function, names)
    return frozenset(attribute_names)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A function's code, and that of the comprehensions and functions inside it."""
    yield code
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            yield from _codes(part)


def _called(function: Any, names: set[str]) -> list[types.FunctionType]:
    """The user's functions that a function refers to, in its file or around it."""
    within = getattr(function, "__globals__", {})
    values = [within[name] for name in names & within.keys()]
    for cell in function.__closure__ or ():
        try:
            values.append(cell.cell_contents)
        except ValueError:  # not filled yet
            continue
    functions = (inspect.unwrap(value) for value in values if inspect.isfunction(value))
    return [value for value in functions if inspect.isfunction(value) and is_own(value.__code__.co_filename)]


_DROPOUTS = nn.modules.dropout._DropoutNd
_SHOWN = 4
"""The most modules that a note names."""


@contextlib.contextmanager
def in_mode(model: nn.Module, mode: Mode) -> Iterator[tuple[str, ...]]:
    """Put a model in the mode in which it is captured, while the context is open.

    For inference all of it evaluates. For training, a model in training mode keeps those modules that were
    set to ``eval()`` by hand; one that evaluates as a whole, as loaded models do, is set to train.

    Yields:
        Notes on anything that a user may not expect.
    """
    before = {module: module.training for module in model.modules()}
    notes: tuple[str, ...] = ()
    try:
        if mode == "inference":
            model.eval()
        else:
            notes = _train(model)
        yield notes
    finally:
        for module, training in before.items():
            module.training = training


def _train(model: nn.Module) -> tuple[str, ...]:
    names = {module: name for name, module in model.named_modules()}
    differ = [module for module in names if _depends_on_mode(module)]
    # A new head in a loaded model is in training mode by default, which says nothing about the model.
    by_hand = model.training or any(module.training for module in differ)
    evaluating = [module for module in names if not module.training] if by_hand else []
    was_training = model.training
    # By the model's own method, which may keep parts of it in eval.
    model.train()
    for module in evaluating:
        module.training = False
    if evaluating:
        shown = [names[m] or type(m).__name__ for m in differ if not m.training]
        return (f"held in eval mode, as the model has them: {_listed(shown)}",) if shown else ()
    changed = [names[m] or type(m).__name__ for m in differ if m.training]
    if was_training or not changed:
        return ()
    return (
        "the model was in eval mode and is captured in train mode, which changes what these compute: "
        f"{_listed(changed)}; call train() on the model and eval() on what is to be held",
    )


def _depends_on_mode(module: nn.Module) -> bool:
    """Whether a module itself computes something else in training mode."""
    if isinstance(module, _DROPOUTS):
        return module.p > 0
    if isinstance(module, nn.modules.batchnorm._NormBase):
        return module.track_running_stats
    if isinstance(module, nn.RReLU):
        return True
    if isinstance(module, (nn.MultiheadAttention, nn.RNNBase)):
        return module.dropout > 0
    if type(module).__module__.startswith("torch."):
        return False
    cls: Any = type(module)  # a cache key; mypy does not accept a class as one
    names = names_read(cls)
    # Models that use it only to decide whether to checkpoint compute the same.
    return "training" in names and "gradient_checkpointing" not in names


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
