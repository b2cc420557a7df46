"""How a worker gets ready: CPU ranks are pinned and keep what they free, ranks of GPUs get theirs.

What a process frees stays its own: checked by page faults, not by time.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from tensoropt.ranks import worker
from tensoropt.ranks.worker import keep_freed_memory

SCRIPT = """
import os, resource, torch
from tensoropt.ranks.worker import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    large = torch.ones(9 << 20)  # 36 MiB: more than glibc ever keeps by itself
    del large
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

chosen = keep_freed_memory()
before = min(faults() for _ in range(20))
del os.environ["MALLOC_TRIM_THRESHOLD_"]
keep_freed_memory.cache_clear()
kept = keep_freed_memory()
after = [faults() for _ in range(20)]  # aligned pieces find their place after some rounds
print(int(chosen), before, int(kept), after[-1])
"""
glibc = pytest.mark.skipif("glibc" not in str(os.confstr("CS_GNU_LIBC_VERSION")), reason="a setting of glibc")


@glibc
def test_a_second_tensor_finds_the_memory_of_the_first_unless_a_person_has_set_that() -> None:
    environment = {k: v for k, v in os.environ.items() if "MALLOC" not in k}
    answer = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=environment | {"MALLOC_TRIM_THRESHOLD_": "131072"},
        capture_output=True,
        text=True,
        check=True,
    )
    chosen, before, kept, after = map(int, answer.stdout.split())
    assert not chosen
    assert before >= 18  # 9,216 small pages, or 18 huge ones
    assert kept
    assert after <= 2


def test_asking_again_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_freed_memory.cache_clear()
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    assert not keep_freed_memory()
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_")
    assert not keep_freed_memory()
    keep_freed_memory.cache_clear()


@pytest.mark.parametrize(
    ("backend", "gpu", "done"),
    [
        ("gloo", None, ["pinned", "keeps", "gloo"]),
        ("gloo", 0, ["gpu 0", "gloo"]),
        ("nccl", 1, ["gpu 1", "nccl"]),
    ],
)
def test_a_rank_gets_what_its_device_needs(
    monkeypatch: pytest.MonkeyPatch, backend: str, gpu: int | None, done: list[str]
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(worker, "pin_rank", lambda cores: seen.append("pinned"))
    monkeypatch.setattr(worker, "keep_freed_memory", lambda: seen.append("keeps"))
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
