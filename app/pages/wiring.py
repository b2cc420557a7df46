"""Callbacks by the names of what they set and follow: ``graph.figure`` is a component and its property."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dash import ClientsideFunction, Dash, Input, Output, State

Ports = str | Sequence[str | tuple[Any, str]]
"""``id.property`` of components, separated by blanks or as a sequence; (id, property) for a pattern of ids.

A ``+`` before an output says that other callbacks set it too."""


def callback(
    app: Dash, *, sets: Ports, when: Ports, given: Ports = "", at_start: bool = False
) -> Callable[[Any], Any]:
    """Return a decorator for the function that answers with the values of ``sets``.

    Args:
        sets: what the answer sets, in order.
        when: what starts the callback when it changes; the function's first arguments.
        given: what the function receives too; its last arguments.
        at_start: whether it also runs once when the page has just been made.
    """
    signature, early = _signature(sets, when, given, at_start)
    return app.callback(*signature, prevent_initial_call=early)


def in_browser(
    app: Dash, function: str, *, sets: Ports, when: Ports, given: Ports = "", at_start: bool = False
) -> None:
    """Let a function of the browser answer: ``namespace.name`` in ``assets/``, or JavaScript."""
    signature, early = _signature(sets, when, given, at_start)
    script = function if "=>" in function else ClientsideFunction(*function.split("."))
    app.clientside_callback(script, *signature, prevent_initial_call=early)


def _signature(sets: Ports, when: Ports, given: Ports, at_start: bool) -> tuple[list[Any], bool | str]:
    outputs, shared = [], False
    for name, property in _ports(sets):
        also = isinstance(name, str) and name.startswith("+")
        shared |= also
        outputs.append(Output(name[1:] if also else name, property, allow_duplicate=also))
    signature = [
        *outputs,
        *(Input(*port) for port in _ports(when)),
        *(State(*port) for port in _ports(given)),
    ]
    # Dash wants to be told that all of several callbacks with one output may run at the start.
    return signature, ("initial_duplicate" if shared else False) if at_start else True


def _ports(ports: Ports) -> list[tuple[Any, str]]:
    listed = ports.split() if isinstance(ports, str) else ports
    return [port if isinstance(port, tuple) else tuple(port.rsplit(".", 1)) for port in listed]  # type: ignore[misc]
