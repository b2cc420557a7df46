"""Hosts: joined into one cluster, with the network that their cards report."""

import json
import os
import subprocess
import sys

import pytest

import tensoropt
from tensoropt.cluster import load_cluster
from tensoropt.cluster.catalog import link
from tensoropt.cluster.files import save_cluster
from tensoropt.cluster.hosts import Network, network, together
from tensoropt.errors import ClusterError


@pytest.fixture(autouse=True)
def no_job(monkeypatch):
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def test_a_network_in_words():
    assert network("8xIB-400G") == Network(link("IB-400G"), 8)
    found = network("2x100Gbit/s")
    assert (found.link.name, found.link.bandwidth_bytes_per_s, found.cards) == ("100Gbit/s", 12.5e9, 2)
    for text in ("IB-9", "0xIB-400G", "100", "x", ""):
        with pytest.raises(ClusterError):
            network(text)


def test_hosts_become_one_cluster_that_a_file_keeps(tmp_path):
    a, b = load_cluster("dgx-h100"), load_cluster("dgx-a100")
    made = together([a, b], Network(link("IB-200G"), 4))
    assert made.counts == "8 x H100-80GB, 8 x A100-80GB"
    assert [(level.name, level.size, level.link.name, level.link_count) for level in made.levels] == [
        ("node", 2, "IB-200G", 4),
        ("gpu", 8, "NVLink3", 1),  # the slower one
    ]
    links = {"pairs": [{"between": [0, 1], "link": "PCIe5"}]}
    near = load_cluster({"devices": [{"kind": "H100-80GB", "count": 2}], "links": links})
    assert together([near, near], Network(link("IB-200G"), 1)).link(2, 3) == near.link(0, 1)
    for name in ("c.yaml", "c.json"):
        save_cluster(made, tmp_path / name)
        assert load_cluster(tmp_path / name) == made
    with pytest.raises(ClusterError, match="end it in"):
        save_cluster(made, tmp_path / "c.txt")
    with pytest.raises(ClusterError, match="8, 4 devices"):
        together([a, b.subset(4)], Network(link("IB-200G"), 4))


def test_hosts_like_this_one_are_said_to_be():
    here, found = load_cluster("local"), tensoropt.detect(2, network="IB-400G")
    assert (found.device_count, found.levels[0].link.name) == (2 * here.device_count, "IB-400G")
    assert "2 hosts that are assumed to be alike" in found.source
    assert tensoropt.detect(1) == here
    with pytest.raises(ClusterError, match="at least 1"):
        tensoropt.detect(0)


@pytest.mark.slow
@pytest.mark.distributed
def test_processes_of_a_job_say_what_their_hosts_have(tmp_path):
    """Two processes that are the first ones of their hosts, and one that is not."""
    file = tmp_path / "cluster.json"
    asked = f"-m tensoropt measure host --network 2xIB-200G --out {file}"
    words = [sys.executable, *asked.split()]
    job = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29611"}
    ranks = [
        subprocess.Popen(
            words,
            env={**os.environ, **job, "RANK": str(rank), "LOCAL_RANK": str(rank // 2)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(3)
    ]  # fmt: skip
    said = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0, 0], said
    assert "saved: " in said[0][0]
    assert said[1][0].strip() == ""
    saved = json.loads(file.read_text())
    assert (saved["source"], saved["levels"][0]["size"]) == ("detected on 2 hosts", 2)
