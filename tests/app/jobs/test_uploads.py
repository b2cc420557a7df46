"""Uploads: taken as data, under generated names, or refused in words."""

from __future__ import annotations

from pathlib import Path

import pytest
from samples_app import data_url as url
from tensoropt_app.jobs import uploads
from tensoropt_app.jobs.uploads import UploadError, Uploads


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
    assert (store.open_dims(token), store.open_dims("zoo:mlp")) == (["batch"], [])


def test_what_cannot_be_read_is_not_kept(tmp_path, monkeypatch):
    def refuse(path: Path) -> list[str]:
        raise ValueError("it has no operators")

    monkeypatch.setattr(uploads, "open_dims", refuse)
    with pytest.raises(UploadError, match=r"'a.onnx' cannot be read as ONNX \(it has no operators\)"):
        Uploads(tmp_path).keep(url(b"abc"), "a.onnx")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("contents", "name", "said"),
    [
        (url(b"abc"), "model.pt", "choose a file that ends in .onnx"),
        (url(b"abc"), "model.onnx.pkl", "choose a file that ends in .onnx"),
        (url(b""), "model.onnx", "is empty"),
        ("data:;base64,!!!", "model.onnx", "arrived incomplete"),
        (None, "model.onnx", "arrived incomplete"),
        ({"a": 1}, "model.onnx", "arrived incomplete"),
    ],
)
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
