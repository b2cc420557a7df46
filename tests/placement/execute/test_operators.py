"""Cutting and joining are inverse to each other, forward and backward.

What a transport keeps of a message: inside one process a copy, on fake ranks nothing.
"""

import weakref

import pytest
import torch

from tensoropt.ops.layouts import PARTIAL
from tensoropt.placement.execute.operators import Cut, join, split
from tensoropt.placement.execute.transport import Alone, Job
from tensoropt.verify.fake_ranks import fake_job
from tests.sharding.rule_check import shard

ATOMS = ((4, 3), (10,))
CPU = torch.device("cpu")


@pytest.mark.parametrize(("code", "count"), [(0, 2), (0, 4), (1, 3), (2, 5), (2, 3)])
def test_pieces_are_the_shards_of_a_mesh(code, count):
    whole = torch.randn(12, 10, requires_grad=True)
    cut = Cut(ATOMS, code, count)
    pieces = split(cut, whole)
    for index, piece in enumerate(pieces):
        assert torch.equal(piece, shard(whole.detach(), ATOMS, (code,), (count,), (index,)))
        assert piece.untyped_storage().nbytes() == piece.numel() * 4  # a copy: the whole may go
    again = join(cut, *pieces)
    assert torch.equal(again, whole)
    upstream = torch.randn(12, 10)
    again.backward(upstream)
    assert torch.equal(whole.grad, upstream)


def test_a_piece_without_a_gradient_counts_as_zero():
    whole = torch.randn(12, 10, requires_grad=True)
    first, _ = split(Cut(ATOMS, 0, 2), whole)
    first.sum().backward()
    assert whole.grad.sum() == first.numel()


def test_terms_of_a_sum():
    terms = [torch.randn(12, 10, requires_grad=True) for _ in range(3)]
    total = join(Cut(ATOMS, PARTIAL, 3), *terms)
    assert torch.allclose(total, terms[0] + terms[1] + terms[2])
    upstream = torch.randn(12, 10)
    total.backward(upstream)
    assert all(torch.equal(term.grad, upstream) for term in terms)


def test_a_piece_is_put_back():
    whole, cut = torch.zeros(12, 10), Cut(ATOMS, 1, 3)
    value = torch.randn(12, 10)
    for index in range(3):
        cut.put(whole, index, cut.piece(value, index))
    assert torch.equal(whole, value)


def test_a_value_inside_one_process_arrives_as_a_copy_once():
    transport, value = Alone([CPU, CPU]), torch.ones(3, requires_grad=True)
    transport.send(4, 1, value)
    arriving = transport.receive(4, 0, (3,), torch.float32, CPU)
    value.detach().zero_()
    received = arriving()
    assert torch.equal(received, torch.ones(3))
    assert not received.requires_grad
    ref = weakref.ref(received)
    del received
    assert ref() is None


def test_nothing_is_kept_of_what_a_fake_rank_sends():
    """Tracked memory would otherwise depend on when a thread gets its turn."""
    with fake_job(0, 2):
        transport, value = Job(), torch.ones(3)
        transport.send(0, 1, value)
        ref = weakref.ref(value)
        del value
        assert ref() is None
        transport.finish()
