"""The command line: every verb, and every kind of input that cannot be used."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from tensoropt import __version__
from tensoropt.cli.arguments import _nothing_fits
from tensoropt.cli.parser import main, parser
from tests.lent_ranks import lend_ranks
from tests.plan.explorations import rows_of

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.a, self.b = nn.Linear(16, width), nn.Linear(width, 8)

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.b(torch.relu(self.a(x))), y)

class Branching(Net):
    def forward(self, x, y):
        if x.sum() > 0:
            return self.a(x).sum()
        return super().forward(x, y)

def called(model):
    return model, (torch.randn(8, 16), torch.randint(0, 8, (8,)))

def net():
    return called(Net(32))

def wider():
    return called(Net(64))

def branching():
    return called(Branching(32))

def nothing():
    return None

def broken():
    raise ValueError("out of ideas")
"""
TALKING = """
import atexit, ctypes, os, subprocess, sys
import torch
from torch import nn

def talk(where):
    print("printed", where)
    sys.stdout.write(f"written {where}\\n")
    sys.__stdout__.write(f"to the first stdout {where}\\n")
    os.write(1, f"to the descriptor {where}\\n".encode())
    ctypes.CDLL(None).printf(b"by C\\n")
    subprocess.run(["echo", "by a process", where], check=True)

talk("at import")

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(16, 8)

    def forward(self, x):
        talk("in forward")
        return self.a(x).mean()

def net():
    talk("in the function")
    return Net(), (torch.randn(8, 16),)

def quitting():
    atexit.register(talk, "at exit")
    return net()
"""
CLUSTER = "devices: [{kind: H100-80GB, count: 2}]\nlinks: {intra_node: NVLink4}\n"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a model and a cluster file, in which the command is run."""
    folder = tmp_path_factory.mktemp("work")
    (folder / "net.py").write_text(MODEL)
    (folder / "talking.py").write_text(TALKING)
    (folder / "two.yaml").write_text(CLUSTER)
    before = Path.cwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


@pytest.fixture(scope="module")
def explored(place):
    arguments = ["explore", "net.py:net", "--cluster", "two.yaml", "--out", "out", "--micro-batches", "1,2"]
    assert main(arguments) == 0
    return place / "out"


@pytest.fixture
def run(place, capsys):
    def call(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            code = main(arguments)
        except SystemExit as exit_:
            code = int(exit_.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def did(run):
    """What a command says that ends well: its answer, and what stands beside it."""

    def call(*arguments: str) -> tuple[str, str]:
        code, out, err = run(*arguments)
        assert code == 0, out + err
        return out, err

    return call


@pytest.fixture
def json_of(did):
    return lambda *arguments: json.loads(did(*arguments, "--json")[0])


def snapshot(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def refused(answer: tuple[int, str, str], words: str) -> None:
    """The input cannot be used, and one sentence says why."""
    code, _, err = answer
    assert code == 2
    assert words in err


def strict(text: str) -> Any:
    """JSON as the standard has it: nothing around it, no NaN, no Infinity."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


# -- verbs ----------------------------------------------------------------------------------------


def test_help_version_and_lists_are_quick_and_light():
    for words in (["--help"], ["--version"], ["list", "planners"], ["list", "clusters"]):
        code = (
            "import sys, time\n"
            "from tensoropt.cli.parser import main\n"
            f"try: main({words})\n"
            "except SystemExit: pass\n"
            "assert time.process_time() < 0.5, time.process_time()\n"  # of the processor, whatever else runs
            "assert not {'torch', 'numpy', 'numba'} & set(sys.modules)"
        )
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr


def test_python_m_is_the_same_command():
    command = [sys.executable, "-m", "tensoropt", "--version"]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert run.stdout == f"tensoropt {__version__}\n"


def test_explore_leaves_a_frontier_and_prints_it(did, explored):
    out, err = did(*NET, "--cluster", "two.yaml", "--out", "again", "--epsilon", "0")
    assert "needs/" in out
    assert "of the FLOPs can be split in two or more ways" in out
    assert "exploring with model net.py:net" in err
    assert "optimizer adam" in err
    assert "\r" not in err
    exact = {row["exact"] for row in rows_of("again/frontier.csv") if row["planner"] == "frontier"}
    assert exact == {"true"}


def test_explore_answers_machines(json_of, explored):
    arguments = (*NET, "--cluster", "two.yaml", "--out", "json", "--micro-batches", "1,2")
    data = json_of(*arguments)
    assert data["points"][0]["memory_bytes"] < data["points"][-1]["memory_bytes"]
    assert data["model"]["source"] == "net.py:net"
    # The same command twice gives the same plans.
    assert (explored / "frontier.csv").read_bytes() == Path("json/frontier.csv").read_bytes()


def test_choose_by_memory_time_and_knee(json_of, did, run, explored):
    count = json.loads((explored / "exploration.json").read_text())["points"]
    chosen = json_of("choose", "out")
    assert chosen["point"] == chosen["answer"]["point"]
    assert chosen["answer"]["rule"].startswith("the ")
    assert "\ntaken as the " in run("choose", "out", "--memory", "4GiB")[1]
    fastest = ("choose", "out", "--memory", "4GiB", "--fastest")
    fast = json_of(*fastest, "--out", "fast.json")
    assert (fast["point"], fast["plan"]) == (count, json.loads(Path("fast.json").read_text()))
    lean = json_of("choose", "out", "--time", "10s")
    assert (lean["point"], lean["out"]) == (1, None)
    assert "per device" in did("choose", "out", "--knee")[0]
    assert json_of("choose", "out", "--point", "1")["point"] == 1
    refused(run("choose", "out", "--point", "1", "--headroom", "5%"), "give only the point")


def test_baselines_are_plans_that_run(json_of, explored):
    told = json_of("choose", "out", "--knee")["answer"]["baselines"]
    number = next(base["point"] for base in told if base["title"] == "DDP")
    ddp = json_of("choose", "out", "--point", str(number), "--out", "ddp.json")
    assert ddp["name"].startswith("DP 2")
    assert json_of("verify", "ddp.json")["ok"]


def test_profiling_mode_explores_parts_of_the_cluster(json_of, run, explored):
    arguments = (*NET, "--cluster", "two.yaml", "--micro-batches", "1")
    told = json_of(*arguments, "--devices", "auto", "--out", "sizes")
    assert len(told["clusters"]) == 2
    assert {len(row["within_s"]) for row in told["clusters"]} == {len(told["budgets_bytes"])}
    assert '"devices": 1' in run("choose", "sizes", "--memory", "4GiB", "--devices", "auto", "--json")[1]
    assert '"devices": 2' in run("choose", "sizes", "--memory", "4GiB", "--devices", "2", "--json")[1]
    refused(run("choose", "sizes", "--memory", "4GiB"), "holds 2 explorations; select one: --devices")
    refused(run(*arguments, "--devices", "3", "--out", "x"), "do not fill whole levels")
    refused(run(*arguments, "--devices", "all", "--out", "x"), "neither auto nor a list")


@pytest.mark.slow
def test_batches_are_compared_by_sample(json_of, did, run, place):
    line = "explore zoo:lenet --cluster dgx-h100[1] --micro-batches 1 --epsilon 0.1"
    arguments = line.split()
    out, err = did(*arguments, "--batch", "2,4", "--placements", "never", "--out", "batches")
    assert err.count(", out a folder of batches\n") == 2
    assert "Largest batch explored: 4" in out
    chosen = json_of("choose", "batches", "--batch", "2", "--knee")
    assert chosen["plan"]["model"]["batch"] == 2
    refused(run("choose", "batches", "--batch", "3", "--knee"), "give auto or one of 2, 4")
    refused(run("choose", "batches", "--batch", "two", "--knee"), "give auto or one of 2, 4")
    refused(run("choose", "batches", "--batch", "2", "--point", "1"), "instead of --batch")
    both = ("--batch", "2", "--devices", "1", "--knee")
    refused(run("choose", "batches", *both), "both select an exploration")
    for more in (("--devices", "1"), ("--also-on", "dgx-a100")):
        told = run(*arguments, "--batch", "auto", *more, "--out", "x")
        refused(told, f"{more[0]} and --batch auto ask for different")
    compared = (*arguments[:6], "--planners", "all", "--out", "x")
    refused(run(*compared, "--batch", "2,4"), "--planners and --batch 2,4 ask for different kinds of tables")
    refused(run(*NET, "--cluster", "cpu:1", "--batch", "auto", "--out", "x"), "with a parameter 'batch'")
    assert not Path("x").exists()


def test_what_runs_today_stands_beside_the_frontier(json_of, did, run, place):
    Path("ds.json").write_text('{"train_batch_size": 4, "zero_optimization": {"stage": 2}, "prefetch": 3}')
    arguments = ("explore", "zoo:mlp", "--cluster", "dgx-h100[2]", "--micro-batches", "1", "--out", "today")
    out, err = did(*arguments, "--beside", "deepspeed:ds.json")
    assert "batch 4, as in the job: --batch can change it" in err
    for words in ("You are here (deepspeed): DP 2", "<- you are here (deepspeed)", "prefetch = 3"):
        assert words in out
    data = json_of(*arguments, "--beside", "deepspeed:ds.json")
    (job,), answer = data["jobs"], data["answer"]
    assert job["notes"]
    assert job["memory_bytes"] > 0
    assert answer["point"] is not None
    assert "\nyour job (deepspeed)" in did("choose", "today", "--point", str(job["point"]))[0]
    told = ("export", "today", "--point", str(job["point"]), "--as")
    out, err = did(*told, "deepspeed")
    assert json.loads(out)["zero_optimization"]["stage"] == 2
    assert "as the point" in err
    assert json_of(*told, "accelerate", "--to", "fsdp.yaml")["is_the_point"]
    assert "fsdp_reshard_after_forward: false" in Path("fsdp.yaml").read_text()
    # Without blocks FSDP gathers all parameters once, as ZeRO-2 does.
    assert "[parallelism]" in run(*told, "torchtitan")[1]
    refused(run("export", "today", "--as", "deepspeed"), "give one DIR, and --point N")
    refused(run("export", "today", "--as", "nobody"), "torchtitan, megatron, deepspeed, accelerate")
    refused(run(*told, "deepspeed", "--csv", "f.csv"), "give one of them")
    refused(run(*told, "deepsped"), "give one of torchtitan, megatron, deepspeed, accelerate")
    refused(run("export", "today", "--csv", "f.csv", "--to", "x"), "--to is for --as")
    refused(run(*arguments, "--beside", "deepspeed:no.json"), "cannot read the file")
    refused(run(*arguments, "--beside", "megatron:--tensor-model-parallel-size 4"), "is not 2 devices")
    both = ("--beside", "deepspeed:ds.json", "--batch", "2,4")
    refused(run(*arguments, *both), "--batch 2,4 and --beside ask for different kinds of tables")


def test_where_nothing_fits_the_plan_that_needs_least_is_named():
    points = [Mock(time_s=1.0), Mock(time_s=2.0)]
    found = Mock(needs=np.array([2.0, 1.0]), all_points=points, names=["DP 8", "TP 8"])
    said = str(_nothing_fits(found, "no plan fits", "out"))
    assert "(TP 8, 2 s a step); the points are in out: tensoropt choose out --point 2," in said


def test_what_does_not_fit_is_kept_and_said(did, run, place):
    arguments = ("explore", "zoo:mlp", "--cluster", "dgx-h100[2]", "--micro-batches", "1", "--out", "tight")
    answer = run(*arguments, "--memory", "1KiB")
    refused(answer, "no plan fits 1 KiB; the smallest plan needs")
    assert "a step); the points are in tight: tensoropt choose tight --point 1" in answer[2]
    did("choose", "tight", "--point", "1")
    # Kept, so that another budget needs no search.
    assert "--anew explores again" in run(*arguments, "--memory", "8GiB")[1]


def test_export_writes_both_files(did, explored):
    assert "f.csv" in did("export", "out", "--csv", "f.csv", "--strategies", "s.csv")[0]
    assert Path("f.csv").read_bytes() == (explored / "frontier.csv").read_bytes()
    assert Path("s.csv").read_text().startswith("point,operator,axis_0")


@pytest.mark.parametrize(
    ("what", "name"), [("models", "zoo:gpt2-demo"), ("clusters", "dgx-v100"), ("planners", "frontier")]
)
def test_lists(json_of, did, what, name):
    assert name in did("list", what)[0]
    assert name in [entry["name"] for entry in json_of("list", what)[what]]


@pytest.fixture
def lent_ranks(ranks, monkeypatch):
    """The same ranks for every command; others of this module start theirs."""
    lend_ranks(monkeypatch, ranks)


@pytest.mark.slow
@pytest.mark.distributed
def test_verify_a_plan(json_of, did, explored, lent_ranks):
    did("choose", "out", "--knee", "--out", "knee.json")
    data = json_of("verify", "knee.json", "--ranks")
    assert data["ok"] is True
    assert data["checked_on"] == "run on 2 CPU ranks of this machine"
    fixed = {
        "loss_difference", "gradient_difference", "collectives_predicted", "collectives_issued",
        "memory_predicted_bytes", "memory_tracked_bytes", "time_predicted_s", "time_measured_s",
    }  # fmt: skip
    assert fixed <= set(data["plans"][0])
    assert data["plans"][0]["collectives_predicted"] == data["plans"][0]["collectives_issued"]
    assert data["plans"][0]["collectives_in_order"] is True


def test_verify_without_the_devices(did, explored):
    did("choose", "out", "--knee", "--out", "knee.json")
    out, _ = did("verify", "knee.json")
    assert "2 GPUs of two are not here, so this was checked on fake ranks" in out
    assert "fake ranks checked: 0, 1" in out
    assert "in order" in out


@pytest.mark.slow
@pytest.mark.distributed
def test_verify_random_strategies(did, lent_ranks):
    out, err = did("verify", "net.py:net", "--random", "2", "--seed", "5")
    assert "on cluster cpu:2 (the default" in err
    assert "2 of 2 plans ok" in out


# -- constraints ----------------------------------------------------------------------------------

CONSTRAINTS = """
pin:
  - {operators: a, axes: {"*": out_features}}
  - {parameters: b.weight, axes: {gpu: sharded}}
  - {operators: b, axes: {gpu: heads}, soft: true}
together: [[a, b]]
devices: [{operators: "*", kinds: ["A100*", H100-80GB]}]
"""


def test_constraints_hold_from_the_file_to_every_point(did, place):
    (place / "all.yaml").write_text(CONSTRAINTS)
    arguments = ["net.py:net", "--cluster", "two.yaml", "--micro-batches", "1", "--constraints", "all.yaml"]
    out, err = did("explore", *arguments, "--out", "held")
    assert "given up, as it is soft: pin 3 (b: gpu=heads)" in out
    assert "constraints all.yaml" in err
    did("export", "held", "--csv", "f.csv", "--strategies", "s.csv")
    split = {row["axis_0"] for row in rows_of("s.csv") if row["operator"] in ("linear", "linear_1")}
    assert split == {"out_features"}
    did("choose", "held", "--knee", "--out", "held.json")
    plan = json.loads((place / "held.json").read_text())
    assert plan["settings"]["constraints"]["together"] == [["a", "b"]]


@pytest.mark.slow
def test_planners_compared_under_constraints_keep_them(did, place):
    (place / "rows.yaml").write_text('pin: [{operators: a, axes: {"*": none}}]')
    did(
        "explore", "net.py:net", "--cluster", "two.yaml", "--micro-batches", "1", "--constraints",
        "rows.yaml", "--planners", "optcnn,data_parallel,flexflow", "--out", "kept", "--json",
    )  # fmt: skip
    did("export", "kept", "--csv", "f.csv", "--strategies", "s.csv")
    assert {r["axis_0"] for r in rows_of("s.csv") if r["operator"] == "linear"} == {"none"}


@pytest.mark.parametrize(("text", "says"), [
    (None, "does not exist"),
    ("pin: [{operators: aa, axes: {gpu: none}}]", "did you mean 'a'"),
    ("pin: [{operators: a, axes: {gpu: out_feature}}]", "out_features"),
    ("pin: [{operators: a, axes: {gpu: none}}, {operators: linear, axes: {gpu: d0}}]", "contradicts pin 1"),
    ("pipeline: 2", "pipeline is a mapping"),
    ("pipeline: {stages: 2, stage: 2}", "did you mean 'stages'"),
])  # fmt: skip
def test_constraints_that_cannot_be_used(run, place, text, says):
    file = place / "constraints.yaml"
    file.unlink(missing_ok=True)
    if text is not None:
        file.write_text(text)
    answer = run(*NET, *EXPLORE, "--constraints", "constraints.yaml")
    refused(answer, says)
    assert "Traceback" not in answer[2]


def test_pipelines_are_explored_chosen_and_verified(json_of, did, place):
    (place / "pipeline.yaml").write_text("pipeline: {stages: 2, schedule: gpipe, cuts: [b]}")
    arguments = ("net.py:net", "--cluster", "two.yaml", "--micro-batches", "2")
    _, err = did("explore", *arguments, "--pipelines", "always", "--out", "both")
    assert "pipelines always" in err
    did("explore", *arguments, "--constraints", "pipeline.yaml", "--out", "piped")
    did("export", "piped", "--csv", "f.csv", "--strategies", "s.csv")
    told = {tuple(row[name] for name in ("mesh", "stages", "schedule", "cuts")) for row in rows_of("f.csv")}
    assert told == {("pp2", "2", "gpipe", "linear_1")}
    places = [[row["operator"] for row in rows_of("s.csv") if row["axis_0"] == place] for place in "01"]
    assert places == [["stage 0", "linear"], ["stage 1", "linear_1", "cross_entropy_loss"]]
    did("choose", "piped", "--knee", "--out", "piped.json")
    assert json.loads((place / "piped.json").read_text())["stages"]["schedule"]
    (plan,) = json_of("verify", "piped.json", "--fake")["plans"]
    assert plan["collectives_predicted"] == plan["collectives_issued"]


def test_random_pipelines_are_verified(did):
    arguments = ("--random", "2", "--cluster", "two.yaml", "--fake", "--pipeline", "2")
    out, err = did("verify", "net.py:net", *arguments)
    assert "verifying 2 random pipelines of net.py:net" in err
    assert "2 of 2 plans ok" in out


# -- bad input ------------------------------------------------------------------------------------

NET = ("explore", "net.py:net")
EXPLORE = ("--cluster", "two.yaml", "--out", "bad")
CHOOSE, RANDOM = ("choose", "out"), ("verify", "net.py:net", "--random", "1")
PIPELINES = (*RANDOM, "--cluster", "two.yaml", "--pipeline")
BAD = {
    "no such file": (("explore", "none.py:net", *EXPLORE), "none.py"),
    "no such function": (("explore", "net.py:missing", *EXPLORE), "has no function 'missing'"),
    "no such module": (("explore", "no_such_module:net", *EXPLORE), "no_such_module"),
    "not a model": (("explore", "net.py:nothing", *EXPLORE), "must return (model, args)"),
    "raises": (("explore", "net.py:broken", *EXPLORE), "out of ideas"),
    "no source": (("explore", "gpt2", *EXPLORE), "is not a model source"),
    "export refuses": (("explore", "net.py:branching", *EXPLORE), "net.py:15 (if x.sum() > 0:)"),
    "onnx that is none": (("explore", "fake.onnx", *EXPLORE), "fake.onnx"),
    "unknown cluster": ((*NET, "--cluster", "dgx-v10", "--out", "bad"), "dgx-v100"),
    "budget nothing fits": ((*NET, *EXPLORE, "--memory", "1KiB"), "the smallest plan needs"),
    "micro-batches": ((*NET, *EXPLORE, "--micro-batches", "3"), "do not divide the batch of 8"),
    "micro-batch words": ((*NET, *EXPLORE, "--micro-batches", "some"), "neither auto nor"),
    "epsilon": ((*NET, *EXPLORE, "--epsilon", "2"), "epsilon 2"),
    "batch of a file": ((*NET, *EXPLORE, "--batch", "4"), "--batch"),
    "out is a file": ((*NET, "--cluster", "two.yaml", "--out", "net.py"), "cannot write into"),
    "choose too little": (("choose", "out", "--memory", "1KiB"), "the smallest plan needs"),
    "headroom beyond a device": ((*NET, *EXPLORE, "--headroom", "120%"), "keep less free"),
    "headroom of no kind": (("choose", "out", "--memory", "4GiB", "--headroom", "x%"), "write 5% or 2GiB"),
    "nothing under headroom": ((*CHOOSE, "--memory", "4GiB", "--headroom", "99.9999999%"), "smallest plan"),
    "choose too fast": (("choose", "out", "--time", "1ns"), "the fastest takes"),
    "choose nothing there": (("choose", "nowhere", "--knee"), "holds no exploration"),
    "plan into nowhere": (("choose", "out", "--knee", "--out", "net.py/plan.json"), "cannot write"),
    "csv into nowhere": (("export", "out", "--csv", "net.py/f.csv"), "cannot write"),
    "plan that is none": (("verify", "two.yaml"), "not a plan"),
    "no plan": (("verify", "none.json"), "cannot read the plan"),
    "model without --random": (("verify", "net.py:net"), "--random"),
    "no random": (("verify", "net.py:net", "--random", "0", "--cluster", "local:2"), "at least 1"),
    "too many ranks": ((*RANDOM, "--cluster", "dgx-a100x64", "--ranks"), "512 are too"),
    "pipelines of no degree": ((*PIPELINES, "3"), "2 devices cannot be divided into 3 equal parts"),
    "pipelines of one place": ((*PIPELINES, "1"), "a divisor of the number of devices that is at least 2"),
    "pipelines that are placed": ((*RANDOM, "--placed", "--pipeline", "2"), "two kinds of plans"),
    "pipelines of a plan": (("verify", "two.yaml", "--pipeline", "2"), "belong to --random N"),
    "links of GPUs elsewhere": (("measure", "links", "--cluster", "dgx-a100"), "local:N"),
    "links of nothing": (("measure", "links"), "needs --cluster"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gets_one_sentence(run, explored, place, case):
    (place / "fake.onnx").write_bytes(b"this is no model")
    before = snapshot(explored)
    arguments, named = BAD[case]
    code, out, err = run(*arguments)
    last = err.strip().splitlines()[-1]
    assert code == 2
    assert out == ""
    assert last.startswith("tensoropt: error: ")
    assert named in last
    assert "itself failed" not in last
    assert "Traceback" not in err
    assert snapshot(explored) == before


@pytest.mark.parametrize("arguments", [
    (), ("fly",), ("explore",), ("list", "cats"),
    ("choose", "out", "--knee", "--time", "1"),
    (*NET, *EXPLORE, "--optimizer", "lion"), (*NET, *EXPLORE, "--fast"),
    (*NET, *EXPLORE, "--pipelines", "some"),
    ("verify", "net.py:net", "--random", "1", "--pipeline", "two"),
])  # fmt: skip
def test_unknown_words_are_refused_by_the_parser(run, arguments):
    code, _, err = run(*arguments)
    assert code == 2
    assert err.startswith("tensoropt: error: ")
    assert err.count("\n") == 1  # and no page of usage
    assert any(remedy in err for remedy in ("choose from", "--help", "write for example", "; use "))


def _numbers() -> Iterator[tuple[str, str]]:
    (verbs,) = (a for a in parser()._actions if isinstance(a, argparse._SubParsersAction))
    for verb, options in verbs.choices.items():
        for option in options._actions:
            if option.type is not None:
                yield verb, option.option_strings[0]


@pytest.mark.parametrize(("verb", "option"), list(_numbers()))
def test_what_is_no_number_is_refused_in_one_line(run, verb, option):
    code, out, err = run(verb, option, "abc", "--json")
    assert code == 2
    says = f"{option}: 'abc' is not a "
    assert err.startswith(f"tensoropt: error: {says}")
    assert "; write for example 8" in err
    assert err.count("\n") == 1
    assert json.loads(out)["error"].startswith(says)


def test_errors_as_json_and_with_a_traceback(run):
    code, out, err = run("choose", "nowhere", "--knee", "--json")
    assert (code, "Traceback" in err) == (2, False)
    assert "holds no exploration" in json.loads(out)["error"]
    refused(run("choose", "nowhere", "--knee", "--debug"), "Traceback")


def test_a_plan_for_another_model(did, run, explored):
    did("choose", "out", "--knee", "--out", "other.json")
    plan = json.loads(Path("other.json").read_text())
    plan["model"]["source"] = "net.py:wider"
    Path("other.json").write_text(json.dumps(plan))
    refused(run("verify", "other.json"), "explore this model again")


def test_a_fault_of_ours_is_one_sentence_too(run, explored, monkeypatch):
    fault = Mock(side_effect=RuntimeError("a\nb"))
    monkeypatch.setattr("tensoropt.session.one_space.track_frontier", fault)
    said = "TensorOpt itself failed with RuntimeError: a b; please report it with what --debug prints\n"
    refused(run(*NET, "--cluster", "two.yaml", "--out", "out", "--anew"), f"tensoropt: error: {said}")


def test_profiles_are_shown_exported_and_imported(tmp_path, monkeypatch, capsys):
    from tensoropt.profiling.store import ProfileStore

    monkeypatch.setenv("TENSOROPT_CACHE", str(tmp_path / "one"))
    with ProfileStore() as store:
        records = {
            f"cpu/torch/2x1/train/{i}": {
                "forward_s": 1e-3 * i, "backward_s": 2e-3 * i, "ideal_s": [1e-4 * i, 2e-4 * i],
                "class": "norm", "device_type": "cpu",
            }
            for i in range(1, 11)
        }  # fmt: skip
        store.put_many(records | {"cpu/torch/2x1/train/hung": {"error": "it did not end within 60 s"}})
    assert main(["measure", "profiles", "--forget-failed"]) == 0
    assert "1 records of failed measurements" in capsys.readouterr().out
    assert main(["measure", "profiles", "--export", str(tmp_path / "records")]) == 0
    assert "norm forward: 0 % (0 %), from 10" in capsys.readouterr().out
    monkeypatch.setenv("TENSOROPT_CACHE", str(tmp_path / "two"))
    assert main(["measure", "profiles", "--import", str(tmp_path / "records")]) == 0
    assert "10 records added" in capsys.readouterr().out


def test_a_refused_exploration_leaves_no_empty_folder(run, place):
    code, _, _ = run("explore", "zoo:no-such-model", "--cluster", "local:2", "--out", "fresh")
    assert code == 2
    assert not (place / "fresh").exists()


# -- what a user's code prints --------------------------------------------------------------------

TALKED = ("explore", "talking.py:net", "--cluster", "two.yaml", "--out", "talked")


@pytest.fixture(scope="module")
def talked(place):
    assert main(TALKED) == 0
    assert main(["choose", "talked", "--knee", "--out", "talked.json"]) == 0
    return place / "talked"


@pytest.mark.distributed
@pytest.mark.parametrize(
    "arguments",
    [
        TALKED,
        ("verify", "talked.json"),
        pytest.param(("verify", "talked.json", "--ranks"), marks=pytest.mark.slow),
        ("verify", "talking.py:net", "--random", "1", "--cluster", "two.yaml", "--ranks"),
        ("verify", "talking.py:net", "--random", "1", "--cluster", "two.yaml", "--placed", "--fake"),
    ],
    ids=lambda arguments: "-".join(word for word in arguments if "." not in word),
)
def test_what_a_model_prints_is_no_part_of_the_answer(talked, capfd, arguments, ranks, monkeypatch):
    if "--random" in arguments:  # as the command starts them it has its own with a plan
        lend_ranks(monkeypatch, ranks)
    capfd.readouterr()
    assert main([*arguments, "--json"]) == 0
    out, err = capfd.readouterr()
    assert strict(out)
    assert out.startswith("{")
    if arguments[0] == "explore":
        for where in ("at import", "in the function", "in forward"):
            for said in ("printed", "written", "to the first stdout", "to the descriptor", "by a process"):
                assert f"{said} {where}\n" in err
        assert "by C\n" in err


@pytest.mark.slow
def test_a_program_keeps_its_stdout_to_the_end(talked):
    """Exit handlers print when the command line has returned, and C's buffer is written then."""
    command = [sys.executable, "-m", "tensoropt", "explore", "talking.py:quitting", *TALKED[2:], "--json"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert strict(run.stdout)["points"]
    assert "printed at exit" in run.stderr


def test_errors_of_a_model_that_prints_are_json_too(talked, capfd):
    capfd.readouterr()
    assert main(["verify", "talking.py:absent", "--random", "1", "--cluster", "two.yaml", "--json"]) == 2
    assert "has no function 'absent'" in strict(capfd.readouterr().out)["error"]


def test_a_reader_that_has_seen_enough_is_no_error(explored):
    command = f"{sys.executable} -m tensoropt list planners | true; exit ${{PIPESTATUS[0]}}"
    run = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")


def test_in_python_stdout_is_left_alone(talked, capfd):
    import tensoropt
    from tensoropt.question.model_source import load_model

    capfd.readouterr()
    loaded = load_model("talking.py:net", device="meta")
    tensoropt.explore(loaded.model, loaded.args, cluster="two.yaml")
    out = capfd.readouterr().out
    assert "printed in the function\n" in out
    assert "printed in forward\n" in out


def test_another_question_about_a_zoo_model_needs_no_capture(did, place, monkeypatch):
    monkeypatch.setenv("TENSOROPT_CACHE", str(place / "graphs"))
    alone = ("--placements", "never", "--pipelines", "never", "--micro-batches", "1")
    asked = ("explore", "zoo:mlp", "--cluster", "dgx-h100[2]", "--out", "asked", *alone)
    _, first = did(*asked)
    assert "capture" in first
    with monkeypatch.context() as patch:
        patch.setattr("tensoropt.question.question.load_model", None)
        _, other = did(*asked, "--epsilon", "0.0005")
        assert "using an operator graph kept" in other
    _, anew = did(*asked, "--epsilon", "0.0002", "--anew")
    assert "operator graph kept" not in anew
