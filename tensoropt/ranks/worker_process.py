"""A pool's side of a worker process: its start and end, the errors for its failures, and calls in forks."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tensoropt.errors import MeasurementError

EXIT_S = 2.0
"""The seconds in which an idle worker must exit."""
_WORKER = "from tensoropt.ranks.worker import main; main()"
_OUTERMOST = "in <module>"
"""The last frame of faulthandler's stacks, from which ``main()`` is called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerProcess:
    """A worker process that has been started.

    Attributes:
        connection: pipe for ``(verb, content)`` messages and their answers.
        lifeline: file descriptor of a pipe's end; the worker exits when it is closed.
        log: path of the file with the worker's output.
    """

    process: subprocess.Popen[bytes]
    connection: Connection
    lifeline: int
    log: Path

    def output(self) -> str:
        try:
            return self.log.read_text(errors="replace")
        except OSError:
            return ""


def kill_all(workers: list[WorkerProcess]) -> None:
    """End all workers, release their connections and lifelines, and empty the list."""
    for worker in workers:
        with contextlib.suppress(OSError):
            worker.process.kill()
    while workers:
        worker = workers.pop()
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.process.wait(timeout=10)
        worker.connection.close()
        with contextlib.suppress(OSError):
            os.close(worker.lifeline)


def start_worker(log: Path, prefix: Sequence[str], interface: str) -> WorkerProcess:
    """Start a worker process, which then waits for messages.

    Args:
        prefix: words put before the worker's command.
        interface: gloo's network interface.
    """
    ours, theirs = socket.socketpair()
    lifeline_read, lifeline_write = os.pipe()
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path),
        "PYTHONFAULTHANDLER": "1",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": interface,
    }
    command = [sys.executable, "-P", "-c", _WORKER, str(theirs.fileno()), str(lifeline_read)]
    try:
        with log.open("wb") as stream:
            process = subprocess.Popen(
                [*prefix, *command],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=environment,
                pass_fds=(theirs.fileno(), lifeline_read),
            )
    except BaseException:
        ours.close()
        os.close(lifeline_write)
        raise
    finally:
        # The worker has its own copies; while ours are open, we would not notice that it closed its end.
        theirs.close()
        os.close(lifeline_read)
    return WorkerProcess(
        process=process, connection=Connection(ours.detach()), lifeline=lifeline_write, log=log
    )


_STACK_S = 5.0  # how long hanging workers may take to write their stacks
_LOG_TAIL, _LAST_WORDS = 2000, 200  # characters of a worker's own output that an error shows


class RankError(MeasurementError):
    """The error of a run that fails on a rank. The message's first paragraph names the failure, the rest has
    its stack.

    Attributes:
        rank: the rank that failed first.
        kind: ``raised``, ``died`` or ``hung``.
        cause: the exception raised there, if it could be sent.
    """

    def __init__(self, message: str, *, rank: int, kind: str, cause: BaseException | None = None) -> None:
        super().__init__(message)
        self.rank, self.kind, self.cause = rank, kind, cause

    @property
    def summary(self) -> str:
        return str(self).splitlines()[0]

    def __reduce__(self) -> tuple:
        return partial(RankError, rank=self.rank, kind=self.kind), (str(self),)


def _tail(worker: WorkerProcess) -> str:
    # The names of all modules, which follow the stacks of a process that aborts, leave no room for them.
    lines = [line for line in worker.output().splitlines() if not line.startswith("Extension modules:")]
    text = "\n".join(lines).strip()[-_LOG_TAIL:]
    return f"\n\nIts last output:\n{text}" if text else ""


def raised_in(rank: int, task: str, content: tuple[str, str, bytes | None]) -> RankError:
    """Return the error for a rank whose function raised; ``content`` describes the exception."""
    summary, trace, pickled = content
    # Not every exception can be pickled or rebuilt; text and traceback are always present.
    cause: BaseException | None = None
    if pickled is not None:
        with contextlib.suppress(Exception):
            loaded = pickle.loads(pickled)
            cause = loaded if isinstance(loaded, BaseException) else None
    message = f"rank {rank} failed in {task}: {summary}\n\n{trace}"
    return RankError(message, rank=rank, kind="raised", cause=cause)


def died_during(worker: WorkerProcess, rank: int, task: str) -> RankError:
    """Return the error for a rank whose connection closed, with the process's exit code and last output."""
    try:
        code: int | None = worker.process.wait(timeout=EXIT_S)
    except subprocess.TimeoutExpired:
        code = None
    how = f"with exit code {code}"
    if code is not None and code < 0:
        how = f"by signal {signal.Signals(-code).name}"
        if code == -signal.SIGKILL:
            how += " (out of memory?)"  # only the kernel is likely to have killed it
    if task == "start" and (words := worker.output().strip().rpartition("\n")[2]):
        how += f" ({words[:_LAST_WORDS]})"
    return RankError(f"rank {rank} died {how} during {task}{_tail(worker)}", rank=rank, kind="died")


def hangs_in(workers: Mapping[int, WorkerProcess], task: str, timeout_s: float) -> RankError:
    """Return the error for ranks that did not answer in time, with the function in which each one waits."""
    deadline = time.monotonic() + _STACK_S
    places: dict[str, list[str]] = {}
    for rank, worker in workers.items():
        written = len(worker.output())
        _write_stack(worker, deadline)
        places.setdefault(_stands(worker.output()[written:]), []).append(str(rank))
    waits = "".join(f"; rank {', '.join(one)} is in {where}" for where, one in places.items() if where)
    first, *_ = workers
    return RankError(
        f"rank {', '.join(map(str, workers))} did not finish {task} within {timeout_s:g} s{waits}; raise "
        f"timeout_s, or find out why it waits there{_tail(workers[first])}",
        rank=first,
        kind="hung",
    )


_FRAME = re.compile(r'File "(.+)", line (\d+) in (\S+)')
_PASSING = re.compile(r"[\\/]torch[\\/]|typing_extensions\.py$")


def _stands(stack: str) -> str:
    """Return the main thread's innermost public function, and the line outside PyTorch that called it."""
    frames = _FRAME.findall(stack.rpartition("most recent call first")[2])
    called = next((f"{file}:{line}" for file, line, _ in frames if not _PASSING.search(file)), "")
    inner = next((name for *_, name in frames if not name.startswith("_")), "")
    return f"{inner}, called from {called}" if frames else ""


def _write_stack(worker: WorkerProcess, deadline: float) -> None:
    """Make a worker's faulthandler write its stack to its log, and wait until it has."""
    written = len(worker.output())
    with contextlib.suppress(OSError):
        worker.process.send_signal(signal.SIGUSR1)
    while _OUTERMOST not in worker.output()[written:] and time.monotonic() < deadline:
        time.sleep(0.05)


class Timeout:
    """A limit in seconds on the time that other processes may take."""

    def __init__(self, seconds: float):
        self._all_s, self._until = seconds, time.monotonic() + seconds

    def renew(self) -> None:
        """Start the full time again, because another process has shown that it is alive."""
        self._until = max(self._until, time.monotonic() + self._all_s)

    def at_most(self, seconds: float) -> None:
        """Shorten the limit to ``seconds`` from now (a shorter one stays). :meth:`renew` no longer extends
        it."""
        self._until, self._all_s = min(self._until, time.monotonic() + seconds), 0.0

    def wait(self, connections: Sequence[Connection]) -> list[Connection]:
        """Return the readable connections, waiting at most the remaining time."""
        left_s = max(0.0, self._until - time.monotonic())
        return wait(connections, timeout=left_s)  # type: ignore[return-value]  # connections


def call_in_fork(function: Callable[[], Any], allowed_s: float) -> Any:
    """Return a function's result from a fork; raise MeasurementError if it fails, dies or takes too long."""
    ours, theirs = Pipe(duplex=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads: the child uses only its own
        pid = os.fork()
    if pid == 0:
        _child(function, theirs)
    theirs.close()
    try:
        if not Timeout(allowed_s).wait([ours]):
            raise MeasurementError(f"it did not end within {allowed_s:.0f} s")
        verdict, content = pickle.loads(ours.recv_bytes())
    except EOFError:
        raise MeasurementError("the process that tried it died") from None
    finally:
        ours.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    if verdict == "error":
        raise MeasurementError(content)
    return content


def _child(function: Callable[[], Any], connection: Any) -> None:
    """Run the function in the fork and never return, because exit handlers belong to the parent."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
        faulthandler.disable()  # a crash is a valid answer in this process
        try:
            answer = pickle.dumps(("ok", function()))
        except Exception as error:
            answer = pickle.dumps(("error", f"{type(error).__name__}: {error}".splitlines()[0]))
        connection.send_bytes(answer)
    finally:
        os._exit(0)
