"""The attributes that the forward of a kind of module reads, in its own code and in the code that it
calls."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterator
from typing import Any

from torch import nn

from tensoropt.capture.lines import is_own


@functools.cache
def names_read(kind: type[nn.Module]) -> frozenset[str]:
    """The names of the attributes that the forward of a kind of module reads, including those read in the
    methods and the user's functions that it calls."""
    found: set[str] = set()
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
        found |= names
        # For every class, because a method may call those of its base classes.
        own = [vars(base) for base in kind.__mro__ if base not in nn.Module.__mro__]
        waiting += [members[name] for members in own for name in names & members.keys()]
        waiting += _called(function, names)
    return frozenset(found)


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
    found = (inspect.unwrap(value) for value in values if inspect.isfunction(value))
    return [value for value in found if inspect.isfunction(value) and is_own(value.__code__.co_filename)]
