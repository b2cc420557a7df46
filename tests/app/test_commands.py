"""Commands that pages print are run as they are, by a shell's rules, from the folder that the page names."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from onnx_app import model_file
from samples_app import of_model
from tensoropt_app.jobs.request import form_of, request_from
from tensoropt_app.jobs.uploads import Uploads
from tensoropt_app.library import Entry
from tensoropt_app.views.export import commands
from tensoropt_app.views.frontier import FrontierData

from tensoropt.cli.parser import main
from tensoropt.cluster import load_cluster
from tensoropt.exploration.exploration import load_exploration
from tensoropt.report.commands import Command, explore_line, question_of

CLUSTER = "devices: [{kind: RTX-4090, count: 2}]\nlinks: {intra_node: {latency: 5us, bandwidth: 10GB/s}}\n"
PINS = {"devices": [{"operators": "*", "kinds": ["RTX*"]}]}


@pytest.fixture
def explored(tmp_path, monkeypatch):
    """What a job left of an uploaded model on an uploaded cluster, with constraints; the files that it was
    started with are gone, as the page never showed where they were."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TENSOROPT_CACHE", str(tmp_path / "cache"))
    file = Uploads(tmp_path / "my uploads").folder / "upload-0123456789abcdef.onnx"
    model_file(file)
    (tmp_path / "edited.yaml").write_text(CLUSTER)
    (tmp_path / "pins.json").write_text(json.dumps(PINS))
    job = tmp_path / "my jobs" / "a1"
    words = [
        "explore", str(file), "--cluster", "edited.yaml", "--dim", "batch=8", "--constraints", "pins.json",
        "--measure", "never", "--micro-batches", "1,2", "--seed", "3", "--out", str(job),
    ]  # fmt: skip
    assert main(words) == 0
    (tmp_path / "edited.yaml").unlink()
    (tmp_path / "pins.json").unlink()
    return FrontierData.of(load_exploration(job)), Entry("job-a1", job, "job")


def run(lines: Sequence[Command], title: str) -> int:
    (line,) = [one.line for one in lines if one.title.startswith(title)]
    program, *words = shlex.split(line)
    assert program == "tensoropt"
    return main(words)


def test_what_was_explored_after_an_upload_is_explored_again_and_chosen(explored, tmp_path, monkeypatch):
    data, entry = explored
    row = len(data.exploration.points) - 1
    lines = commands(data, entry, row)
    elsewhere = tmp_path / "else where"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert run(lines, "Explore again") == 0
    again = load_exploration(elsewhere / "out" / "job-a1")
    assert (again.cluster, again.settings) == (data.exploration.cluster, data.exploration.settings)
    assert again.model == data.exploration.model
    assert [p.memory_bytes for p in again.points] == [p.memory_bytes for p in data.exploration.points]
    assert run(lines, "Make this plan") == 0
    plan = json.loads((elsewhere / "plan.json").read_text())
    assert plan["predicted"]["memory_bytes"] == data.exploration.points[row].memory_bytes
    assert plan["predicted"]["time_s"] == data.exploration.points[row].time_s


def test_the_form_is_filled_from_what_was_explored_and_asks_the_same(explored, tmp_path):
    """All but the constraints, which are named as left out."""
    data, _ = explored
    uploads = Uploads(tmp_path / "my uploads")
    (uploads.folder / "upload-0123456789abcdef.json").write_text('{"label": "net.onnx"}')
    asked = question_of(data.exploration)
    fields, left_out = form_of(asked, uploads)
    assert (fields["model"], fields["devices"], left_out) == ("net.onnx", "edited.json", ("--constraints",))
    again = request_from(fields, uploads).question
    assert load_cluster(again.cluster).fingerprint == load_cluster(asked.cluster).fingerprint
    same = {"cluster": "x", "settings": replace(asked.settings, constraints=None), "constraints_file": ""}
    assert again.model_copy(update={"cluster": "x"}) == asked.model_copy(update=same)


@pytest.mark.parametrize("there", [True, False])
def test_a_path_of_its_own_folder_is_made_whole(tmp_path, monkeypatch, explored, there):
    """A model that was named from the folder of then."""
    data, _ = explored
    found = of_model(data.exploration, source="nets.py:build")
    if there:
        (tmp_path / "nets.py").write_text("")
    line = shlex.split(explore_line(found, "out"))
    assert line[2] == (f"{tmp_path / 'nets.py'}:build" if there else "nets.py:build")


@pytest.mark.slow
def test_the_plan_is_run_and_checked_by_the_lines_that_say_so(explored, tmp_path):
    """All of them, one after the other, by a shell; the plan is for GPUs, and steps run on CPU ranks."""
    data, entry = explored
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    found = commands(data, entry, len(data.exploration.points) - 1)
    lines = [command for command in found if command.line.startswith(("tensoropt ", "torchrun "))]
    assert len(found) - len(lines) == 2  # those in Python
    for command in lines:
        done = subprocess.run(
            command.line + " --cpu" * ("tensoropt.execute" in command.line), shell=True, cwd=tmp_path,
            env=environment, capture_output=True, text=True, timeout=600,
        )  # fmt: skip
        assert done.returncode == 0, f"{command.line}\n{done.stdout}\n{done.stderr}"
    assert json.loads((entry.folder / "verified.json").read_text())
