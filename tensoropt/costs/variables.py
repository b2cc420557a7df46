"""The names of a search's variables: the groups, tensors and parameters for which it makes a choice.

This module does not import PyTorch, so that saved explorations can be read without it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

_VariableKind = Literal["group", "hub", "parameter", "move"]


class Variable(str):
    """A variable of the search: a group, a tensor with several readers (hub), a tied parameter or a move.

    A move is the choice between saving a gathered tensor and gathering it again. The text is a group's name,
    ``hub:TENSOR``, ``parameter:TENSOR`` or ``move:TENSOR``; it is never parsed.

    Attributes:
        kind: ``group``, ``hub``, ``parameter`` or ``move``.
        name: the name of the group or tensor.
    """

    kind: _VariableKind
    name: str

    def __new__(cls, kind: _VariableKind, name: str) -> Variable:
        # A str is compared and hashed as text, so names read from a saved exploration match the same entries.
        made = super().__new__(cls, name if kind == "group" else f"{kind}:{name}")
        made.kind, made.name = kind, name
        return made

    def __getnewargs__(self) -> tuple[_VariableKind, str]:  # type: ignore[override]
        # pickle and copy would otherwise call __new__ with the text alone; they take a str's attributes from
        # here.
        return self.kind, self.name

    @classmethod
    def of_group(cls, name: str) -> Variable:
        return cls("group", name)

    @classmethod
    def of_hub(cls, tensor: str) -> Variable:
        return cls("hub", tensor)

    @classmethod
    def of_parameter(cls, tensor: str) -> Variable:
        return cls("parameter", tensor)

    @classmethod
    def of_move(cls, tensor: str) -> Variable:
        """Return the variable that is 1 if backward gathers a tensor again, 0 if its copy is saved."""
        return cls("move", tensor)


def variables(groups: Iterable[str], hubs: Iterable[str], shared: Iterable[str]) -> tuple[Variable, ...]:
    """Return a graph's variables in the order of tables and saved explorations."""
    return (*map(Variable.of_group, groups), *map(Variable.of_hub, hubs), *map(Variable.of_parameter, shared))
