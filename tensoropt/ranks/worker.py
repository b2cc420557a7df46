"""A worker process of a :class:`~tensoropt.ranks.pool.RankPool`, which imports functions by name and runs
them.

The pool starts it as ``python -c "… main()" CONNECTION LIFELINE`` with two file descriptors.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from operator import attrgetter
from typing import Any

from tensoropt.cluster import pin_rank

_MANY_MODULES = 200
_hear: Callable[[Any], object] | None = None
_hosts = 1
"""The number of hosts of the ranks of this worker's pool."""


def tell(content: Any) -> None:
    """Send the pool's process a message before the called function ends; outside of a pool, do nothing."""
    if _hear is not None:
        _hear(content)


@contextmanager
def heard_by(hear: Callable[[Any], object]) -> Iterator[None]:
    """While open, pass the messages of :func:`tell` to the function ``hear``."""
    global _hear
    before, _hear = _hear, hear
    try:
        yield
    finally:
        _hear = before


def is_on(hosts: int) -> None:
    """Record on how many hosts the ranks of this worker's pool run."""
    global _hosts
    _hosts = hosts


def common_clock() -> Callable[[], float]:
    """Return a clock, in seconds, that all ranks of the process group share; all must call this function.

    On one host it is the monotonic clock. On several it is shifted to rank 0's clock by the quickest of 20
    round trips, with an error of at most half of that trip. Clocks drift, so use it for one short
    measurement.
    """
    if _hosts == 1:
        return time.perf_counter
    behind_s = _seconds_behind()
    return lambda: time.perf_counter() + behind_s


_ECHOES = 20
"""The number of round trips to compare two clocks; an assumption."""


def _seconds_behind() -> float:
    import torch
    import torch.distributed as dist

    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    rank, message = dist.get_rank(), torch.zeros(1, dtype=torch.float64, device=device)
    dist.barrier()
    if rank:
        for _ in range(_ECHOES):
            dist.recv(message, 0)
            message.fill_(time.perf_counter())
            dist.send(message, 0)
        dist.recv(message, 0)
        return float(message)
    for other in range(1, dist.get_world_size()):
        echoes: list[tuple[float, float]] = []
        for _ in range(_ECHOES):
            sent_s = time.perf_counter()
            dist.send(message, other)
            dist.recv(message, other)
            theirs_s, back_s = float(message), time.perf_counter()
            echoes.append((back_s - sent_s, (sent_s + back_s) / 2 - theirs_s))
        dist.send(message.fill_(min(echoes)[1]), other)
    return 0.0


def main() -> None:
    """Receive messages ``(verb, content)``, execute them and send results until the connection closes."""
    global _hear
    connection, lifeline = Connection(int(sys.argv[1])), int(sys.argv[2])
    _hear = lambda content: connection.send_bytes(pickle.dumps(("told", content)))  # noqa: E731
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    faulthandler.register(signal.SIGUSR1)
    threading.Thread(target=_leave_with_parent, args=(lifeline,), daemon=True).start()
    setup: dict[str, Any] = {}
    while True:
        try:
            verb, content = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            break
        if verb == "exit":
            break
        try:
            answer = pickle.dumps(("ok", _obey(verb, content, setup)))
        except BaseException as error:
            answer = pickle.dumps(("error", failure_of(error)))
        sys.stdout.flush()
        sys.stderr.flush()
        connection.send_bytes(answer)
    os._exit(0)  # a process group's destructor may wait for peers that are gone


def _freeze_imported(setup: dict[str, Any]) -> None:
    """Exclude imported modules from garbage collection, where they cost a third of a second in a step."""
    if len(sys.modules) >= setup.get("frozen_modules", 0) + _MANY_MODULES:
        setup["frozen_modules"] = len(sys.modules)
        gc.collect()  # what is garbage now could not be freed later
        gc.freeze()


def _leave_with_parent(lifeline: int) -> None:
    os.read(lifeline, 1)
    os._exit(1)


def _obey(verb: str, content: Any, setup: dict[str, Any]) -> Any:
    if verb == "run":
        path, kernels, (module, name), payload = content
        sys.path.extend(entry for entry in path if entry not in sys.path)
        kernels.apply()
        function = attrgetter(name)(importlib.import_module(module))
        _freeze_imported(setup)
        return function(setup["rank"], setup["world_size"], *pickle.loads(payload))
    if verb == "setup":
        setup.update(content)
        on_cpu = setup["gpu"] is None
        if on_cpu:
            pin_rank(setup["core"])  # before PyTorch starts threads
        elif setup["core"] is not None:
            os.sched_setaffinity(0, {setup["core"]})
        import torch

        torch.set_num_threads(1)
        torch.set_num_interop_threads(1)
        if not on_cpu:
            torch.cuda.set_device(setup["gpu"])
        _connect(setup)
        return os.getpid()
    assert verb == "reset"
    import torch.distributed

    setup["store"] = content
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        # DTensor keeps what it found out for a mesh, and takes an equal one for it, whose groups are gone.
        _clear_sharding_prop_cache()
    _connect(setup)
    return None


def _connect(setup: dict[str, Any]) -> None:
    import torch.distributed
    from torch._C._distributed_c10d import FileStore

    torch.distributed.init_process_group(
        setup["backend"],
        store=FileStore(setup["store"], setup["world_size"]),
        rank=setup["rank"],
        world_size=setup["world_size"],
        timeout=timedelta(seconds=setup["timeout_s"]),
    )


def failure_of(error: BaseException) -> tuple[str, str, bytes | None]:
    """Return (last line, traceback, the pickled error or None) of an error, which can be sent."""
    summary = "".join(traceback.format_exception_only(error)).strip()
    trace = "".join(traceback.format_exception(error))
    try:
        pickled = pickle.dumps(error)
    except Exception:
        pickled = None
    return summary, trace, pickled
