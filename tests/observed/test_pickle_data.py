"""Pickles read as data: what Python writes comes back, and nothing is ever called."""

from __future__ import annotations

import os
import pickle
import struct
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tensoropt.observed.pickle_data import PickleDataError, read_pickle

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**100), 2**100) | st.floats(allow_nan=False)
    | st.text(max_size=300) | st.binary(max_size=300),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)  # fmt: skip


@given(PLAIN, st.integers(3, 5))
def test_plain_data_comes_back(value, protocol):
    assert read_pickle(pickle.dumps(value, protocol)) == value


def test_what_is_shared_is_shared_and_many_items_are_read():
    row = {"action": "alloc"}
    found = read_pickle(pickle.dumps([row] * 5000 + list(range(3000))))
    assert found == [row] * 5000 + list(range(3000))
    assert found[0] is found[4999]


class Runs:
    """Unpickled it would write a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_nothing_is_called(tmp_path, protocol):
    path = tmp_path / "was-run"
    with pytest.raises(PickleDataError, match=r"asks for (STACK_)?GLOBAL, which is not data"):
        read_pickle(pickle.dumps({"segments": Runs(path)}, protocol))
    assert not path.exists()


@pytest.mark.parametrize(
    "value",
    [
        OrderedDict(a=1),
        {1, 2},
        frozenset((1,)),
        np.zeros(2),
        torch.zeros(2),
        object(),
        os.system,
        1j,
        range(2),
    ],
)
def test_objects_are_refused_by_what_they_ask_for(value):
    with pytest.raises(PickleDataError, match="which is not data: only containers, texts and numbers"):
        read_pickle(pickle.dumps(value))


@pytest.mark.parametrize(
    "code",
    [
        b"c", b"i", b"o", b"R", b"b", b"\x81", b"\x92", b"\x93", b"P", b"Q", b"\x82", b"I1\n", b"\x97", b"0",
        b"\xff",
    ],
)  # fmt: skip
def test_opcodes_that_are_not_of_data_are_refused(code):
    """Those that look up, call, build, or have no place in what pickle writes of plain data."""
    with pytest.raises(PickleDataError, match="the pickle asks for"):
        read_pickle(b"\x80\x04N" + code + b".")


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\x80\x04", b".", b"(.", b"NN.", b"a.", b"Na.", b"]a.", b"}Ns.", b"(Nt", b"u.",
        b"}(\x8c\x01au.",
        b"\x85.", b"(\x85.", b"h\x05.", b"\x8c\xff" + b"a", b"X\xff\xff\xff\x7fab", b"\x8e" + b"\xff" * 8,
        b"\x8c\x01\xff.", b"\x94.", b"(\x94.", b"(](a.",
        b"\x8e" + struct.pack("<Q", 2**62) + b"x",  # sets nothing aside for what is not there
    ],
)  # fmt: skip
def test_damaged_ones_are_refused(content):
    with pytest.raises(PickleDataError, match=r"damaged|breaks off"):
        read_pickle(content)


def test_a_claimed_memo_of_gigabytes_takes_no_memory():
    """Python's own unpickler would make a table of four billion places of this."""
    assert read_pickle(b"\x80\x02Nr\xff\xff\xff\xff.") is None


def test_integers_dict_keys_and_instructions_are_limited():
    with pytest.raises(PickleDataError, match="an integer of 65 bytes; at most 16 are read"):
        read_pickle(pickle.dumps(2**512))
    with pytest.raises(PickleDataError, match="a dict with a key of type int; only texts are"):
        read_pickle(pickle.dumps({1: 2}))
    with pytest.raises(PickleDataError, match="more than 10 instructions"):
        read_pickle(pickle.dumps(list(range(100))), most_opcodes=10)


def test_a_list_in_itself_is_only_a_reference():
    value: list[object] = []
    value.append(value)
    found = read_pickle(pickle.dumps(value))
    assert found[0] is found
