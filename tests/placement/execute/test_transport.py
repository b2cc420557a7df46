"""What a transport keeps of a message: inside one process a copy, on fake ranks nothing."""

from __future__ import annotations

import weakref

import torch

from tensoropt.placement.execute.transport import Alone, Job
from tensoropt.verify.fake_ranks import fake_job

CPU = torch.device("cpu")


def test_a_value_inside_one_process_arrives_as_a_copy_once() -> None:
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


def test_nothing_is_kept_of_what_a_fake_rank_sends() -> None:
    """Tracked memory would otherwise depend on when a thread gets its turn."""
    with fake_job(0, 2):
        transport, value = Job(), torch.ones(3)
        transport.send(0, 1, value)
        ref = weakref.ref(value)
        del value
        assert ref() is None
        transport.finish()
