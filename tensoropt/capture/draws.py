"""Python's and numpy's random numbers in a model's code: the same in every process that captures it.

A graph holds what one run of the code did: layers that ``random.random() < p`` dropped are dropped for ever.
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

SEED = 0
"""Of the numbers that are drawn while a model is captured."""
_NUMPY = "numpy/random"


@contextlib.contextmanager
def seeded(seed: int = SEED, model: nn.Module | None = None) -> Iterator[Callable[[], bool]]:
    """Seed Python's and numpy's generators; they, and those that a model's modules hold, end as they began.

    Yields:
        A function that says whether a number was drawn so far.
    """
    numpy: Any = sys.modules.get("numpy")
    own = _generators(model)
    saved = random.getstate(), None if numpy is None else numpy.random.get_state()
    copies = [copy.deepcopy(generator) for _, _, generator in own]
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
        for (holder, name, _), before in zip(own, copies, strict=True):
            vars(holder)[name] = before


def _generators(model: nn.Module | None) -> list[tuple[nn.Module, str, Any]]:
    """Generators of Python's or numpy's kind that modules hold: (module, attribute, generator)."""
    numpy: Any = sys.modules.get("numpy")
    kinds = (random.Random, *(() if numpy is None else (numpy.random.Generator, numpy.random.RandomState)))
    modules = () if model is None else model.modules()
    return [(m, name, value) for m in modules for name, value in vars(m).items() if isinstance(value, kinds)]


def _state(own: list[tuple[nn.Module, str, Any]]) -> str:
    numpy: Any = sys.modules.get("numpy")
    found = [random.getstate()]
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        found.append((kind, keys.tobytes(), *rest))
    for module, name, _ in own:
        generator = vars(module)[name]
        state = generator.getstate() if hasattr(generator, "getstate") else None
        if state is None and hasattr(generator, "bit_generator"):
            state = generator.bit_generator.state
        found.append(repr(state if state is not None else generator.get_state()))
    return repr(found)


def note_of(run: Callable[[], Any]) -> str:
    """The note on numbers that ``run``, which is called for it, draws."""
    places: dict[str, None] = {}

    def profile(frame: FrameType, event: str, function: Any) -> None:
        if event != "c_call":
            return
        holder = getattr(function, "__self__", None)
        kind = type(holder)
        if not (isinstance(holder, random.Random) or kind.__module__.startswith("numpy.random")):
            return
        caller: FrameType | None = frame
        while caller is not None and (
            not is_own(caller.f_code.co_filename) or _NUMPY in caller.f_code.co_filename
        ):
            if caller.f_code.co_filename == __file__:
                return  # seeding and looking, which draw nothing of the model's
            caller = caller.f_back
        if caller is not None:
            places[f"{caller.f_code.co_filename}:{caller.f_lineno}"] = None

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(before)
    where = ", ".join(list(places)[:3]) or "the model"
    return (
        f"{where} draws numbers of Python's or numpy's random module in forward; the graph is the one run "
        "that was "
        f"drawn with seed {SEED}, in this and every step (layers that it dropped stay dropped); what "
        "is to change from step to step has to be a mask of torch.rand that is multiplied in"
    )
