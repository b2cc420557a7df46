"""The search variables: groups, hubs and shared parameters, which explorations name without PyTorch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

_VariableKind = Literal["group", "hub", "parameter", "move"]


class Variable(str):
    """One variable of the search: that of a group, of a hub (a tensor with several readers) or of a shared
    parameter; or the option of an edge, whether its tensor is gathered again in backward.

    It is the text by which searches, their results and saved explorations name it: a group's name as it is,
    ``hub:TENSOR``, ``parameter:TENSOR`` and ``move:TENSOR``. Its meaning is read from its attributes, never
    parsed from the text.

    Attributes:
        kind: the kind of variable.
        name: the name of the group or of the tensor.
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
        """Return the variable of a tensor with several readers."""
        return cls("hub", tensor)

    @classmethod
    def of_parameter(cls, tensor: str) -> Variable:
        """Return the variable of a parameter that several groups share."""
        return cls("parameter", tensor)

    @classmethod
    def of_move(cls, tensor: str) -> Variable:
        """Return what names the option of the edge from a tensor's maker: 1 if its copy is gathered again."""
        return cls("move", tensor)


def variables(groups: Iterable[str], hubs: Iterable[str], shared: Iterable[str]) -> tuple[Variable, ...]:
    """Return the variables of a graph, in the order in which tables and saved explorations have them."""
    return (
        *map(Variable.of_group, groups),
        *map(Variable.of_hub, hubs),
        *map(Variable.of_parameter, shared),
    )
