"""The ways in which a run on ranks fails: a rank raises, dies or hangs."""

from __future__ import annotations

import contextlib
import pickle
import signal
import subprocess
import time
from collections.abc import Mapping

from tensoropt.errors import MeasurementError
from tensoropt.ranks.worker_process import EXIT_S, WorkerProcess

_STACK_S = 5.0  # how long hanging workers may take to write their stacks
_LOG_TAIL, _LAST_WORDS = 2000, 200  # characters of a worker's own output that an error shows


class RankError(MeasurementError):
    """The failure of a run on a rank. The message's first paragraph says what happened, the rest says where.

    Attributes:
        rank: the rank that failed first.
        kind: ``raised``, ``died`` or ``hung``.
        cause: the exception itself if it could be sent, otherwise None.
    """

    def __init__(self, message: str, *, rank: int, kind: str, cause: BaseException | None = None) -> None:
        super().__init__(message)
        self.rank, self.kind, self.cause = rank, kind, cause

    @property
    def summary(self) -> str:
        """The failure in one line."""
        return str(self).splitlines()[0]

    def __reduce__(self) -> tuple:
        return _rebuild_error, (str(self), self.rank, self.kind)


def _rebuild_error(message: str, rank: int, kind: str) -> RankError:
    return RankError(message, rank=rank, kind=kind)


def _tail(worker: WorkerProcess) -> str:
    text = worker.output().strip()[-_LOG_TAIL:]
    return f"\n\nIts last output:\n{text}" if text else ""


def raised_in(rank: int, what: str, content: tuple[str, str, bytes | None]) -> RankError:
    """The error for a rank whose function raised, built from the worker's report."""
    summary, trace, pickled = content
    # Not every exception can be pickled or rebuilt; text and traceback are always present.
    cause: BaseException | None = None
    if pickled is not None:
        with contextlib.suppress(Exception):
            loaded = pickle.loads(pickled)
            cause = loaded if isinstance(loaded, BaseException) else None
    message = f"rank {rank} failed in {what}: {summary}\n\n{trace}"
    return RankError(message, rank=rank, kind="raised", cause=cause)


def died_during(worker: WorkerProcess, rank: int, what: str) -> RankError:
    """The error for a rank whose connection closed: how its process ended, and its last output."""
    try:
        code: int | None = worker.process.wait(timeout=EXIT_S)
    except subprocess.TimeoutExpired:
        code = None
    how = f"with exit code {code}"
    if code is not None and code < 0:
        how = f"by signal {signal.Signals(-code).name}"
        if code == -signal.SIGKILL:
            how += " (out of memory?)"  # only the kernel is likely to have killed it
    if what == "start" and (words := worker.output().strip().rpartition("\n")[2]):
        how += f" ({words[:_LAST_WORDS]})"
    return RankError(f"rank {rank} died {how} during {what}{_tail(worker)}", rank=rank, kind="died")


def hangs_in(workers: Mapping[int, WorkerProcess], what: str, timeout_s: float) -> RankError:
    """The error for ranks, given with their workers, that did not answer; asks them for their stacks."""
    deadline = time.monotonic() + _STACK_S
    for worker in workers.values():
        worker.write_stack(deadline)
    first, *_ = workers
    return RankError(
        f"rank {', '.join(map(str, workers))} did not finish {what} within {timeout_s:g} s;"
        f" raise timeout_s or look where it stands{_tail(workers[first])}",
        rank=first,
        kind="hung",
    )
