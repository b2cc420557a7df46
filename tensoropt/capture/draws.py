"""Python's and numpy's random numbers in a model's code, made the same in every process that captures it.

A graph records one run of the code: layers that ``random.random() < p`` dropped are dropped permanently.
Every process has to see the same run, and the graph notes where the numbers were drawn.
"""

from __future__ import annotations

import contextlib
import copy
import random
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from torch import nn

from tensoropt.capture.lines import is_own

_SEED = 0
"""The seed for numbers that are drawn while a model is captured."""
_NUMPY = "site-packages/numpy/"


@contextlib.contextmanager
def seeded(seed: int = _SEED, model: nn.Module | None = None) -> Iterator[Callable[[], bool]]:
    """Seed Python's and numpy's generators; restore their state, and that of generators in the model's
    modules, at the end.

    Yields:
        A function that returns whether a number has been drawn so far.
    """
    numpy: Any = sys.modules.get("numpy")
    own = _generators(model)
    saved = random.getstate(), None if numpy is None else numpy.random.get_state()
    states = [copy.deepcopy(_state_of(generator)) for generator in own]
    try:
        random.seed(seed)
        if numpy is not None:
            numpy.random.seed(seed % 2**32)
        begun = _state(own)
        yield lambda: _state(own) != begun
    finally:
        random.setstate(saved[0])
        if numpy is not None:
            numpy.random.set_state(saved[1])
        for generator, state in zip(own, states, strict=True):
            _set_state(generator, state)


def _generators(model: nn.Module | None) -> list[Any]:
    """The generators of Python's or numpy's kind that modules hold."""
    numpy: Any = sys.modules.get("numpy")
    kinds = (random.Random, *(() if numpy is None else (numpy.random.Generator, numpy.random.RandomState)))
    modules = () if model is None else model.modules()
    return [value for m in modules for value in vars(m).values() if isinstance(value, kinds)]


def _state(own: list[Any]) -> list[Any]:
    numpy: Any = sys.modules.get("numpy")
    states: list[Any] = [random.getstate()]
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        states.append((kind, keys.tobytes(), *rest))
    return [*states, *(repr(_state_of(generator)) for generator in own)]


def _state_of(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.bit_generator.state if hasattr(generator, "bit_generator") else generator.get_state()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def note_of(model: nn.Module, run: Callable[[], Any]) -> str:
    """Return the note on random numbers that a model's code draws; ``run`` runs that code."""
    places: dict[str, None] = {}
    own = _generators(model)
    last: tuple[str, Any] = ("", None)

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal last
        if not is_own(frame.f_code.co_filename) or _NUMPY in frame.f_code.co_filename:
            # The line that called numpy is responsible for what numpy itself calls.
            return None
        states = _state(own)
        # Before each line of the model's code: whatever changed since the previous one was drawn there.
        if last[0] and states != last[1]:
            places[last[0]] = None
        last = f"{frame.f_code.co_filename}:{frame.f_lineno}", states
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    where = ", ".join(list(places)[:3]) or "the model"
    return (
        f"{where} draws numbers of Python's or numpy's random module in forward; the graph is the run that "
        f"was drawn with seed {_SEED}, in this and every step (layers that it dropped stay dropped); what is "
        "to change from step to step has to be a mask of torch.rand that is multiplied in"
    )
