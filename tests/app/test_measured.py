"""Measured files that a page drops: limited, read as data, forgotten."""

from __future__ import annotations

import gzip
import os
import pickle

import pytest
import tensoropt_app.measured as limits
from samples_app import data_url as url
from tensoropt_app.measured import MeasuredFiles

from tensoropt.errors import TensorOptError
from tests.observed.test_files import SNAPSHOT, TRACE


def test_a_file_is_kept_under_a_token_until_it_is_removed():
    files = MeasuredFiles()
    token = files.keep(url(SNAPSHOT), "../run 3/a.pickle")
    label, found = files.get(token)
    assert (label, found.kind) == ("a.pickle", "memory snapshot")
    files.remove(token)
    for gone in (token, None, 7, "x"):
        with pytest.raises(TensorOptError, match=r"not kept any more .*; upload it again"):
            files.get(gone)
        files.remove(gone)


def test_only_the_last_few_are_kept():
    files = MeasuredFiles(most=2)
    first, second = (files.keep(url(SNAPSHOT), "a.pickle") for _ in range(2))
    files.get(first)  # it is looked at, so that the other one goes
    third = files.keep(url(gzip.compress(TRACE)), "a.json.gz")
    assert [files.get(token)[0] for token in (first, third)] == ["a.pickle", "a.json.gz"]
    with pytest.raises(TensorOptError, match="not kept"):
        files.get(second)


@pytest.mark.parametrize(
    ("contents", "name", "why"),
    [
        (url(SNAPSHOT), "a.onnx", "'a.onnx' is not taken; give a memory snapshot"),
        (url(SNAPSHOT), None, "'file' is not taken"),
        (None, "a.pickle", "did not arrive whole"),
        ("data:;base64,@@", "a.pickle", "did not arrive whole"),
        (url(b""), "a.pickle", "is empty"),
        (url(pickle.dumps(os.system)), "a.pickle", "STACK_GLOBAL, which is not data"),
        (url(b"{"), "a.json", "is not JSON"),
        (url(TRACE), "a.pkl", "the pickle"),
    ],
)
def test_anything_else_is_refused(contents, name, why):
    files = MeasuredFiles()
    with pytest.raises(TensorOptError, match=why):
        files.keep(contents, name)
    assert not len(files._recent)


def test_large_files_and_bombs_are_refused(monkeypatch):
    monkeypatch.setattr(limits, "MOST_UNPACKED", 2**20)
    with pytest.raises(TensorOptError, match="unpacks into more than 1 MiB"):
        MeasuredFiles().keep(url(gzip.compress(b" " * 2**22)), "a.json.gz")
    monkeypatch.setattr(limits, "MOST_OPCODES", 10)
    with pytest.raises(TensorOptError, match="more than 10 instructions"):
        MeasuredFiles().keep(url(SNAPSHOT), "a.pickle")
    monkeypatch.setattr(limits, "MOST_BYTES", 2**20)
    with pytest.raises(TensorOptError, match=r"has more than 1 MiB.*show DIR --point N --beside a\.json"):
        MeasuredFiles().keep(url(b" " * 2**21), "a.json")
