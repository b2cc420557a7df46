"""What single things cost: a collective, a cast between stored and computed types."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tensoropt.costs.prices import Prices
from tensoropt.profiling.overheads import Overheads


class Linear:
    """A collective takes 1 s and 0.5 s per byte."""

    def time_s(self, kind, axes, num_bytes):
        return 1.0 + 0.5 * num_bytes * len(axes)

    def source(self, kind, axes):
        return "measured"


def prices(mesh=(4, 2, 1, 3), **overheads) -> Prices:
    atoms = SimpleNamespace(graph=SimpleNamespace(training=True))
    return Prices(SimpleNamespace(atoms=atoms), mesh, None, Linear(), "sgd", Overheads(**overheads))


@pytest.mark.parametrize(
    ("axes", "num_bytes", "seconds"),
    [
        ((1,), 8, 1 + 4),
        ((1, 3), 8, 1 + 8),
        ((1, 2, 3), 8, 1 + 8),  # an axis of one device takes no part
        ((0, 1), 8, 1 + 4),  # nor do micro-batches
        ((2,), 8, None),
        ((0,), 8, None),
        ((), 8, None),
    ],
)
def test_a_collective(axes, num_bytes, seconds):
    sent = prices().send("all_reduce", axes, num_bytes)
    assert (None if sent is None else sent.seconds) == seconds


def test_a_cast_costs_a_kernel_and_the_bytes_read_and_written():
    known = prices(arrive_s=2.0, call_s=1000.0, copy_s_per_byte=0.5)
    narrow = SimpleNamespace(master_dtype="float32", element_bytes=2, stored_element_bytes=4)
    same = SimpleNamespace(master_dtype=None, element_bytes=4, stored_element_bytes=4)
    assert known.cast(narrow, 60) == (2.0 + 0.5 * 60 * (2 + 4) / 2, 0.0)
    assert known.cast(narrow, 30) == (2.0 + 0.5 * 30 * (2 + 4) / 2, 0.0)
    assert known.cast(same, 60) == (0.0, 0.0)
    apart = prices(arrive_s=2.0, copy_s_per_byte=0.5, of_host=Overheads(arrive_s=7.0, call_s=1000.0))
    assert apart.cast(narrow, 60) == (2.0 + 0.5 * 60 * (2 + 4) / 2, 7.0)


def test_copies_and_additions_cost_kernels_and_their_bytes():
    host = Overheads(arrive_s=7.0, accumulate_s=5.0)
    known = prices(arrive_s=2.0, accumulate_s=3.0, copy_s_per_byte=0.5, add_s_per_byte=0.25, of_host=host)
    assert known.copy(8, 3) == (3 * 2.0 + 4.0, 21.0)
    assert known.addition(8, 3) == (3 * 3.0 + 2.0, 15.0)
