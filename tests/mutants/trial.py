"""One run of tests in a process of its own, in which one module is taken from another file."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import coverage

from tests.mutants.mutant import ROOT

HOOK = Path(__file__).parent / "hook"
ADDRESS_SPACE = 24 << 30
"""Bytes of one process: a mutant that asks for more is stopped."""
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
TIMED_OUT = "+ Timeout +"
"""How pytest-timeout says so, before it ends the process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Tests to run.

    Attributes:
        tests: files in the order in which they are run.
        test_s, all_s: how long a test and all together may take; a trial ends with the first failure if its
            tests may take so long only.
        module, path: the module that is taken from another file, and that file.
        jit: False to run numba's kernels as plain Python.
        ranks: whether tests that start ranks are run.
        cover: files whose executed lines are noted by test file.
    """

    tests: Sequence[str]
    test_s: float = 0.0
    all_s: float = 3600.0
    module: str = ""
    path: str = ""
    jit: bool = True
    ranks: bool = False
    cover: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Ran:
    """What became of a trial.

    Attributes:
        code: of the process, None where it timed out.
        by, words: the test that failed, or was under way in the end, and how; "" for none.
        test_s: seconds of each test file.
        slowest_s: of a test.
        lines: per file and line the test files that execute it, in this process.
        log: the end of what was printed.
    """

    code: int | None
    seconds: float
    by: str
    words: str
    test_s: dict[str, float]
    slowest_s: float
    lines: dict[str, dict[str, list[str]]]
    log: str


def run(trial: Trial) -> Ran:
    """Run the tests and return what became of them."""
    with tempfile.TemporaryDirectory(prefix="tensoropt-mutant-", ignore_cleanup_errors=True) as name:
        folder, begun = Path(name), time.monotonic()
        report, lines, log = (folder / part for part in ("report.xml", "lines", "log"))
        (folder / "rc").touch()  # not the project's settings of coverage
        paths = [str(HOOK), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = {**os.environ, **dict.fromkeys(THREADS, "1"), "PYTHONPATH": os.pathsep.join(paths)}
        env |= {"CI": "1", "TMPDIR": name}  # hypothesis draws the same examples every time
        env |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # those of dash and others load half of the web
        env |= {"TENSOROPT_MUTANT": f"{trial.module}={trial.path}"} if trial.module else {}
        env |= {} if trial.jit else {"NUMBA_DISABLE_JIT": "1"}
        command = [sys.executable, "-m"]
        if trial.cover:
            command += ["coverage", "run", f"--rcfile={folder / 'rc'}", f"--data-file={lines}"]
            command += [f"--include={','.join(trial.cover)}", "-m"]
        command += ["pytest", "-v", "--tb=line", "-p", "no:cacheprovider", "-p", "tests.mutants.plugin"]
        # Not by a signal: hypothesis would run what hangs again.
        command += ["-p", "pytest_timeout", "--timeout-method=thread", f"--timeout={trial.test_s}"]
        command += [f"--junitxml={report}"]
        command += ["-x"] if trial.test_s else []
        command += ["-m", "not slow" if trial.ranks else "not slow and not distributed", *trial.tests]
        with log.open("w") as printed:
            process = subprocess.Popen(
                command, cwd=ROOT, env=env, stdout=printed, stderr=printed, start_new_session=True
            )
            resource.prlimit(process.pid, resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
            code = None
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = process.wait(trial.all_s)
            finally:  # ranks that it started are of its session, which Ctrl-C does not reach
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        said = log.read_text(errors="replace")
        by, words, test_s, slowest_s = _read(report)
        if code != 0 and not by:  # it was stopped or died: the test that was under way
            by = next(reversed(re.findall(r"^(tests/\S+::\S+)", said, re.MULTILINE)), "collection")
        return Ran(
            None if TIMED_OUT in said else code, round(time.monotonic() - begun, 2), by, words, test_s,
            slowest_s, _executed(lines) if trial.cover else {}, said[-4000:],
        )  # fmt: skip


def _read(report: Path) -> tuple[str, str, dict[str, float], float]:
    """(the first test that failed, how, seconds by test file, of the slowest test) of JUnit's XML."""
    cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    by, words, seconds = "", "", Counter[str]()
    for case in cases:
        file = case.get("classname", "").replace(".", "/") + ".py"
        seconds[file] += float(case.get("time", 0.0))
        for failure in (*case.iter("failure"), *case.iter("error")):
            if not by:
                by, words = f"{file}::{case.get('name')}", failure.get("message", "")[:300]
    return by, words, dict(seconds), max((float(case.get("time", 0.0)) for case in cases), default=0.0)


def _executed(path: Path) -> dict[str, dict[str, list[str]]]:
    data = coverage.CoverageData(str(path))
    data.read()
    return {
        str(Path(file).relative_to(ROOT)): {
            str(line): tests for line, tests in data.contexts_by_lineno(file).items()
        }
        for file in data.measured_files()
    }
