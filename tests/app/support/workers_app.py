"""What jobs run in tests instead of the real pipeline; importable in a spawned process."""

from __future__ import annotations

import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

PIDS = "pids.txt"
RELEASED = "released"
"""The file in the home of the jobs that ends :func:`held`."""


def endless(arguments: list[str], log: str, messages: Connection, parent: int) -> None:
    """Starts a child of its own, as a pool of ranks does, and never ends by itself."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(log).write_text("looking for something that is not there\n")
    Path(log).with_name(PIDS).write_text(f"{child.pid}")
    messages.send(("first", "DP 2"))
    messages.send(("progress", ("search", 1, 4, "mesh 2x4")))
    time.sleep(600)


def quick(arguments: list[str], log: str, messages: Connection, parent: int) -> None:
    """Leaves an exploration and says so."""
    from samples_app import exploration

    messages.send(("progress", ("capture", 0, 1, "")))
    exploration().save(arguments[arguments.index("--out") + 1])
    messages.send(("progress", ("capture", 1, 1, "4 operators")))
    messages.send(("done", ""))


def failing(arguments: list[str], log: str, messages: Connection, parent: int) -> None:
    messages.send(("failed", f"{arguments[1]} is not a model"))


def dying(arguments: list[str], log: str, messages: Connection, parent: int) -> None:
    sys.exit(9)


def ticking(arguments: list[str], log: str, messages: Connection, parent: int) -> None:
    """Says something new ten times a second until the dashboard ends."""
    for tick in range(6000):
        with open(log, "a") as file:
            file.write(f"line {tick}\n")
        messages.send(("progress", ("search", tick, 6000, f"step {tick}")))
        time.sleep(0.1)


def held(arguments: list[str], log: str, messages: Connection, parent: int) -> None:
    """Leaves an exploration once the test has seen the job at work and releases it."""
    while not (Path(log).parents[2] / RELEASED).exists():
        time.sleep(0.05)
    quick(arguments, log, messages, parent)
