"""What ranks issue together is the same on all of them; the first difference is named."""

from __future__ import annotations

import pytest

from tensoropt.ops.calls import BY_VALUES, RING_SEND
from tensoropt.verify.agreement import JointCall, disagreements

BOTH, FOUR = (0, 1), (0, 1, 2, 3)
GATHER, REDUCE = JointCall("all_gather", BOTH, 64), JointCall("all_reduce", FOUR, 8)
THERE, BACK = JointCall("send", (0, 1), 16), JointCall("send", (1, 0), 16)
AROUND = JointCall(RING_SEND, (0, 1), 16)


def test_ranks_agree_on_what_they_share():
    own = JointCall("all_gather", (2, 3), 32)
    assert disagreements({0: [GATHER, REDUCE], 1: [GATHER, REDUCE], 2: [REDUCE, own], 3: [REDUCE, own]}) == []
    # Only some ranks are known.
    assert disagreements({0: [GATHER, REDUCE], 3: [REDUCE]}) == []
    # Messages of one direction keep their order, whatever lies between them.
    assert disagreements({0: [THERE, BACK, REDUCE], 1: [REDUCE, BACK, THERE]}) == []


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        ([GATHER, REDUCE], [REDUCE, GATHER], "number 0 is all_gather of 64 bytes among ranks [0, 1] on rank "
         "0, and all_reduce of 8 bytes among ranks [0, 1, 2, 3] on rank 1"),
        ([REDUCE, GATHER], [REDUCE], "number 1 is all_gather of 64 bytes among ranks [0, 1] on rank 0, and "
         "nothing on rank 1"),
        ([], [REDUCE], "number 0 is nothing on rank 0, and all_reduce"),
        ([REDUCE], [REDUCE._replace(bytes=4)], "all_reduce of 4 bytes"),
        ([REDUCE], [REDUCE._replace(kind="broadcast")], "broadcast of 8 bytes"),
        ([THERE], [], "send of 16 bytes from rank 0 to 1 on rank 0, and nothing"),
        ([AROUND, AROUND], [AROUND], "number 1 is ring_send of 16 bytes from rank 0 to 1"),
    ],
)  # fmt: skip
def test_the_first_difference_is_named(first, second, says):
    (line,) = disagreements({0: first, 1: second})
    assert line.startswith("ranks 0 and 1 must issue their common collectives and messages in the same order")
    assert says in line


def test_a_group_is_named_once():
    """Of four ranks that share a sum, one that lacks it differs from each of the others."""
    lines = disagreements({0: [REDUCE], 1: [REDUCE], 2: [REDUCE], 3: []})
    assert [line.partition(" must")[0] for line in lines] == ["ranks 0 and 3"]


def test_sizes_that_values_decide_are_left_out():
    assert JointCall.of(BY_VALUES, [0, 1], 12) == JointCall(BY_VALUES, (0, 1), 0)
