"""The self-test as a whole: processes, time, errors, exit codes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tensoropt.cli.parser import main, parser
from tensoropt.errors import TensorOptError
from tensoropt.ranks.local_hardware import why_no_gpu
from tensoropt.selftest import CHECKS, run, run_selftest
from tensoropt.selftest.checks import Check
from tensoropt.selftest.outcome import RESULT, Outcome
from tensoropt.selftest.outcome import main as run_check
from tensoropt.selftest.run import timed_check


def planted(name: str, expected_s: float = 5.0) -> Check:
    """A check of ``tests/selftest/faults.py``."""
    return Check(
        name,
        f"what {name} shows",
        f"tests.selftest.faults:{name}",
        dict.fromkeys(("cpu", "cuda"), expected_s),
    )


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[Check]:
    """Checks that take the place of the real ones."""
    found = [planted("passes"), planted("raises")]
    monkeypatch.setattr(
        run, "checks_of", lambda names: [c for c in found if names is None or c.name in names]
    )
    return found


def test_checks_run_in_processes_of_their_own(
    checks: list[Check],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """An error and a death are findings, what does not fit is left out, and nothing private is said."""
    monkeypatch.setenv("USER", "margarete")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "margarete's files"))
    checks += [planted("dies"), planted("hangs", 1000.0)]
    report = run_selftest("cpu", minutes=2.0, out=tmp_path / "report")
    assert capfd.readouterr().out == ""  # what a check says is no part of an answer
    passed, raised, died, left_out = (result.outcome for result in report.results)
    assert passed.state == "passed"
    assert passed.details == {"device": "cpu"}
    assert all(result.seconds > 0 for result in report.results[:3])
    assert raised.state == "failed"
    assert raised.reason.startswith("FileNotFoundError")
    assert any(line.startswith("faults.py:") for line in raised.details["raised_in"])
    assert died.state == "failed"
    assert died.reason.startswith("its process ended with code 70")
    assert "illegal memory access" in died.reason
    assert left_out.state == "left out"
    assert "takes about 1000 s" in left_out.reason
    assert "left out for want of time, not checked: hangs" in str(report)
    for text in (
        str(report),
        json.dumps(report.to_dict()),
        *(p.read_text() for p in tmp_path.glob("report.*")),
    ):
        assert "weights.bin" in text
        assert "margarete" not in text
        assert str(tmp_path) not in text
        assert os.uname().nodename not in text


def test_a_time_in_which_no_check_fits_is_refused(checks: list[Check]) -> None:
    with pytest.raises(TensorOptError, match=r"no check fits into 0\.05 minutes.*--minutes 0\.1"):
        run_selftest("cpu", minutes=0.05)


HANGING = """#!/bin/sh
while :; do echo here > "$STILL_THERE"; sleep 0.05; done &
wait
"""
"""A check's process that never ends, and one that it started; it takes the place of an interpreter."""


@pytest.mark.parametrize(
    ("left_s", "state", "words"), [(60.0, "failed", "did not end"), (1.0, "left out", "time was up")]
)
def test_a_check_that_hangs_is_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, left_s: float, state: str, words: str
) -> None:
    monkeypatch.setattr(run, "HUNG_S", 0.0)
    monkeypatch.setattr(run, "HUNG_FACTOR", 2.0)
    script, there = tmp_path / "python", tmp_path / "there"
    script.write_text(HANGING)
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setenv("STILL_THERE", str(there))
    outcome = timed_check(planted("hangs", 0.6), "cpu", left_s).outcome
    assert (outcome.state, words in outcome.reason) == (state, True)
    there.unlink(missing_ok=True)
    time.sleep(0.3)
    assert not there.exists()


def test_the_command_has_the_functions_default() -> None:
    assert parser().parse_args(["selftest"]).minutes == run.MINUTES


@pytest.mark.parametrize("minutes", [0.0, -1.0, float("nan")])
def test_no_time_is_refused(minutes: float) -> None:
    with pytest.raises(TensorOptError, match="no time"):
        run_selftest("cpu", minutes=minutes)


def test_names_of_checks() -> None:
    assert list(CHECKS) == [check.name for check in run.checks_of(None)]
    assert [check.name for check in run.checks_of(["clock", "numerics"])] == ["numerics", "clock"]
    with pytest.raises(TensorOptError, match="no check called clocks; the checks are numerics, "):
        run_selftest("cpu", only=["clocks"])


@pytest.mark.skipif(not why_no_gpu(), reason="there is a GPU here")
def test_without_a_gpu_there_is_none_to_test(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest", "--gpu"]) == 2
    assert "there is no GPU to test: PyTorch" in (said := capsys.readouterr().err)
    assert "give --cpu" in said


def test_exit_codes_and_files(
    checks: list[Check],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of checks that run in this process."""

    def here(check: Check, device: str, folder: Path, left_s: float) -> Outcome:
        with contextlib.redirect_stdout(None):
            run_check(check.function, device, folder)
        return Outcome.from_dict(json.loads((folder / RESULT).read_text()))

    monkeypatch.setattr(run, "_in_process", here)
    stem = tmp_path / "out" / "h100.first"
    assert main(["selftest", "--cpu", "--only", "passes", "--out", f"{stem}.json"]) == 0
    text = capsys.readouterr().out
    assert "1 checks in" in text
    assert sorted(os.listdir(stem.parent)) == ["h100.first.json", "h100.first.txt"]
    data = json.loads(Path(f"{stem}.json").read_text())
    assert data["schema"] == "tensoropt.selftest/1"
    assert data["checks"][0]["figures"][1] == {
        "what": "step", "value": 0.25, "bound": None, "unit": "s", "ok": True,
    }  # fmt: skip
    assert main(["selftest", "--cpu", "--json", "--out", str(stem)]) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False
    assert main(["selftest", "--cpu", "--only", "passes", "--out", "/proc/nowhere/report"]) == 2
    assert "cannot write the report" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("name", sorted(CHECKS))
def test_a_real_check_on_this_machine(name: str) -> None:
    found = timed_check(CHECKS[name], "cpu", 900.0)
    assert found.outcome.state in ("passed", "skipped"), found


def test_a_check_may_come_before_pytorch() -> None:
    """Fake devices have to be loaded first."""
    program = "import sys, tensoropt.selftest.checks.fake_devices; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
