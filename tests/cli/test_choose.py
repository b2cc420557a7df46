"""``choose``: why a point costs what it costs, and what running it showed."""

from __future__ import annotations

import functools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tensoropt import saved
from tensoropt.cli.parser import main
from tensoropt.exploration.verified import _SCHEMA, FILE
from tensoropt.plan.keys import plan_key

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
