"""What people read of a self-test, and what is kept from them."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tensoropt.selftest import machine as machine_module
from tensoropt.selftest import report as report_module
from tensoropt.selftest.machine import machine
from tensoropt.selftest.outcome import Bounded, CheckContext, Outcome
from tensoropt.selftest.report import CheckResult, SelftestReport, without_private
from tensoropt.selftest.timing import over, unless_busy


def outcome(value: float = 0.5) -> Outcome:
    return Outcome.of(
        [
            Bounded("error", value, 1.0),
            Bounded.share("off", 0.0125, 0.05),
            Bounded("peak", 2**20, unit="bytes"),
        ],
        "a note",
        remarks=[],
    )


def report(*outcomes: Outcome, about: dict[str, Any] | None = None) -> SelftestReport:
    results = tuple(CheckResult(f"check{i}", "all is well", one, 3.0) for i, one in enumerate(outcomes))
    return SelftestReport(about or machine("cpu"), results, 8.0, 12.0)


def test_an_outcome_is_decided_by_its_bounds() -> None:
    assert outcome().state == "passed"
    assert outcome(1.0).state == "passed"
    assert outcome(1.5).reason == "error: 1.5, at most 1"
    assert outcome(math.nan).state == "failed"
    with pytest.raises(AssertionError, match="cannot fail"):
        Outcome.of([Bounded("shown", 1.0)])


@pytest.mark.parametrize("value", [0.5, 2.0, math.nan])
def test_outcomes_survive_their_data(value: float) -> None:
    import json

    from tensoropt.console import json_text

    found = Outcome.from_dict(json.loads(json_text(outcome(value).to_dict())))
    assert found.state == outcome(value).state
    assert [figure.ok for figure in found.figures] == [figure.ok for figure in outcome(value).figures]


def test_a_failure_is_seen_at_first_glance() -> None:
    good, bad = report(outcome()), report(outcome(), outcome(2.0), Outcome.skipped("no GPU"))
    assert good.ok
    assert not bad.ok
    text = str(bad)
    assert "check1 FAILED 3 s error: 2, at most 1" in " ".join(text.split())
    assert "TOO MUCH" in text
    assert text.endswith("3 checks in 12 s: 1 passed, 1 failed, 1 skipped\nfailed: check1")
    assert "1 MiB" in text
    assert "off 1.25 % 5 %" in " ".join(text.split())


def test_nothing_that_passed_is_no_result() -> None:
    assert "says nothing about the machine" in str(report(Outcome.skipped("no GPU")))


def test_a_gpu_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(
        name="NVIDIA H100", major=9, minor=0, total_memory=80 * 2**30, multi_processor_count=132,
        L2_cache_size=50 * 2**20,
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(machine_module, "_nccl", lambda: "2.27.3")
    monkeypatch.setattr(machine_module, "_nvml", lambda: {"driver": "570.1", "clock_hz": 1_980_000_000})
    text = str(report(outcome(), about=machine("cuda")))
    assert "self-test on a GPU" in text
    assert "name NVIDIA H100" in text
    assert "memory 80 GiB" in text
    assert "driver 570.1, clock 1980 MHz" in text
    assert "tf32 matmul False" in text


def test_without_nvml_a_gpu_is_still_described() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert machine_module._nvml().keys() == {"nvml"}


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("cannot read /home/ann/models/net.pt: none", "cannot read …/net.pt: none"),
        ("[Errno 2] '~/work/x/y.bin'", "[Errno 2] '…/y.bin'"),
        ("on ann's box, by ann", "on …'s box, by …"),
        ("2/4 ranks, 3 GB/s, and/or, annex, loss 1/2/3", "2/4 ranks, 3 GB/s, and/or, annex, loss 1/2/3"),
        ("see https://pytorch.org/docs/stable", "see https://pytorch.org/docs/stable"),
    ],
)
def test_what_is_private_is_taken_out(monkeypatch: pytest.MonkeyPatch, text: str, clean: str) -> None:
    monkeypatch.setattr(report_module, "_names", lambda: ["ann"])
    assert without_private({"a": [text]}) == {"a": [clean]}


def test_ordinary_words_are_no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER", "root")
    assert "root" not in report_module._names()


def test_times_of_a_busy_machine_say_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    from tensoropt.selftest import timing

    cpu, gpu = (CheckContext(device, tmp_path) for device in ("cpu", "cuda"))
    assert over([3.0, 1.1, 2.0], [1.0, 5.0, 4.0]) == pytest.approx(0.1)
    assert timing.share_of_core() <= 1.01
    shares = {"quiet": [0.99, 0.98], "busy": [0.99, 0.4]}

    def state(load: str, context: CheckContext, value: float) -> Outcome:
        left = list(shares[load])
        monkeypatch.setattr(timing, "share_of_core", lambda: left.pop(0))
        return unless_busy(lambda given: outcome(value), context)

    assert state("busy", cpu, 0.5).state == "passed"
    assert state("quiet", cpu, 2.0).state == "failed"
    assert state("busy", gpu, 2.0).state == "failed"
    found = state("busy", cpu, 2.0)
    assert found.state == "skipped"
    assert "got 40% of one (error: 2, at most 1)" in found.reason
    assert found.figures
