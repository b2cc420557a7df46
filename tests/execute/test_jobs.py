"""Whole jobs under torchrun: scripts that end well, ranks that do not, several hosts. Real processes."""

import re
import signal
import socket
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tensoropt.execute.train import _lost_rank, _out_of_memory
from tests.execute.test_train import torchrun, write_plan

pytestmark = pytest.mark.distributed
LIMIT_S = 240
SCRIPT = """
import itertools, os, signal, sys, time
import torch, tensoropt
from torch.utils.data import DataLoader, TensorDataset
from tests.execute.models import mlp

torch.manual_seed(0)
model, (x, y), _ = mlp()
samples = TensorDataset(torch.randn(70, *x.shape[1:]), y[:1].expand(70, *y.shape[1:]).clone())
order = torch.Generator().manual_seed(3)
batches = DataLoader(samples, len(x), shuffle=True, drop_last=True, num_workers=1, generator=order)
tensoropt.parallelize(model, sys.argv[1])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
rank = int(os.environ["RANK"])
for step, batch in enumerate(itertools.chain(batches, batches)):
    if step == 2 and rank == 1:
        {fault}
    optimizer.zero_grad()
    loss = model(*batch)
    loss.backward()
    optimizer.step()
print(f"rank {{rank}}: trained to {{loss.item():.6f}}", flush=True)
{end}
"""
"""Every rank loads the same global batches, in a process of its own."""


def script(folder: Path, fault: str = "pass", end: str = "") -> tuple[str, str]:
    path = folder / "script.py"
    path.write_text(SCRIPT.format(fault=fault, end=end))
    return str(path), str(write_plan(folder / "plan.json"))


def finished(process: subprocess.Popen[str]) -> tuple[int, str]:
    """(exit code, what it said); nothing of the job may be left."""
    family = psutil.Process(process.pid).children(recursive=True)
    output, _ = process.communicate(timeout=LIMIT_S)
    time.sleep(0.5)
    assert not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in family)
    return process.returncode, output


@pytest.mark.slow
@pytest.mark.parametrize("end", ["", "tensoropt.shutdown()"])
def test_a_script_ends_as_it_should(tmp_path, end):
    code, output = finished(torchrun(*script(tmp_path, end=end)))
    assert code == 0, output
    said = re.findall(r"trained to (\d+\.\d{6})", output)  # two ranks may write into one line
    assert len(said) == 2
    assert len(set(said)) == 1
    assert "terminate called" not in output


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "says"), [
    ("raise ValueError('no such sample')", "no such sample"),
    ("torch.empty(1 << 50)", "can't allocate memory"),
])  # fmt: skip
def test_the_rank_that_raised_is_named(tmp_path, fault, says):
    code, output = finished(torchrun(*script(tmp_path, fault=fault)))
    assert code != 0
    assert says in output
    report = output[output.index("Root Cause") :]
    assert "rank      : 1" in report


def struck(tmp_path: Path, fault: signal.Signals, timeout_s: int) -> str:
    """What a job says whose rank 1 gets a signal after some steps; it ends in time."""
    plan = str(write_plan(tmp_path / "plan.json"))
    process = torchrun("-m", "tensoropt.execute", plan, "--steps", "1000000", "--timeout", f"{timeout_s}")
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step    3"):
            break
    ranks = psutil.Process(process.pid).children(recursive=True)
    next(p for p in ranks if p.environ().get("RANK") == "1").send_signal(fault)
    start = time.monotonic()
    code, output = finished(process)
    assert code != 0
    assert time.monotonic() - start < 60
    return output


@pytest.mark.slow
def test_a_killed_rank_is_named_first(tmp_path):
    output = struck(tmp_path, signal.SIGKILL, 30)
    assert "Signal 9 (SIGKILL)" in output
    assert "rank      : 1" in output[output.index("Root Cause") :]


@pytest.mark.slow
def test_a_hanging_rank_ends_the_job(tmp_path):
    assert "rank 0 waited 15 s for another rank" in struck(tmp_path, signal.SIGSTOP, 15)


@pytest.mark.slow
def test_two_hosts_as_two_agents(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = (
        "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "two",
        "--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1",
    )  # fmt: skip
    plan = str(write_plan(tmp_path / "plan.json"))
    agents = [torchrun("-m", "tensoropt.execute", plan, "--steps", "3", options=options) for _ in range(2)]
    outputs = []
    for agent in agents:
        code, output = finished(agent)
        assert code == 0, output
        outputs.append(output)
    assert sum("step    3  loss" in output for output in outputs) == 1


def test_what_a_failed_rank_says():
    gone = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1")
    slow = RuntimeError("[gloo] Timed out waiting 5000ms for recv operation to complete")
    assert _lost_rank(gone, 3, 5.0) == "rank 3 lost its connection to another rank; see that rank's error"
    assert "rank 3 waited 5 s" in str(_lost_rank(slow, 3, 5.0))
    assert _lost_rank(ValueError("x"), 3, 5.0) is None
    assert "rank 1 is out of memory" in str(_out_of_memory(RuntimeError("not enough memory: you tried"), 1))
    assert "rank 1 is out of memory" in str(_out_of_memory(MemoryError(), 1))
    assert _out_of_memory(ValueError("x"), 1) is None
