"""The self-test: its checks one after another, each in a process of its own, as long as there is time."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from tensoropt.console import shows_progress
from tensoropt.errors import TensorOptError
from tensoropt.selftest.checks import Check, checks_of
from tensoropt.selftest.outcome import RESULT, Outcome
from tensoropt.selftest.report import CheckResult, SelftestReport
from tensoropt.types import ProgressChoice, heard

MINUTES = 10.0
HUNG_FACTOR, HUNG_S = 4.0, 60.0
"""A check that exceeds this multiple of its expected time plus so many seconds counts as hung;
assumptions."""
_TAIL = 400

_Device = Literal["auto", "gpu", "cpu"]


@shows_progress
def run_selftest(
    device: _Device = "auto",
    *,
    only: Sequence[str] | None = None,
    minutes: float = MINUTES,
    out: str | os.PathLike[str] | None = None,
    progress: ProgressChoice = None,
) -> SelftestReport:
    """Check on this machine that what is computed, kept and predicted is right, and return the report.

    Each check runs in a process of its own. A check that is not expected to end in the remaining time is left
    out, and the report says so.

    Args:
        device: ``gpu`` for the first GPU, ``cpu`` for CPU ranks and fake CUDA devices, ``auto`` for a GPU if
            there is one.
        only: names of checks (:data:`tensoropt.selftest.checks.CHECKS`); all of them by default.
        minutes: the minutes that all checks together may take.
        out: where to write the report, ``OUT.json`` and ``OUT.txt``; nowhere by default.
        progress: as in :func:`tensoropt.explore`.

    Raises:
        TensorOptError: there is no GPU, no check with one of the names, too little time for any check, or the
            report cannot be written.
    """
    checks, tell = checks_of(None if only is None else list(only)), heard(progress)
    if not minutes > 0:
        raise TensorOptError(f"{minutes:g} minutes leave no time for a check; give more than 0")
    target = _device(device)
    least = min(check.expected_s[target] for check in checks)
    if least > minutes * 60:
        raise TensorOptError(
            f"no check fits into {minutes:g} minutes: the shortest takes about {least:.0f} s; give "
            f"--minutes {least / 60:.1f} or more"
        )
    if out is not None:
        _try_to_write(Path(out))  # not after minutes of work
    from tensoropt.selftest.machine import machine

    about, began = machine(target), time.monotonic()
    results = []
    for done, check in enumerate(checks):
        tell("selftest", done, len(checks), f"{check.name}: {check.what}")
        left = minutes * 60 - (time.monotonic() - began)
        results.append(timed_check(check, target, left))
    tell("selftest", len(checks), len(checks), "")
    report = SelftestReport(about, tuple(results), minutes, time.monotonic() - began)
    if out is not None:
        report.save(Path(out))
    return report


def _device(wanted: _Device) -> str:
    if wanted == "cpu":
        return "cpu"
    from tensoropt.ranks.local_hardware import why_no_gpu

    reason = why_no_gpu()
    if wanted == "gpu" and reason:
        raise TensorOptError(f"there is no GPU to test: {reason}, or give --cpu for what goes without one")
    return "cpu" if reason else "cuda"


def _try_to_write(stem: Path) -> None:
    try:
        stem.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=stem.parent):
            pass
    except OSError as error:
        raise TensorOptError(
            f"cannot write the report {stem}: {error.strerror or error}; give another --out"
        ) from error


def timed_check(check: Check, device: str, left_s: float) -> CheckResult:
    """Return the result of a check in a process of its own, within the remaining seconds."""
    expected = check.expected_s[device]
    if expected > left_s:
        outcome = Outcome.left_out(
            f"takes about {expected:.0f} s, and {max(left_s, 0):.0f} s are left; give more --minutes, or "
            f"--only {check.name}"
        )
        return CheckResult(check.name, check.what, outcome, 0.0)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tensoropt-selftest-") as folder:
        outcome = _in_process(check, device, Path(folder), left_s)
    return CheckResult(check.name, check.what, outcome, time.monotonic() - began)


def _in_process(check: Check, device: str, folder: Path, left_s: float) -> Outcome:
    limit = min(left_s, HUNG_FACTOR * check.expected_s[device] + HUNG_S)
    said = folder / "said.txt"
    with said.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tensoropt.selftest.outcome", check.function, device, str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=_environment(device),
            # A process group of its own, so that the ranks that it starts end with it.
            start_new_session=True,
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            if limit < left_s:
                return Outcome.failed(f"did not end within {limit:.0f} s; the last it said: {_tail(said)}")
            return Outcome.left_out(
                f"had not ended after {limit:.0f} s, when the time was up; give more --minutes, or "
                f"--only {check.name}"
            )
        finally:
            _end(process)
    try:
        return Outcome.from_dict(json.loads((folder / RESULT).read_text(encoding="utf-8")))
    except OSError:
        return Outcome.failed(f"its process ended with code {code}; the last it said: {_tail(said)}")


def _environment(device: str) -> dict[str, str]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path),
        "PYTHONFAULTHANDLER": "1",
    }
    # As CPU ranks run.
    return environment | ({"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"} if device == "cpu" else {})


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _tail(said: Path) -> str:
    text = " ".join(said.read_text(encoding="utf-8", errors="replace").split())
    return text[-_TAIL:] or "nothing"
