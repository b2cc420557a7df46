"""One run of tests in a fork of this process, which has PyTorch, numba and pytest and nothing of the project.

Starting an interpreter and importing those takes five seconds, a fork milliseconds. The fork loads the
project anew, with one module taken from another file.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.mutants.mutant import ROOT

HOOK = Path(__file__).parent / "hook"
ADDRESS_SPACE = 24 << 30
"""Bytes of one process: a mutant that asks for more is stopped."""
IMPORT_S = 120.0
"""How long collection may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Tests to run.

    Attributes:
        tests: files, as pytest takes them.
        order: node ids with the seconds each may take, in the order in which they are run; empty for all that
            the files hold, in their order.
        module, path: the module that is taken from another file, and that file.
        jit: False to run numba's kernels as plain Python.
        ranks: whether tests that start ranks are run.
        cover: files whose executed lines are noted per test.
    """

    tests: Sequence[str]
    order: dict[str, float] = field(default_factory=dict)
    module: str = ""
    path: str = ""
    jit: bool = True
    ranks: bool = False
    cover: Sequence[str] = ()


@dataclass(slots=True)
class Running:
    """A trial under way."""

    pid: int
    stream: int
    folder: str
    began: float
    allowed_s: float
    deadline: float
    buffer: bytes = b""
    events: list[dict[str, Any]] = field(default_factory=list)
    stuck: str = ""

    def read(self) -> None:
        """Take what the fork has said; each test renews the deadline."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.stream, 1 << 16):
                self.buffer += data
        *lines, self.buffer = self.buffer.split(b"\n")
        for line in lines:
            event = json.loads(line)
            self.events.append(event)
            if "allowed_s" in event:
                self.deadline = time.monotonic() + event["allowed_s"]

    def stop(self) -> None:
        """End the fork and the ranks that it started, all of one session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


def start(trial: Trial) -> Running:
    """Fork and run the tests there."""
    read, write = os.pipe()
    folder = tempfile.mkdtemp(prefix="tensoropt-mutant-")
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            os.close(read)
            code = _child(trial, write, folder)
        finally:
            os._exit(code)
    os.close(write)
    os.set_blocking(read, False)
    now = time.monotonic()
    return Running(pid, read, folder, now, IMPORT_S, now + IMPORT_S)


def _child(trial: Trial, write: int, folder: str) -> int:
    os.setsid()
    log = os.open(os.path.join(folder, "log"), os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(log, stream)
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.chdir(ROOT)
    os.environ["CI"] = "1"  # hypothesis draws the same examples every time
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    if trial.module:
        os.environ["TENSOROPT_MUTANT"] = f"{trial.module}={trial.path}"
    sys.path.insert(0, str(HOOK))
    paths = [str(HOOK), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # for interpreters that tests start
    if not trial.jit:
        os.environ["NUMBA_DISABLE_JIT"] = "1"
        importlib.import_module("numba").config.DISABLE_JIT = 1
    sys.modules.pop("sitecustomize", None)
    importlib.import_module("sitecustomize")
    watcher = Watcher(trial, lambda event: os.write(write, json.dumps(event).encode() + b"\n"))
    return watcher.run()


class Watcher:
    """A pytest plugin: puts the tests in order, says when each begins and ends, and notes lines executed."""

    def __init__(self, trial: Trial, say: Callable[[dict[str, Any]], Any]) -> None:
        self.trial, self.say = trial, say
        self.coverage: Any = None
        self.seconds = 0.0

    def run(self) -> int:
        import pytest

        if self.trial.cover:
            import coverage

            self.coverage = coverage.Coverage(
                data_file=None, include=list(self.trial.cover), config_file=False
            )
            self.coverage.start()
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # those of dash and others load half of the web
        quiet = ["-q", "--no-header", "--tb=line", "-p", "no:cacheprovider", "-p", "pytest_timeout"]
        stop = [] if self.trial.cover else ["-x"]
        marks = "not slow" if self.trial.ranks else "not slow and not distributed"
        only = ["-m", marks, "--timeout=0"]
        code = int(pytest.main([*quiet, *stop, *only, *self.trial.tests], plugins=[self]))
        if self.coverage is not None:
            self.coverage.stop()
            self.say({"lines": self._lines()})
        self.say({"code": code})
        sys.stdout.flush()
        return code

    def _lines(self) -> dict[str, dict[str, list[str]]]:
        data = self.coverage.get_data()
        root = str(ROOT) + os.sep
        return {
            file.removeprefix(root): {
                str(line): tests for line, tests in data.contexts_by_lineno(file).items()
            }
            for file in data.measured_files()
        }

    # -- hooks ------------------------------------------------------------------------------------

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        from hypothesis import Phase, settings

        settings.register_profile(
            "mutants",
            parent=settings.get_profile("ci"),
            phases=[Phase.explicit, Phase.generate],
            database=None,
        )  # the first counterexample will do, the smallest takes long to find
        settings.load_profile("mutants")
        if not self.trial.order:
            return
        place = {name: i for i, name in enumerate(self.trial.order)}
        items[:] = sorted((i for i in items if i.nodeid in place), key=lambda i: place[i.nodeid])

    def pytest_collection_finish(self, session: Any) -> None:
        self.say({"collected": len(session.items)})

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if self.coverage is not None:
            self.coverage.switch_context(nodeid)
        self.seconds = 0.0
        self.say({"test": nodeid, "allowed_s": self.trial.order.get(nodeid, 600.0)})

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds += report.duration
        if report.failed:
            self.say({"failed": report.nodeid, "words": str(report.longrepr).splitlines()[-1][:300]})
        if report.when == "teardown":
            self.say({"passed": report.nodeid, "seconds": round(self.seconds, 4)})

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.say({"failed": report.nodeid, "words": str(report.longrepr).splitlines()[-1][:300]})
