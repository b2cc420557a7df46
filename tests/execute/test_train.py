"""``torchrun -m tensoropt.execute plan.json``: it runs, refuses in one line, and leaves nothing behind.

Steps of a script's own training are timed beside its plan, and the training is as it was.
"""

import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tensoropt
from tensoropt import Plan, PlanError, load_cluster, load_plan
from tensoropt.engine.models import ModelSpec, load_model
from tensoropt.execute.executable import resolve_plan
from tensoropt.execute.own_steps import STEPS, WARM_UP, read_steps, steps_file
from tensoropt.execute.train import OtherDevicesError, _beside_prediction, device_type, main
from tensoropt.profiling.store import ProfileStore
from tensoropt.ranks.local_hardware import why_no_gpu
from tensoropt.sharding.strategy import Strategy
from tensoropt.verify.random_strategies import micro_strategies, random_strategy
from tests.execute import models

ROOT = Path(__file__).parents[2]
SOURCE = "tests.execute.models:mlp"


def write_plan(path: Path, mesh: tuple[int, ...] = (2, 2), **changes: object) -> Path:
    graph = load_model(ModelSpec(SOURCE)).graph
    strategy = random_strategy(graph, mesh, micro_strategies(graph, mesh[0]), random.Random(0))
    return write_strategy(path, strategy, SOURCE, **changes)


def write_strategy(path: Path, strategy: Strategy, source: str, **changes: object) -> Path:
    """A plan's file with a strategy of a captured model, and without predictions."""
    mesh, graph, data = strategy.mesh, strategy.graph, strategy.to_data()
    names = [f"a{i}" for i in range(len(mesh) - 1)]
    plan = {
        "schema": "tensoropt.plan/4", "planner": "random", "cluster": {}, "optimizer": "adam",
        "model": {"source": source, "fingerprint": graph.atoms.graph.fingerprint},
        "mesh": {"shape": mesh[1:], "names": names},
        "micro_batches": mesh[0],
        "operators": {
            name: {"micro": labels[0], "axes": dict(zip(names, labels[1:], strict=True))}
            for name, labels in data["groups"].items()
        },
        "hubs": data["hubs"],
        "parameters": {name: {"key": name, "stored": stored} for name, stored in data["stored"].items()},
        "predicted": {
            "memory_bytes": 1, "time_s": 1, "compute_s": 1, "communication_s": 0, "additive_memory_bytes": 1
        },
    }  # fmt: skip
    Plan.model_validate(plan | changes).save(path)
    return path


def torchrun(*arguments: str, options: tuple[str, ...] = ("--standalone",)) -> subprocess.Popen[str]:
    """A job of two ranks, or of as many as the options say."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *options]
    return subprocess.Popen(
        [*command, *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


@pytest.mark.distributed
def test_runs_under_torchrun(tmp_path):
    plan, file = str(write_plan(tmp_path / "plan.json")), tmp_path / "result.json"
    process = torchrun("-m", "tensoropt.execute", plan, "--steps", "4", "--json", str(file))
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert "step    4  loss" in output
    result = json.loads(file.read_text())
    assert len(result["losses"]) == len(result["times_s"]) == 4
    assert result["losses"][-1] < result["losses"][0]
    assert result["time_s"] > 0


def test_what_a_model_prints_stays_off_stdout(tmp_path, monkeypatch, capfd):
    quiet = models.mlp

    def talking() -> object:
        print("printed")
        os.write(1, b"to the descriptor\n")
        return quiet()

    plan = write_plan(tmp_path / "plan.json", (1,))
    monkeypatch.setattr(models, "mlp", talking)
    assert main([str(plan), "--steps", "2"]) == 0
    out, err = capfd.readouterr()
    assert [line.split()[0] for line in out.splitlines()] == ["step", "step", "median"]
    assert "printed\nto the descriptor\n" in err


def test_a_loss_that_is_not_finite_is_null(tmp_path):
    """Diverged on purpose; JSON has no NaN."""
    plan, result = write_plan(tmp_path / "plan.json", (1,)), tmp_path / "result.json"
    assert main([str(plan), "--steps", "4", "--lr", "1e30", "--quiet", "--json", str(result)]) == 0
    losses = json.loads(result.read_text(), parse_constant=pytest.fail)["losses"]
    assert losses[0] > 0
    assert losses[-1] is None


def gpu_plan(path: Path, mesh: tuple[int, ...]) -> Path:
    return write_plan(path, mesh, cluster=load_cluster(f"dgx-h100[{math.prod(mesh[1:])}]").to_dict())


@pytest.mark.slow
@pytest.mark.distributed
def test_a_plan_for_gpus_that_are_not_here_is_refused_once(tmp_path):
    """Not by every rank: the others wait until torchrun ends them."""
    plan = str(gpu_plan(tmp_path / "plan.json", (1, 2)))
    output, _ = torchrun("-m", "tensoropt.execute", plan, "--steps", "2").communicate()
    (refusal,) = [line for line in output.splitlines() if line.startswith("error: ")]
    assert refusal == (
        f"error: the plan is for 2 x H100-80GB (cuda) of cluster dgx-h100[2], but {why_no_gpu()}, or add "
        "--cpu to run it on 2 CPU ranks (its predictions do not apply there), or explore "
        "with --cluster cpu:2"
    )
    assert "exitcode  : 2" in output
    assert "loss" not in output


def test_a_plan_for_gpus_runs_on_cpu_ranks_knowingly(tmp_path, capsys):
    plan, result = gpu_plan(tmp_path / "plan.json", (1,)), tmp_path / "result.json"
    assert main([str(plan), "--steps", "2"]) == 2
    assert capsys.readouterr().out == ""
    assert main([str(plan), "--steps", "2", "--cpu", "--json", str(result)]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.endswith("on 1 CPU ranks; the prediction of 1000.0 ms is for 1 x H100-80GB (cuda)")
    said = json.loads(result.read_text())
    assert (said["run_on"], said["predicted_for"]) == ("cpu", "cuda")


@pytest.mark.parametrize(("words", "changes", "says"), [
    (["--steps", "2.5"], {}, "--steps"),
    (["--lr", "fast"], {}, "--lr"),
    (["--fly"], {}, "--fly"),
    ([], {}, "the plan is for 2 devices, but this job has 1 rank; start it with"),
    # Refused before the number of ranks is: more ranks would not help.
    ([], {"source": SOURCE, "mode": "inference"}, "for inference, but this command trains; explore with"),
    ([], {"source": ""}, "does not name the model's source"),
    (["--steps", "0"], {}, "--steps 0 is below 1"),
])  # fmt: skip
def test_what_cannot_be_trained_is_refused_in_one_line(tmp_path, capsys, words, changes, says):
    model = {"model": {"fingerprint": "0"} | changes} if changes else {}
    assert main([str(write_plan(tmp_path / "plan.json", **model)), *words]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


def test_plan_of_another_model(tmp_path, capsys):
    model = {"source": "tests.execute.models:vgg", "fingerprint": "0"}
    assert main([str(write_plan(tmp_path / "plan.json", (1,), model=model))]) == 2
    assert "it is for another model" in capsys.readouterr().err


def test_one_device_needs_no_job(tmp_path, capsys):
    cores = os.sched_getaffinity(0)
    assert main([str(write_plan(tmp_path / "plan.json", (2, 1))), "--steps", "2"]) == 0
    assert os.sched_getaffinity(0) == cores
    assert "median" in capsys.readouterr().out
    assert main([str(tmp_path / "none.json")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_gpus_for_each_rank_of_the_host(tmp_path, monkeypatch):
    plan = load_plan(gpu_plan(tmp_path / "plan.json", (1, 2)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert device_type(plan, True) == "cpu"
    with pytest.raises(OtherDevicesError, match="PyTorch sees 1 of them for the 2 ranks of this host; check"):
        device_type(plan, False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert device_type(plan, False) == "cuda"


CPU_RANKS_BESIDE_GPUS = load_cluster(
    {"name": "beside", "devices": ["H100-80GB", "CPU-core"], "links": {"intra_node": "PCIe4"}}
)


def test_a_plan_for_cpu_ranks_beside_gpus_runs_on_one_type(tmp_path, monkeypatch):
    plan = load_plan(gpu_plan(tmp_path / "plan.json", (1, 2)))
    plan = plan.model_copy(update={"cluster": CPU_RANKS_BESIDE_GPUS.to_dict()})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(OtherDevicesError, match=r"1 x H100-80GB, 1 x CPU-core \(cuda and cpu\) .* one type"):
        device_type(plan, False)
    assert device_type(plan, True) == "cpu"
    # As it is with a script of one's own.
    with pytest.raises(PlanError, match=r"one type of device; .*, or pass device='cpu'"):
        resolve_plan(plan).warn_of_other_devices(torch.device("cuda"))
    with pytest.warns(UserWarning, match="here it runs on cpu"):
        resolve_plan(plan).warn_of_other_devices(torch.device("cpu"))


@pytest.mark.parametrize(("kind", "said"), [
    ("H100-80GB", ", predicted 1000.0 ms"),
    ("L40S", " on 2 x L40S; the prediction of 1000.0 ms is for 2 x H100-80GB (cuda)"),
    (None, " on 2 CPU ranks; the prediction of 1000.0 ms is for 2 x H100-80GB (cuda)"),
])  # fmt: skip
def test_a_prediction_is_for_its_own_devices(tmp_path, kind, said):
    assert _beside_prediction(load_plan(gpu_plan(tmp_path / "plan.json", (1, 2))), kind) == said


MODEL, BATCH = "zoo:mlp", 8
NEEDED = WARM_UP + STEPS + 1


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    with ProfileStore(folder / "p.sqlite") as store:
        found = tensoropt.explore(
            tensoropt.load_model(MODEL, batch=BATCH), cluster="cpu:1", measure="never", store=store
        )
    found.plan(0).save(folder / "plan.json")
    return folder / "plan.json"


def losses(plan, steps: int, *, tune: bool) -> list[float]:
    loaded = tensoropt.load_model(MODEL, batch=BATCH)
    model = tensoropt.parallelize(loaded.model, plan, tune=tune, as_measured=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found = []
    for _ in range(steps):
        loss = model(*loaded.args, **loaded.kwargs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.slow
def test_a_training_that_is_timed_is_the_same(plan):
    steps_file(plan).unlink(missing_ok=True)
    assert losses(plan, NEEDED + 2, tune=True) == losses(plan, NEEDED + 2, tune=False)
    (rank,) = read_steps(plan)
    assert len(rank["steps"]) == STEPS
    assert all(0 < end < 10 for _, end in rank["steps"])


def test_a_job_that_is_too_short_says_how_long_it_should_be(plan):
    steps_file(plan).unlink(missing_ok=True)
    losses(plan, NEEDED - 2, tune=True)
    with pytest.raises(PlanError, match=f"at least {NEEDED} steps"):
        read_steps(plan)


def test_damage_is_said(plan):
    for text in (
        "",
        json.dumps({"schema": "other"}),
        json.dumps({"schema": "tensoropt.steps/1", "ranks": [{}]}),
    ):
        steps_file(plan).write_text(text)
        with pytest.raises(PlanError, match="run the job again"):
            read_steps(plan)
    steps_file(plan).unlink()


def test_it_needs_the_plans_file(plan):
    loaded = tensoropt.load_model(MODEL, batch=BATCH)
    with pytest.raises(PlanError, match="pass its path"):
        tensoropt.parallelize(loaded.model, tensoropt.load_plan(plan), tune=True)
