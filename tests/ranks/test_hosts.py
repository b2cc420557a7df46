"""Ranks on all hosts of a job: found, started, measured, lost, and none left running.

Hosts are processes of this machine that know each other by TCP alone, and in slow tests network namespaces.
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tensoropt import ClusterError, Settings, TensorOptError, load_cluster, measure_links
from tensoropt.cluster.files import save_cluster
from tensoropt.cluster.hosts import detected_hosts, network, taken_alike, together
from tensoropt.costs.source import CostSource
from tensoropt.profiling.store import ProfileStore
from tensoropt.ranks import worker
from tensoropt.ranks.hosts import HostRanks, in_job
from tensoropt.ranks.pool import RankPool
from tensoropt.ranks.worker import common_clock

pytestmark = pytest.mark.distributed
ROOT = Path(__file__).parents[2]
THIS = "127.0.0.1"
TWO, PAIR = (together([load_cluster(f"cpu:{each}")] * 2, network("1Gbit/s")) for each in (2, 1))
"""Two hosts of two CPU ranks, and of one."""


def two_hosts(
    module: Sequence[str],
    folder: Path,
    prefixes: Sequence[Sequence[str]] = ((), ()),
    address: str = THIS,
    each: int = 1,
) -> list[subprocess.CompletedProcess[str]]:
    """Run a module in a job of two hosts of ``each`` ranks; return what each of them ended with."""
    with socket.socket() as free:
        free.bind((THIS, 0))
        port = free.getsockname()[1]
    environment = os.environ | {"TENSOROPT_CACHE": str(folder)}
    environment |= {"GLOO_SOCKET_IFNAME": "lo"} if address == THIS else {}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", str(each)]
    at = ["--master-addr", address, "--master-port", str(port)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [
        subprocess.Popen(
            [*prefix, *launcher, "--node-rank", str(number), *at, "-m", *module],
            cwd=ROOT,
            env=environment,
            **pipes,
        )
        for number, prefix in enumerate(prefixes)
    ]
    try:
        return [
            subprocess.CompletedProcess(one.args, one.wait(), *one.communicate(timeout=300))
            for one in started
        ]
    finally:
        for one in started:
            one.kill()


@pytest.mark.slow
def test_ranks_on_all_hosts_work_together_and_stay_usable_after_a_failure(tmp_path):
    first, second = two_hosts(["tests.ranks.host_jobs", "fails"], tmp_path, each=2)
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert second.stdout == ""
    found = json.loads(first.stdout)
    assert found["hosts"] == 2
    assert [(rank, summed) for rank, summed, _ in found["first"]] == [(rank, 6.0) for rank in range(4)]
    parents = [parent for *_, parent in found["first"]]
    assert parents[0] == parents[1] != parents[2] == parents[3]
    assert (found["lost"]["rank"], found["lost"]["kind"]) == (3, "raised")
    assert "refused" in found["lost"]["text"]
    assert found["told"] == [[rank, "here"] for rank in range(4)]
    assert found["after"] == [6.0] * 4


@pytest.mark.slow
def test_links_between_hosts_are_timed_and_price_explorations_of_the_same_hosts(tmp_path):
    save_cluster(PAIR, tmp_path / "hosts.yaml")
    module = ["tensoropt", "measure", "links", "--json", "--cluster", str(tmp_path / "hosts.yaml")]
    first, second = two_hosts(module, tmp_path)
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert second.stdout == ""
    told = json.loads(first.stdout)
    assert {one["mesh"] for one in told["meshes"]} == {mesh.label for mesh in PAIR.meshes(3)}
    assert not any(one["failed"] for one in told["meshes"])
    assert_priced_as_measured(tmp_path, told)


@pytest.mark.slow
def test_hosts_in_namespaces_are_timed_over_the_slow_link_between_them(tmp_path, namespaces):
    prefixes = [["ip", "netns", "exec", name] for name in namespaces]
    first, second = two_hosts(["tests.ranks.host_jobs", "measure"], tmp_path, prefixes, "10.255.77.1")
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    seconds = json.loads(first.stdout)
    # 20 MB/s; on a loaded machine the burst that gathers makes it look faster. The loopback would be tens of
    # times as fast.
    assert 2**20 / seconds[str(2**20)] == pytest.approx(20e6, rel=0.5)


def assert_priced_as_measured(folder: Path, told: Mapping[str, Any]) -> None:
    cluster = load_cluster(str(folder / "hosts.yaml"))
    with ProfileStore(folder / "profiles.sqlite") as store:
        costs = CostSource(cluster, store, Settings(measure="never"), None)
        for mesh in cluster.meshes(3):
            (own,) = (one for one in told["meshes"] if one["mesh"] == mesh.label)
            fits = costs.timings.links(mesh)
            assert fits is not None
            assert len(fits.collectives) == len(own["collectives"])


def test_a_cluster_of_hosts_that_was_not_measured_has_the_figures_of_its_file(tmp_path):
    with ProfileStore(tmp_path / "profiles.sqlite") as store:
        costs = CostSource(TWO, store, Settings(measure="never"), None)
        assert costs.timings.links(TWO.meshes()[0]) is None
    assert detected_hosts(TWO) == 2
    assert detected_hosts(taken_alike(TWO, 2)) == 2
    one, two = TWO.subset(1), TWO.subset(2)  # of the first host
    for cluster in (load_cluster("cpu:2"), load_cluster("dgx-h100[2]"), one, two):
        assert detected_hosts(cluster) == 1


def test_links_of_several_hosts_are_not_timed_from_one(tmp_path):
    save_cluster(TWO, tmp_path / "hosts.yaml")
    with pytest.raises(TensorOptError, match=r"between 2 hosts .* torchrun --nnodes 2 --nproc-per-node 2"):
        measure_links(str(tmp_path / "hosts.yaml"))


def test_a_job_of_other_hosts_is_refused(monkeypatch):
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 4)
    hosts = HostRanks([load_cluster("cpu:2")] * 2, "gloo", None)
    hosts.check(TWO)
    others = together([load_cluster("dgx-h100")] * 2, network("8xIB-400G"))
    for other in (others, PAIR):
        with pytest.raises(ClusterError, match=r"2 hosts of this job .*measure host --out"):
            hosts.check(other)


def test_a_process_is_in_a_job_if_there_are_others(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
        assert not in_job()
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    assert in_job()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert not in_job()


def read_apart(rank, world_size):
    """Return how far the common clock is from the true one, where each rank reads a clock of its own."""
    true, worker._hosts = time.perf_counter, 2
    time.perf_counter = lambda: true() + 1000.0 * rank
    try:
        clock = common_clock()
        return clock() - true()
    finally:
        time.perf_counter, worker._hosts = true, 1


@pytest.mark.slow
def test_ranks_of_several_hosts_have_a_clock_in_common():
    with RankPool(2) as pool:
        apart = pool.run(read_apart)
    assert apart[0] == pytest.approx(0.0, abs=1e-3)
    assert apart[1] == pytest.approx(0.0, abs=0.05)
