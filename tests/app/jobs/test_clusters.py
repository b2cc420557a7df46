"""Cluster files: read as data, refused with a reason, and what a job keeps of one."""

from __future__ import annotations

import json

import pytest
from samples_app import data_url as url
from tensoropt_app.jobs.uploads import MOST_BYTES, Uploads, cluster_file, read_description

from tensoropt.cluster import load_cluster
from tensoropt.errors import TensorOptError

MIXED = """
# two kinds in a node
nodes: 2
devices: [{kind: A100-80GB, count: 2}, {kind: H100-80GB, count: 2}]
links: {intra_node: NVLink3, inter_node: IB-200G}
"""


def test_a_file_becomes_a_cluster_that_a_job_keeps(tmp_path):
    uploads = Uploads(tmp_path / "uploads")
    token = uploads.keep_cluster(url(MIXED), "../mixed.yaml")
    found = uploads.clusters()[token]
    assert found.label == "mixed.yaml"
    cluster = load_cluster(dict(found.description))
    assert (cluster.name, cluster.device_count) == ("mixed", 8)
    assert (uploads.keep_cluster(url(MIXED), "mixed.yaml"), uploads.known()) == (token, {})


def test_what_an_exploration_keeps_of_its_cluster_is_taken_too(tmp_path):
    wanted = load_cluster("netsplit-paper")
    uploads = Uploads(tmp_path / "uploads")
    token = uploads.keep_cluster(url(json.dumps(wanted.to_dict())), "saved.json")
    assert load_cluster(dict(uploads.clusters()[token].description)).fingerprint == wanted.fingerprint


@pytest.mark.parametrize(
    ("text", "name", "said"),
    [
        (MIXED, "mixed.txt", "choose a file that ends in .yaml"),
        ("", "a.yaml", "'a.yaml' is empty"),
        ("devices: [", "a.yaml", "is not valid YAML or JSON"),
        (b"\xff\xfe\x00", "a.yaml", "is not valid YAML or JSON"),
        ("just words", "a.yaml", "is not a cluster file"),
        ("devices: [{kind: H100-80GB, count: 8}]", "a.yaml", "links lacks intra_node"),
        ("devices: [{kind: H1000}]", "a.yaml", "H1000"),
        ("device: 3", "a.yaml", "unknown key 'device'"),
        ("nodes: [{count: 40000, devices: [T4]}]", "a.yaml", "more than 1,024 devices"),
        ("nodes: 1000\ndevices: [{kind: T4, count: 1000}]\nlinks: {intra_node: PCIe3, inter_node: IB-100G}",
         "a.yaml", "has 1,000,000 devices; the limit is 1,024"),
        ("a: &a [1]\nb: *a", "a.yaml", r"aliases \(\*name\) are not accepted"),
        ("kinds: 3", "a.yaml", "a.yaml"),
        ("[" * 5000, "a.yaml", "a.yaml"),
        ("!!python/object/apply:os.system ['true']", "a.yaml", "is not valid YAML or JSON"),
        ("#" * (MOST_BYTES + 1), "a.yaml", "the limit is 64 KiB"),
    ],
)  # fmt: skip
def test_what_is_no_cluster_is_refused_with_a_reason(tmp_path, text, name, said):
    uploads = Uploads(tmp_path)
    with pytest.raises(TensorOptError, match=said):
        uploads.keep_cluster(url(text), name)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_one_is_left_out_of_the_list(tmp_path):
    uploads = Uploads(tmp_path)
    token = uploads.keep_cluster(url(MIXED), "mixed.yaml")
    (tmp_path / "cluster-0123456789abcdef.json").write_text("{")
    (tmp_path / "cluster-0123456789abcdee.json").write_text('{"label": "x", "cluster": {"devices": []}}')
    assert list(uploads.clusters()) == [token]


def test_json_is_read_as_yaml_is():
    text = '{"devices": [{"kind": "T4", "count": 2}], "links": {"intra_node": "PCIe3"}}'
    found = cluster_file(read_description(text.encode(), "two.json"), "two.json")
    assert (load_cluster(dict(found.description)).device_count, found.description["name"]) == (2, "two")
