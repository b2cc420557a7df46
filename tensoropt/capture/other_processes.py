"""The refusal of models that communicate with other processes, for example to gather losses over ranks.

A graph describes one process, so the model's code finds no process group during capture. If the code asks for
a group, in the step or when the model is built, the step is run once more in a pretended group of two ranks.
A model that communicates there is refused, because in a job it would communicate in addition to the plan.
PyTorch's own layers are not tested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tensoropt.capture.lines import asking_frame, current_line, is_ours, is_own, quoted_line
from tensoropt.errors import CaptureError

_REFUSED: ContextVar[list[str]] = ContextVar("lines that communicate")
_TORCH = Path(torch.__file__).parent
_PASSING = tuple(
    str(path)
    for path in (_TORCH / "distributed", _TORCH / "autograd", _TORCH / "overrides.py", Path(__file__).parent)
)
"""Files and folders that may be on the stack between the model's code and PyTorch's process groups."""


@contextmanager
def no_other_processes() -> Iterator[list[str]]:
    """While open, a model's code finds no process group; yields a list of the lines that ask for a group."""
    asked: list[str] = []

    def found(frame: FrameType) -> None:
        asked.append(quoted_line(frame))

    with _group_found(found):
        yield asked


def refuse_communication(run: Callable[[Any], object], build: Callable[[], Any] = lambda: None) -> None:
    """Run a model's step as one of two pretended ranks, and refuse the model if the step communicates.

    Args:
        run: function that runs the step of the model that ``build`` returned.
        build: function that makes the model. If it raises, as DDP does in such a group, nothing is refused.

    Raises:
        CaptureError: the step communicates.
    """
    # Of rank and size alone, as PyTorch's own tests make groups: its stubs do not say so.
    pretended: dist.ProcessGroup = _Pretended(0, 2)  # type: ignore[call-arg]
    refused = _REFUSED.set([])
    try:
        with _group_found(lambda frame: pretended):
            try:
                built = build()
            except Exception:
                return
            run(built)
        # What PyTorch does about an error in a collective raises others.
        if lines := _REFUSED.get():
            raise CaptureError(
                f"{lines[0]} communicates with other processes if there are any, which is not supported: the "
                "plan itself divides the batch over ranks and communicates; leave that out of forward (under "
                "a plan, the loss and the statistics of batch norms are those of the whole batch)"
            )
    finally:
        _REFUSED.reset(refused)


def _group_found(found: Callable[[FrameType], dist.ProcessGroup | None]) -> AbstractContextManager[object]:
    """While open, a model's own code that asks for the default process group, through any function, gets
    ``found(frame)``. PyTorch's layers get None."""
    real: Any = distributed_c10d._WorldMeta.__dict__["WORLD"]

    def world(cls: Any) -> Any:
        frame = asking_frame(*_PASSING)
        if frame is None or is_ours(frame.f_code.co_filename):
            return real.__get__(cls)
        return found(frame) if is_own(frame.f_code.co_filename) else None

    return mock.patch.object(distributed_c10d._WorldMeta, "WORLD", property(world, real.fset))


class _Pretended(dist.ProcessGroup):
    """A process group that has a size and a rank; any other use of the group is noted and raises an error."""

    def __getattribute__(self, name: str) -> Any:
        if name in ("size", "rank", "getSize", "getRank") or name.startswith("__"):
            return super().__getattribute__(name)
        _REFUSED.get().append(current_line())
        raise RuntimeError("no other process is there")
