"""The commands of the export page are the command line's, and say all that was chosen."""

from __future__ import annotations

import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from samples_app import exploration, of_model
from tensoropt_app.library import Entry
from tensoropt_app.views.export import commands, files
from tensoropt_app.views.frontier import FrontierData

from tensoropt import Exploration, load_cluster
from tensoropt.cli.parser import parser
from tensoropt.plan.plan import OnnxInfo
from tensoropt.report.commands import explore_line


def parsed(line: str) -> Any:
    """The options of a line as the command line reads them."""
    program, *words = shlex.split(line)
    assert program == "tensoropt"
    return parser().parse_args(words)


def with_settings(**settings: Any) -> Exploration:
    found = exploration()
    return replace(found, settings={**found.settings, **settings})


def test_the_line_of_constraints_needs_no_pytorch():
    code = (
        "import sys; sys.modules['torch'] = None; sys.path.insert(0, sys.argv[1])\n"
        "from dataclasses import replace\n"
        "from samples_app import exploration\n"
        "from tensoropt.report.commands import explore_line\n"
        "found = exploration()\n"
        "kept = {**found.settings, 'constraints': {'together': [['a']]}}\n"
        "assert '--constraints DIR/exploration.json' in explore_line(replace(found, settings=kept), 'x')\n"
    )
    support = str(Path(__file__).parents[1] / "support")
    run = subprocess.run([sys.executable, "-c", code, support], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_defaults_are_left_out_and_the_dtype_is_said():
    line = "tensoropt explore zoo:gpt2-tiny --cluster dgx-h100 --batch 8 --dtype float32 --out out/x"
    assert explore_line(of_model(with_settings(process_memory=True), batch=8), "out/x") == line
    # Of a flag that is on by default, what is said is that it was off.
    off = explore_line(of_model(with_settings(process_memory=False), batch=8), "out/x")
    assert off == line.replace(" --out", " --no-process-memory --out")
    assert parsed(off).process_memory is False


def test_how_a_file_was_opened_is_in_the_line():
    onnx = OnnxInfo(dims={"batch": 8, "x[0]": 4}, outputs=("y",), loss="mean")
    options = parsed(explore_line(of_model(exploration(), source="my model.onnx", onnx=onnx), "out/x"))
    assert options.model == "my model.onnx"
    assert (options.dim, options.output, options.loss) == (["batch=8", "x[0]=4"], ["y"], "mean")


def test_a_cluster_without_a_name_is_a_file_that_is_offered():
    edited = load_cluster("dgx-h100").to_dict() | {"name": "mine"}
    data = FrontierData.of(replace(exploration(), cluster=edited))
    assert parsed(explore_line(data.exploration, "out/x", "/a b")).cluster == "/a b/exploration.json"
    assert "cluster.json" in files(data)
    assert "cluster.json" not in files(FrontierData.of(exploration()))
    part = replace(exploration(), cluster=load_cluster("dgx-h100[2]").to_dict())
    assert parsed(explore_line(part, "out/x")).cluster == "dgx-h100[2]"


@pytest.mark.parametrize(
    ("origin", "again", "from_"),
    [("opened", "/data/a", "/data/a"), ("job", "out/a", "/data/a"), ("ready-made", "out/a", "out/a")],
)
def test_the_lines_follow_each_other(origin, again, from_):
    data = FrontierData.of(exploration())
    lines = [c.line for c in commands(data, Entry("a", Path("/data/a"), origin), 3)]
    assert parsed(lines[0]).out == again
    assert (parsed(lines[1]).dir, parsed(lines[1]).point) == (from_, 4)
    assert lines[2] == "torchrun --nproc-per-node 8 -m tensoropt.execute plan.json"
    assert [line.partition("(")[0] for line in lines[3:5]] == ["tensoropt.parallelize", "PlanTrainer"]
    assert lines[5].startswith("torchrun --nproc-per-node 8")
    assert lines[5].endswith(" --cpu")  # the plan is for GPUs
    assert parsed(lines[6]).save == from_
