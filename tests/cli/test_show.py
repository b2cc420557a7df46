"""``show``: whose the memory is, and what running a point showed."""

from __future__ import annotations

import functools
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tensoropt import saved
from tensoropt.cli.parser import main
from tensoropt.exploration.verified import FILE, SCHEMA

SHIPPED = str(Path(__file__).parents[2] / "app" / "data" / "gpt2-dgx-h100")


@pytest.fixture(scope="module", autouse=True)
def opened_once() -> Iterator[None]:
    """The exploration is read once for all tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saved, "load_exploration", functools.cache(saved.load_exploration))
        yield


def shown(capsys: Any, *options: str) -> str:
    assert main(["show", SHIPPED, "--point", "1", "--top", "2", *options]) == 0
    return str(capsys.readouterr().out)


def test_owners_at_the_peak_and_at_a_time(capsys):
    out = shown(capsys, "--owners")
    assert re.search(r"memory at [\d.]+ ms: 1\.46 GiB", out)
    assert "cross_entropy_loss" in out.rpartition("memory at")[2]
    at = re.search(r"memory at ([\d.]+) ms", shown(capsys, "--owners", "180ms"))
    assert at is not None
    assert 150 < float(at[1]) <= 180  # the last change until then


def test_all_points_are_listed(capsys):
    assert main(["show", SHIPPED, "--all"]) == 0
    lines = capsys.readouterr().out.splitlines()
    count = len(saved.load_exploration(Path(SHIPPED)).points)
    assert [line.split()[0] for line in lines] == ["point", *map(str, range(1, count + 1))]


def test_owners_add_up_in_json(capsys):
    owners = json.loads(shown(capsys, "--owners", "--json"))["owners"]
    assert sum(row["bytes"] for row in owners["rows"]) == owners["total_bytes"]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--owners", "9"], "the step has no moment at 9 s; its memory curve reaches from 0 to "),
        (["--owners", "soon"], "soon"),
    ],
)
def test_wrong_input_is_refused_with_the_remedy(capsys, options, why):
    assert main(["show", SHIPPED, "--point", "1", *options]) == 2
    err = capsys.readouterr().err
    assert why in err
    assert "Traceback" not in err


def test_what_running_a_plan_showed_stands_beside_what_was_predicted(capsys, tmp_path):
    found = saved.load_exploration(Path(SHIPPED))
    one = {
        "key": found.keys[2], "mesh": "8", "micro_batches": 1, "memory_predicted_bytes": 2.0**30,
        "time_predicted_s": 0.4, "memory_tracked_bytes": 2.0**30, "time_measured_s": 0.35,
        "loss_difference": 0.0, "gradient_difference": 0.0, "ok": True, "checked_on": "8 H100-80GB",
        "error": "", "cores_busy": None,
    }  # fmt: skip
    folder = tmp_path / "own"
    shutil.copytree(SHIPPED, folder)
    (folder / FILE).write_text(json.dumps({"schema": SCHEMA, "plans": [one]}))
    for verb in ("show", "choose"):
        assert main([verb, str(folder), "--point", "3"]) == 0
        out = capsys.readouterr().out
        assert "measured: 1 GiB tracked (1 GiB predicted, ±0 %); 350 ms measured (400 ms predicted" in out
        assert main([verb, str(folder), "--point", "3", "--json"]) == 0
        (ran,) = json.loads(capsys.readouterr().out)["verified"]
        assert ran["time_measured_s"] == 0.35
        assert main([verb, str(folder), "--point", "2"]) == 0
        assert "measured:" not in capsys.readouterr().out
    (folder / FILE).write_text("{")
    assert main(["choose", str(folder), "--point", "3"]) == 2
    assert "verify again" in capsys.readouterr().err
