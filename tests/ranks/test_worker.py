"""How a worker gets ready: CPU ranks are pinned, ranks of GPUs get theirs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tensoropt.ranks import worker


@pytest.mark.parametrize(
    ("backend", "gpu", "done"),
    [("gloo", None, ["pinned", "gloo"]), ("gloo", 0, ["gpu 0", "gloo"]), ("nccl", 1, ["gpu 1", "nccl"])],
)
def test_a_rank_gets_what_its_device_needs(monkeypatch, backend, gpu, done):
    seen: list[str] = []
    monkeypatch.setattr(worker, "pin_rank", lambda cores: seen.append("pinned"))
    monkeypatch.setattr(worker, "_connect", lambda setup: seen.append(setup["backend"]))
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(torch, "set_num_interop_threads", lambda count: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: seen.append(f"gpu {device}"))
    monkeypatch.setattr(worker, "_hosts", 0)
    setup: dict[str, Any] = {
        "rank": 1,
        "backend": backend,
        "gpu": gpu,
        "cores": None,
        "threads": 1,
        "hosts": 1,
    }
    worker._obey("setup", setup, {})
    assert seen == done
