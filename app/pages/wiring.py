"""Callbacks declared by component and property, such as ``graph.figure``.

Pages declare callbacks as functions of the context and of properties; each application registers them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from dash import ClientsideFunction, Dash, Input, Output, State

from ..context import Context

_Ports = str | Sequence[str | tuple[Any, str]]
"""``id.property`` of components, separated by blanks or as a sequence; (id, property) for a pattern of ids.

A ``+`` before an output means that other callbacks set it, too."""


class Callbacks:
    """The callbacks of a page and of its ``parts``.

    A callback is declared by ``sets``, the properties that it sets, in order; ``when``, the properties whose
    changes run it; ``given``, other properties that it reads; ``at_start``, whether it also runs once the
    page is made; ``jobs``, whether only dashboards with (True) or without (False) jobs have it. Its function
    receives the context, the values of ``when``, then those of ``given``.
    """

    def __init__(self, *parts: Callbacks) -> None:
        self._declared: list[tuple[Callable[..., Any] | str, list[Any], bool | str, bool | None]] = [
            declared for part in parts for declared in part._declared
        ]

    def answer(self, **how: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Return a decorator that declares a function as a callback."""

        def declare(function: Callable[..., Any]) -> Callable[..., Any]:
            self._declare(function, **how)
            return function

        return declare

    def in_browser(self, function: str, **how: Any) -> None:
        """Declare a browser function, ``namespace.name`` in ``assets/``, as a callback."""
        self._declare(function, **how)

    def _declare(
        self,
        function: Callable[..., Any] | str,
        *,
        sets: _Ports,
        when: _Ports,
        given: _Ports = "",
        at_start: bool = False,
        jobs: bool | None = None,
    ) -> None:
        self._declared.append((function, *_signature(sets, when, given, at_start), jobs))

    def register(self, app: Dash, context: Context) -> None:
        """Register the callbacks with an application, in order of declaration."""
        for function, signature, early, jobs in self._declared:
            if jobs is not None and jobs != (context.jobs is not None):
                continue
            if callable(function):
                app.callback(*signature, prevent_initial_call=early)(partial(function, context))
            else:
                script = ClientsideFunction(*function.split("."))
                app.clientside_callback(script, *signature, prevent_initial_call=early)


def _signature(sets: _Ports, when: _Ports, given: _Ports, at_start: bool) -> tuple[list[Any], bool | str]:
    outputs, shared = [], False
    for name, property in _ports(sets):
        also = isinstance(name, str) and name.startswith("+")
        shared |= also
        outputs.append(Output(name[1:] if also else name, property, allow_duplicate=also))
    inputs = [Input(*port) for port in _ports(when)]
    # Dash requires a flag if several callbacks with one output may run at the start.
    early = ("initial_duplicate" if shared else False) if at_start else True
    return [*outputs, *inputs, *(State(*port) for port in _ports(given))], early


def _ports(ports: _Ports) -> list[tuple[Any, str]]:
    listed = ports.split() if isinstance(ports, str) else ports
    return [port if isinstance(port, tuple) else tuple(port.rsplit(".", 1)) for port in listed]  # type: ignore[misc]
