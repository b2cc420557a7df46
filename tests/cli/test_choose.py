"""``choose``: why a point costs what it costs, what running it showed, what a training takes, and what it
refuses."""

from __future__ import annotations

import functools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tensoropt import Exploration, load_cluster, saved
from tensoropt.cli.parser import main
from tensoropt.exploration.verified import _SCHEMA, FILE
from tensoropt.plan.keys import plan_key
from tests.exploration.test_rates import explored

SHIPPED = str(Path(__file__).parents[2] / "app" / "data" / "gpt2-dgx-h100")


@pytest.fixture(scope="module", autouse=True)
def opened_once():
    """The exploration is read once for all tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saved, "load_exploration", functools.cache(saved.load_exploration))
        yield


def chosen(capsys: Any, *options: str) -> str:
    assert main(["choose", SHIPPED, "--point", "1", *options]) == 0
    return str(capsys.readouterr().out)


def test_why_a_point_costs_what_it_costs(capsys):
    out = chosen(capsys, "--why")
    assert re.search(r"A step of [\d.]+ ms is \d+ % compute", out)
    assert "parts of the step" in out
    assert re.search(r"memory at [\d.]+ ms: 1\.46 GiB", out)
    assert re.search(r"this plan with +the step +change\n.+−?-\d+ %", out)


def test_the_same_as_data(capsys):
    why = json.loads(chosen(capsys, "--why", "--json"))["why"]
    assert sum(row["bytes"] for row in why["owners"]["rows"]) == why["owners"]["total_bytes"]
    assert sum(part["seconds"] for part in why["parts"]) == pytest.approx(why["step"]["total_s"])
    assert all(one["time_s"] < why["step"]["total_s"] for one in why["faster"])


def test_a_trace_is_written(capsys, tmp_path):
    assert "ui.perfetto.dev" in chosen(capsys, "--trace", str(tmp_path / "step.json"))
    assert json.loads((tmp_path / "step.json").read_text())["traceEvents"]


def test_what_running_a_plan_showed_stands_beside_what_was_predicted(capsys, tmp_path):
    plan = saved.load_exploration(Path(SHIPPED)).plan(2)
    one = {
        "key": plan_key(plan), "mesh": "8", "micro_batches": plan.micro_batches,
        "memory_predicted_bytes": 2.0**30, "time_predicted_s": 0.4,
        "memory_tracked_bytes": 2.0**30, "time_measured_s": 0.35,
        "loss_difference": 0.0, "gradient_difference": 0.0, "ok": True, "checked_on": "8 H100-80GB",
        "error": "",
    }  # fmt: skip
    folder = tmp_path / "own"
    shutil.copytree(SHIPPED, folder)
    (folder / FILE).write_text(json.dumps({"schema": _SCHEMA, "plans": [one]}))
    assert main(["choose", str(folder), "--point", "3"]) == 0
    out = capsys.readouterr().out
    assert "measured: 1 GiB tracked (1 GiB predicted, ±0 %); 350 ms measured (400 ms predicted" in out
    assert main(["choose", str(folder), "--point", "3", "--json"]) == 0
    (ran,) = json.loads(capsys.readouterr().out)["verified"]
    assert ran["time_measured_s"] == 0.35
    assert main(["choose", str(folder), "--point", "2"]) == 0
    assert "measured:" not in capsys.readouterr().out
    (folder / FILE).write_text("{")
    assert main(["choose", str(folder), "--point", "3"]) == 2
    assert "verify again" in capsys.readouterr().err


@pytest.fixture(scope="module")
def priced(tmp_path_factory):
    """One point of 0.5 s on two H100 that reads 8 samples of 128 tokens, at a tenth of their peak."""
    folder = tmp_path_factory.mktemp("amounts") / "one"
    found: Exploration = explored(flops={"float32": 0.1 * 2 * 66.9e12 * 0.5})
    assert found.cluster == load_cluster("dgx-h100[2]").to_dict()
    found.save(folder)
    return folder


def test_a_training_of_tokens_in_words_and_as_data(priced, capsys):
    asked = "--knee --tokens 7.3728M --price H100-80GB=3"
    words = ["choose", str(priced), *asked.split()]
    assert main(words) == 0
    told = capsys.readouterr().out
    assert "throughput: 2,050 tokens/s (1,020 per device), 16.0 samples/s (8.00 per device)" in told
    assert "MFU: 10 %" in told
    assert "7,372,800 tokens: 1.00 h, 2.00 device-hours; costs 6.00" in told
    assert main([*words, "--json"]) == 0
    data: dict[str, Any] = json.loads(capsys.readouterr().out)["rates"]
    assert (data["steps"], data["hours"], data["device_hours"], data["cost"]) == (7200, 1.0, 2.0, 6.0)
    assert (data["samples_per_step"], data["tokens_per_step"]) == (8, 1024)


def test_without_a_price_money_is_unknown_and_says_why(priced, capsys):
    assert main(["choose", str(priced), "--knee"]) == 0
    told = capsys.readouterr().out
    assert "1,000 steps: 8.33 min, 0.278 device-hours; money unknown: no price of a device-hour" in told


@pytest.mark.parametrize(("more", "why"), [
    (["--tokens", "many"], "--tokens 'many' is not a count"),
    (["--tokens", "0"], "give more than 0"),
    (["--price", "free"], "'free' is not a price"),
    (["--price", "1", "--price", "2"], "two prices for all devices"),
    (["--price", "A100-80GB=2"], "price given for A100-80GB, which is no device"),
])  # fmt: skip
def test_nonsense_ends_with_code_2_and_the_rule(priced, capsys, more, why):
    assert main(["choose", str(priced), "--knee", *more]) == 2
    told = capsys.readouterr()
    assert why in told.err
    assert "Traceback" not in told.err
