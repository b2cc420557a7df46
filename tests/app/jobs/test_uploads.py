"""Uploads: models and cluster files, taken as data, under generated names, or refused with a reason."""

import json
from unittest.mock import Mock

import pytest
from samples_app import data_url as url
from tensoropt_app.jobs import uploads
from tensoropt_app.jobs.uploads import MOST_BYTES, UploadError, Uploads, cluster_file, read_description

from tensoropt import TensorOptError, load_cluster


@pytest.fixture(autouse=True)
def _read_elsewhere(monkeypatch):
    monkeypatch.setattr(uploads, "open_dims", lambda path: ["batch"])


def test_a_file_is_kept_under_a_name_of_ours(tmp_path):
    store = Uploads(tmp_path / "uploads")
    token = store.keep(url(b"abc"), "../../evil/$(rm)\x00model.onnx")
    path, label = store.known()[token]
    assert (path.parent, path.name) == (tmp_path / "uploads", f"{token}.onnx")
    assert (path.read_bytes(), path.stat().st_mode & 0o177) == (b"abc", 0)
    assert label == "__rm__model.onnx"
    assert (store.open_dims(label), store.open_dims("zoo:mlp")) == (["batch"], [])


def test_what_cannot_be_read_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(uploads, "open_dims", Mock(side_effect=ValueError("it has no operators")))
    with pytest.raises(UploadError, match=r"'a.onnx' cannot be read as ONNX \(it has no operators\)"):
        Uploads(tmp_path).keep(url(b"abc"), "a.onnx")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("contents", "name", "said"), [
    (url(b""), "model.onnx", "is empty"),
    ("data:;base64,!!!", "model.onnx", "arrived incomplete"),
    (None, "model.onnx", "arrived incomplete"),
    ({"a": 1}, "model.onnx", "arrived incomplete"),
])  # fmt: skip
def test_what_is_not_taken_is_said(tmp_path, contents, name, said):
    store = Uploads(tmp_path)
    with pytest.raises(UploadError, match=said):
        store.keep(contents, name)
    assert list(tmp_path.iterdir()) == []


def test_sizes_are_limited(tmp_path, monkeypatch):
    store = Uploads(tmp_path)
    monkeypatch.setattr(uploads, "MAX_UPLOAD_BYTES", 10)
    with pytest.raises(UploadError, match="the limit is 0 KiB"):
        store.keep(url(b"x" * 11), "a.onnx")
    monkeypatch.setattr(uploads, "MOST_TOGETHER_BYTES", 15)
    store.keep(url(b"x" * 8), "a.onnx")
    with pytest.raises(UploadError, match="delete some"):
        store.keep(url(b"x" * 8), "b.onnx")


def test_a_file_goes_to_the_field_that_it_is_for(tmp_path):
    store = Uploads(tmp_path)
    config = '{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64}'
    assert store.keep_any(url(config), "config.json") == ("model", "config.json")
    assert store.keep_any(url(b"abc"), "net.onnx") == ("model", "net.onnx")
    cluster = '{"devices": [{"kind": "T4", "count": 2}], "links": {"intra_node": "PCIe3"}}'
    assert store.keep_any(url(cluster), "two.json") == ("devices", "two.json")
    (path, _) = next(file for file in store.known().values() if file[1] == "config.json")
    assert path.name == "config.json"
    for name in ("model.pt", "train.py"):
        with pytest.raises(UploadError, match="choose a file that ends in"):
            store.keep_any(url(b"abc"), name)


MIXED = """
# two kinds in a node
nodes: 2
devices: [{kind: A100-80GB, count: 2}, {kind: H100-80GB, count: 2}]
links: {intra_node: NVLink3, inter_node: IB-200G}
"""


def test_a_file_becomes_a_cluster_that_a_job_keeps(tmp_path):
    store = Uploads(tmp_path / "uploads")
    for _ in range(2):  # the second time it is there
        assert store.keep_any(url(MIXED), "../mixed.yaml") == ("devices", "mixed.yaml")
    (found,) = store.clusters().values()
    assert found.label == "mixed.yaml"
    cluster = load_cluster(dict(found.description))
    assert (cluster.name, cluster.device_count) == ("mixed", 8)
    assert store.known() == {}


def test_what_an_exploration_keeps_of_its_cluster_is_taken_too(tmp_path):
    wanted = load_cluster("netsplit-paper")
    store = Uploads(tmp_path / "uploads")
    store.keep_any(url(json.dumps(wanted.to_dict())), "saved.json")
    (found,) = store.clusters().values()
    assert load_cluster(dict(found.description)).fingerprint == wanted.fingerprint


@pytest.mark.parametrize(("text", "name", "said"), [
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
])  # fmt: skip
def test_what_is_no_cluster_is_refused_with_a_reason(tmp_path, text, name, said):
    store = Uploads(tmp_path)
    with pytest.raises(TensorOptError, match=said):
        store.keep_any(url(text), name)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_one_is_left_out_of_the_list(tmp_path):
    store = Uploads(tmp_path)
    store.keep_any(url(MIXED), "mixed.yaml")
    (token,) = store.clusters()
    (tmp_path / "cluster-0123456789abcdef.json").write_text("{")
    (tmp_path / "cluster-0123456789abcdee.json").write_text('{"label": "x", "cluster": {"devices": []}}')
    assert list(store.clusters()) == [token]


def test_json_is_read_as_yaml_is():
    text = '{"devices": [{"kind": "T4", "count": 2}], "links": {"intra_node": "PCIe3"}}'
    found = cluster_file(read_description(text.encode(), "two.json"), "two.json")
    assert (load_cluster(dict(found.description)).device_count, found.description["name"]) == (2, "two")
