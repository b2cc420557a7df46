"""Which files are taken, and how much of them is read."""

from __future__ import annotations

import gzip
import json
import pickle

import pytest

from tensoropt.errors import TensorOptError
from tensoropt.observed import files
from tensoropt.observed.files import parse_observation, read_observation
from tests.observed.test_profile import KERNELS, trace
from tests.observed.test_snapshot import entry, snapshot

SNAPSHOT = pickle.dumps(snapshot([entry("alloc", 0, 512, 100)]))
TRACE = json.dumps(trace(*KERNELS)).encode()


def test_each_kind_is_read_by_its_name(tmp_path):
    for name, content in (
        ("a.pickle", SNAPSHOT), ("a.PKL", SNAPSHOT), ("a.json", TRACE), ("a.json.gz", gzip.compress(TRACE)),
        ("a.json", gzip.compress(TRACE)),
    ):  # fmt: skip
        (tmp_path / name).write_bytes(content)
        found = read_observation(tmp_path / name)
        assert found.kind == ("memory snapshot" if "p" in name.lower().split(".")[1] else "profiler trace")


@pytest.mark.parametrize("name", ["a.onnx", "pickle", "a.gz", "a.json.zip", ""])
def test_other_names_are_refused(name):
    with pytest.raises(TensorOptError, match=r"is not taken; give a memory snapshot"):
        parse_observation(name, TRACE)


def test_a_bomb_is_not_unpacked():
    bomb = gzip.compress(b" " * 2**24)
    assert len(bomb) < 2**15
    with pytest.raises(TensorOptError, match="unpacks into more than 1 MiB; it is not read further"):
        parse_observation("a.json.gz", bomb, most_bytes=2**20)
    # Nor one of many parts.
    with pytest.raises(TensorOptError, match="unpacks into more than 1 MiB"):
        parse_observation("a.json.gz", gzip.compress(b" " * 2**18) * 9, most_bytes=2**20)
    with pytest.raises(TensorOptError, match="more than 64 parts"):
        parse_observation("a.json.gz", gzip.compress(b" ") * 99, most_bytes=2**20)


def test_damaged_and_broken_off_ones_are_refused():
    whole = gzip.compress(TRACE)
    with pytest.raises(TensorOptError, match="is incomplete"):
        parse_observation("a.json.gz", whole[:-10])
    with pytest.raises(TensorOptError, match="is damaged"):
        parse_observation("a.json.gz", whole[:12] + b"\0" * 20 + whole[32:])
    with pytest.raises(TensorOptError, match=r"'a\.json': the file is not JSON"):
        parse_observation("a.json", TRACE[:-2])
    with pytest.raises(TensorOptError, match=r"'a\.pkl': the pickle breaks off"):
        parse_observation("a.pkl", SNAPSHOT[:-2])


def test_large_and_missing_files_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MOST_BYTES", 10)
    (tmp_path / "a.json").write_bytes(TRACE)
    with pytest.raises(TensorOptError, match="at most 0 MiB are read"):
        read_observation(tmp_path / "a.json")
    with pytest.raises(TensorOptError, match=r"cannot read .*b.json \(No such file"):
        read_observation(tmp_path / "b.json")


def test_results_of_verify_are_read_and_damaged_ones_refused():
    with pytest.raises(TensorOptError, match="no plan was verified"):
        parse_observation("verified.json", json.dumps({"schema": files.SCHEMA, "plans": []}).encode())
    with pytest.raises(TensorOptError, match="the results are damaged"):
        parse_observation("verified.json", json.dumps({"schema": files.SCHEMA, "plans": [{}]}).encode())
