"""The programs that the documentation calls."""

from __future__ import annotations

import contextlib
import os
import runpy
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from typing import NoReturn
from unittest import mock

import torch.distributed as dist

from tensoropt.ranks.pool import RankPool

CHECKED_ELSEWHERE = {"make", "pip", ".", ".ci/run", ".venv/bin/pre-commit", "git", "cd", "jupyter"}
PROGRAMS = {"tensoropt", "torchrun", "python"}


def run_python(words: Sequence[str]) -> None:
    """What ``python SCRIPT ...`` or ``python -m MODULE ...`` does, in this process.

    Raises:
        RuntimeError: it ends with an exit code.
    """
    start, words = (runpy.run_module, words[1:]) if words[0] == "-m" else (runpy.run_path, words)
    with mock.patch.object(sys, "argv", list(words)):
        try:
            start(words[0], run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise RuntimeError(f"{words} ended with {end.code}") from end


def run_job(ranks: RankPool, words: Sequence[str]) -> None:
    """What ``torchrun --nproc-per-node N ...`` does, on as many ranks that are there already."""
    assert words[:2] == ["--nproc-per-node", str(ranks.world_size)], words
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    try:
        ranks.run(_take_part, port, os.getcwd(), list(words[2:]))
    finally:
        ranks.reset()  # the script ended the pool's group


def _stay(code: int, end: Callable[[int], NoReturn] = os._exit) -> None:
    """End the script, and not the rank; other threads end it where its parent is gone."""
    if threading.current_thread() is not threading.main_thread():
        end(code)
    raise SystemExit(code)


def _take_part(rank: int, world_size: int, port: int, place: str, words: list[str]) -> None:
    """Leave the group of the pool for the one that the script makes."""
    ranks = {"RANK": rank, "WORLD_SIZE": world_size}
    here = {f"LOCAL_{name}": of for name, of in ranks.items()}
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **ranks, **here}
    dist.destroy_process_group()
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.chdir(place))
            stack.enter_context(mock.patch.dict(os.environ, {name: str(of) for name, of in job.items()}))
            stack.enter_context(mock.patch.object(os, "_exit", _stay))
            run_python(words)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
