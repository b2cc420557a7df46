"""Time-outs that do not count when this machine stands still, and forks for what may never end."""

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
"""Waiting is counted in spells this long. What takes longer than twice that was no waiting: this process was
stopped meanwhile. A second is short beside every time-out, and long beside what the scheduler takes."""


class Timeout:
    """A time-out: the seconds that others may take.

    While this process is stopped (Ctrl-Z, a debugger, a suspended machine, a clock that jumps) those it waits
    for may stand still as well, so that such time is not counted against them.

    Args:
        seconds: how long to wait in all.
        clock: gives seconds.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic):
        self.left_s = self._all_s = seconds
        self._clock = clock

    def renew(self) -> None:
        """Those that are waited for have given a sign: count anew."""
        self.left_s = max(self.left_s, self._all_s)

    def at_most(self, seconds: float) -> None:
        """Wait no longer than that from now on, whatever signs there are."""
        self.left_s, self._all_s = min(self.left_s, seconds), 0.0

    def wait(self, connections: Sequence[Connection]) -> list[Connection]:
        """Those that can be read; none once the time is over. Each is asked at least once."""
        while True:
            spell_s = max(0.0, min(self.left_s, SPELL_S))
            start = self._clock()
            ready = wait(connections, timeout=spell_s)
            self.left_s -= min(max(self._clock() - start, 0.0), 2 * SPELL_S)
            if ready or self.left_s <= 0:
                return ready  # type: ignore[return-value]  # connections are all it was given


def call_in_fork(function: Callable[[], Any], allowed_s: float) -> Any:
    """The result of a function that may hang or crash, run in a fork; it must be picklable.

    Raises:
        MeasurementError: it raised, its process died, or it did not end within ``allowed_s``.
    """
    ours, theirs = Pipe(duplex=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads: the child uses one of its own
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
    """Never returns: what this process would do at its end is the other's to do."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
        faulthandler.disable()  # a crash is an answer here
        try:
            answer = pickle.dumps(("ok", function()))
        except Exception as error:
            answer = pickle.dumps(("error", f"{type(error).__name__}: {error}".splitlines()[0]))
        connection.send_bytes(answer)
    finally:
        os._exit(0)
