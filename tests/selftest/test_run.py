"""The self-test as a whole: processes, time, errors, exit codes."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from tensoropt.cli.parser import main, parser
from tensoropt.errors import TensorOptError
from tensoropt.ranks.local_hardware import why_no_gpu
from tensoropt.selftest import CHECKS, run, run_selftest
from tensoropt.selftest.checks import Check
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


def test_a_check_runs_in_a_process_of_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    found = timed_check(planted("passes"), "cpu", 60.0)
    assert found.outcome.state == "passed"
    assert found.outcome.details == {"device": "cpu"}
    assert found.seconds > 0
    assert capfd.readouterr().out == ""  # what it says is no part of an answer


def test_an_error_is_a_finding_with_its_place() -> None:
    outcome = timed_check(planted("raises"), "cpu", 60.0).outcome
    assert outcome.state == "failed"
    assert outcome.reason.startswith("FileNotFoundError")
    assert any(line.startswith("faults.py:") for line in outcome.details["raised_in"])


def test_a_process_that_dies_is_a_finding() -> None:
    outcome = timed_check(planted("dies"), "cpu", 60.0).outcome
    assert outcome.state == "failed"
    assert outcome.reason.startswith("its process ended with code 70")
    assert "illegal memory access" in outcome.reason


@pytest.mark.parametrize(
    ("left_s", "state", "words"), [(60.0, "failed", "did not end"), (4.0, "left out", "time was up")]
)
def test_a_check_that_hangs_is_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, left_s: float, state: str, words: str
) -> None:
    monkeypatch.setattr(run, "HUNG_S", 0.0)
    monkeypatch.setattr(run, "HUNG_FACTOR", 6.0)
    there = tmp_path / "there"
    monkeypatch.setenv("STILL_THERE", str(there))
    outcome = timed_check(planted("hangs", 1.0), "cpu", left_s).outcome
    assert (outcome.state, words in outcome.reason) == (state, True)
    there.unlink(missing_ok=True)
    time.sleep(0.3)
    assert not there.exists()


def test_what_does_not_fit_is_left_out_and_said(checks: list[Check]) -> None:
    checks.append(planted("dies", 1000.0))
    found = run_selftest("cpu", minutes=2.0)
    assert [result.outcome.state for result in found.results] == ["passed", "failed", "left out"]
    assert "takes about 1000 s" in found.results[2].outcome.reason
    assert "left out for want of time, not checked: dies" in str(found)
    with pytest.raises(TensorOptError, match=r"no check fits into 0\.05 minutes.*--minutes 0\.1"):
        run_selftest("cpu", minutes=0.05)


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
    checks: list[Check], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_a_report_has_nothing_private(
    checks: list[Check], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("USER", "margarete")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "margarete's files"))
    report = run_selftest("cpu", out=tmp_path / "report")
    for text in (
        str(report),
        json.dumps(report.to_dict()),
        *(p.read_text() for p in tmp_path.glob("report.*")),
    ):
        assert "weights.bin" in text
        assert "margarete" not in text
        assert str(tmp_path) not in text
        assert os.uname().nodename not in text


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("name", sorted(CHECKS))
def test_a_real_check_on_this_machine(name: str) -> None:
    found = timed_check(CHECKS[name], "cpu", 900.0)
    assert found.outcome.state in ("passed", "skipped"), found
