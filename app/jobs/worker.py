"""The process of a job, which sends its progress to the server."""

from __future__ import annotations

import contextlib
import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tensoropt.processes import end_with

from .record import read_job

_DRAWN = 60
"""Maximum number of a running job's points in its plot."""


def run(arguments: list[str], log: str, messages: Connection, parent: int) -> None:
    """Run the job in the folder of ``log``; send its progress to ``messages``, then ``done`` or ``failed``.

    All output goes to ``log``. The process leads its own session, so that Ctrl-C in the server's terminal
    does not reach it, and it ends with the server.
    """
    if hasattr(os, "setsid"):
        os.setsid()
    end_with(parent)
    with open(log, "a", buffering=1, encoding="utf-8", errors="replace") as file:
        # File descriptors too: ranks and compiled code bypass `sys.stdout`.
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        sys.stdout = sys.stderr = file
        messages.send(_done(Path(log).parent, messages))
    messages.close()


def _done(folder: Path, messages: Connection) -> tuple[str, Any]:
    from tensoropt.cli.explore import explore
    from tensoropt.cli.parser import sentence
    from tensoropt.console import ProgressDisplay
    from tensoropt.errors import TensorOptError
    from tensoropt.question.question import Question

    class Sent(ProgressDisplay):
        """Writes the log, and sends every report to the page."""

        def __call__(self, stage: str, done: int, total: int, what: str = "") -> None:
            super().__call__(stage, done, total, what)
            with contextlib.suppress(OSError):  # the server is gone, and this process soon will be
                messages.send(("progress", (stage, int(done), int(total), str(what))))

        def first(self, text: str) -> None:
            """Send the sentence on usual strategies (such as FSDP) that is known before the search."""
            super().first(text)
            with contextlib.suppress(OSError):
                messages.send(("first", text))

        def points(self, memory: Any, time_s: Any) -> None:
            """Send the points known so far, thinned for a small plot."""
            count = len(memory)
            drawn = sorted({round(i * (count - 1) / (_DRAWN - 1)) for i in range(_DRAWN)}) if count else []
            with contextlib.suppress(OSError):
                messages.send(("points", (memory[drawn].tolist(), time_s[drawn].tolist(), count)))

    try:
        # Not the command line of the job, which rounds numbers and names the file of an uploaded cluster.
        job = read_job(folder)
        _, text, code = explore(Question.of(job and job.question), Sent(), str(folder))
        print(text)
        return ("done", "") if code == 0 else ("failed", f"ended with exit code {code}")
    except TensorOptError as error:
        print(f"error: {error}")
        return "failed", sentence(error)
    except MemoryError:
        return "failed", "this machine has no memory left; use a smaller batch"
    except Exception as error:
        import traceback

        traceback.print_exc()
        what = f"{type(error).__name__}: {sentence(error)}"
        return "failed", f"TensorOpt itself failed with {what}; the log has the traceback"


def data_folder() -> Path:
    """Return the folder of jobs and uploads, beside the profile store in the user's cache directory."""
    from tensoropt.profiling.store import default_path

    return Path(default_path()).parent / "dashboard"
