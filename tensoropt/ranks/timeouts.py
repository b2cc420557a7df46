"""Time-outs that do not count time while this machine is suspended, and forks for calls that may never
end."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import signal
import time
import warnings
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

from tensoropt.errors import MeasurementError

SPELL_S = 1.0
"""Waiting is counted in intervals of this length. An interval that takes more than twice as long was no
waiting: this process was stopped meanwhile. A second is short compared with every time-out, and long compared
with scheduler delays."""


class Timeout:
    """A time-out: the seconds that other processes may take.

    While this process is stopped (Ctrl-Z, a debugger, a suspended machine, a clock that jumps), the processes
    it waits for may be stopped as well, so that time is not counted against them.

    Args:
        seconds: the total time to wait.
        clock: returns seconds.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic):
        self.left_s = self._all_s = seconds
        self._clock = clock

    def renew(self) -> None:
        """Start counting again, because a process that is being waited for has given a sign of life."""
        self.left_s = max(self.left_s, self._all_s)

    def at_most(self, seconds: float) -> None:
        """Wait no longer than ``seconds`` from now on, whatever signs of life arrive."""
        self.left_s, self._all_s = min(self.left_s, seconds), 0.0

    def wait(self, connections: Sequence[Connection]) -> list[Connection]:
        """The connections that can be read; none once the time is over. Each is polled at least once."""
        while True:
            spell_s = max(0.0, min(self.left_s, SPELL_S))
            start = self._clock()
            ready = wait(connections, timeout=spell_s)
            self.left_s -= min(max(self._clock() - start, 0.0), 2 * SPELL_S)
            if ready or self.left_s <= 0:
                return ready  # type: ignore[return-value]  # connections are all it was given


def call_in_fork(function: Callable[[], Any], allowed_s: float) -> Any:
    """Return the result of a function that may hang or crash, run in a fork; the result must be picklable.

    Raises:
        MeasurementError: it raised, its process died, or it did not end within ``allowed_s``.
    """
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
    """Never returns, because this process's exit handlers belong to the parent."""
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
