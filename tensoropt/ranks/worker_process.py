"""One worker as the pool sees it: a process, the connection to it, and the file it prints to."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

EXIT_S = 2.0
"""How long an idle worker may take to exit."""
_WORKER = "from tensoropt.ranks.worker import main; main()"
_OUTERMOST = "in <module>"
"""The end of the last line of a stack that faulthandler writes, because ``main()`` is called from there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerProcess:
    """A worker that has been started.

    Attributes:
        process: the interpreter.
        connection: carries ``(verb, content)`` messages and their answers.
        lifeline: one end of a pipe; the worker exits when it closes, so it never outlives this process.
        log: the file with the worker's output.
    """

    process: subprocess.Popen[bytes]
    connection: Connection
    lifeline: int
    log: Path

    def kill(self) -> None:
        """End the process, whatever it is doing, and release its connection, lifeline and log."""
        with contextlib.suppress(OSError):
            self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=10)
        self.connection.close()
        with contextlib.suppress(OSError):
            os.close(self.lifeline)

    def write_stack(self, deadline: float) -> None:
        """Make faulthandler write the worker's stack to the log, and wait for it."""
        known = len(self.output())
        with contextlib.suppress(OSError):
            self.process.send_signal(signal.SIGUSR1)
        while _OUTERMOST not in self.output()[known:] and time.monotonic() < deadline:
            time.sleep(0.05)

    def output(self) -> str:
        """The output that the worker has printed since it started."""
        try:
            return self.log.read_text(errors="replace")
        except OSError:
            return ""


def kill_all(workers: list[WorkerProcess]) -> None:
    """End all workers and empty the list."""
    for worker in workers:
        with contextlib.suppress(OSError):
            worker.process.kill()
    while workers:
        workers.pop().kill()


def start_worker(log: Path, prefix: Sequence[str], threads: int, interface: str) -> WorkerProcess:
    """Start a worker, which then waits for messages.

    Args:
        log: the file that its output goes to.
        prefix: a command that is put before the worker's.
        threads: how many threads it may use; libraries read it from the environment when they are loaded.
        interface: gloo's network interface.
    """
    ours, theirs = socket.socketpair()
    lifeline_read, lifeline_write = os.pipe()
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path),
        "PYTHONFAULTHANDLER": "1",
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
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
