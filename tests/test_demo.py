"""The demo from end to end on a small model; ``make demo`` runs it on GPT-2's."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from tensoropt.cli.parser import main


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.distributed
def test_the_whole_loop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["demo", "--model", "zoo:mlp", "--cluster", "local:2", "--steps", "2", "--out", str(tmp_path)]
    assert main([*arguments, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["ok"]
    assert set(data["runs"]) == {"unsplit", "leanest", "fastest"}
    losses = [run["torchrun"]["losses"] for run in data["runs"].values()]
    for steps in zip(*losses, strict=True):
        assert max(steps) == pytest.approx(min(steps), rel=1e-4)
    for run in data["runs"].values():
        assert run["memory_tracked_bytes"] == pytest.approx(run["memory_predicted_bytes"], rel=0.2)
    with open(tmp_path / "frontier.csv", newline="") as file:
        assert len(list(csv.DictReader(file))) == data["points"]
    for name in ("frontier.svg", "plan-chosen.json", "plan-leanest.json", "plan-fastest.json"):
        assert (tmp_path / name).is_file()
