"""A pool of ranks: N processes with a process group, started once and used many times."""

from __future__ import annotations

import contextlib
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tensoropt.cluster import rank_cores
from tensoropt.errors import MeasurementError
from tensoropt.ranks import worker_process
from tensoropt.ranks.kernel_settings import KernelSettings

_GRACE_S = 3.0
"""The seconds in which the other ranks must answer once one has failed; an assumption."""


class RankPool:
    """A pool of ``world_size`` processes with a process group, each pinned to its own core if there are
    enough and the backend is gloo.

    The pool is a context manager. Workers start with the first run and end with :meth:`close`, garbage
    collection or the process. One run is executed at a time; other threads wait.

    Args:
        timeout_s: time-out of one run, and of a collective, in seconds.
        backend: ``gloo``, or ``nccl`` with GPU r for rank r.
        share_gpu: whether all ranks run on the first GPU, with gloo; measured times are then meaningless.
        interface: network interface of gloo, the loopback by default.
        prefixes: for each rank, words put before the worker's command (such as ``ip netns exec NAME``).
    """

    def __init__(
        self,
        world_size: int,
        timeout_s: float = 120.0,
        *,
        start_timeout_s: float = 180.0,
        backend: str = "gloo",
        share_gpu: bool = False,
        interface: str | None = None,
        prefixes: Sequence[Sequence[str]] | None = None,
    ) -> None:
        if world_size < 1 or timeout_s <= 0:
            raise MeasurementError(
                f"a pool of {world_size} ranks with a time-out of {timeout_s} s is impossible; give at least "
                "1 rank and more than 0 s"
            )
        if share_gpu and backend != "gloo":
            raise MeasurementError(
                f"{backend} takes one rank per GPU; give backend='gloo' for ranks that share a GPU"
            )
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.backend = backend
        self.share_gpu = share_gpu
        self._start_timeout_s = start_timeout_s
        self._interface = interface or "lo"
        self._prefixes = [list(prefix) for prefix in prefixes] if prefixes else [[]] * world_size
        # Ranks that share a GPU wait for each other in any case.
        self._cores = None if backend == "nccl" else rank_cores(world_size)
        self._workers: list[worker_process.WorkerProcess] = []
        self._directory = Path(tempfile.mkdtemp(prefix="tensoropt-pool-"))
        self._epoch = 0
        self._lock = threading.RLock()
        self._closed = False
        self._finalizer = weakref.finalize(self, _clean_up, self._workers, self._directory)

    @property
    def hosts(self) -> int:
        """The number of hosts on which the ranks run."""
        return 1

    @property
    def process_ids(self) -> tuple[int, ...]:
        """The process ids by rank; empty while no workers run."""
        return tuple(worker.process.pid for worker in self._workers)

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the workers if none are running (``run`` does so, too); raise MeasurementError on failure."""
        with self._lock:
            if self._closed:
                raise MeasurementError("this pool is closed; make a new one")
            if self._workers:
                return
            with self._killing_on_error():
                self._epoch += 1  # a new file: the last group's store still has its ranks' addresses
                for rank, prefix in enumerate(self._prefixes):
                    log = self._directory / f"rank-{rank}.log"
                    self._workers.append(worker_process.start_worker(log, prefix, self._interface))
                self._send_all("setup", [self._setup(rank) for rank in range(self.world_size)])
                try:
                    self._collect("start", self._start_timeout_s)
                except worker_process.RankError as error:
                    raise MeasurementError(f"the ranks do not start: {error}") from error

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout_s: float | None = None,
        on_message: Callable[[int, Any], None] | None = None,
    ) -> list[Any]:
        """Call ``function(rank, world_size, *args)`` on all ranks at once; return the results by rank.

        Args:
            function: a module-level function, which the worker looks up by module and name.
            timeout_s: the time-out of this run in seconds; each message restarts it.
            on_message: called with rank and content of each message (:func:`tensoropt.ranks.worker.tell`).

        Raises:
            RankError: a rank raised, died, or did not answer in time; the pool stays usable.
            MeasurementError: the function or its arguments cannot be sent.
        """
        reference = _reference(function)
        try:
            payload = pickle.dumps(args)
        except Exception as error:
            raise MeasurementError(
                f"arguments of {reference[1]} cannot be sent to another process ({error});"
                " pass data or functions of a module"
            ) from error
        # The measurement runs under the settings of this process.
        common = list(sys.path), KernelSettings.now(), reference
        with self._lock:
            self.start()
            with self._killing_on_error():
                self._send_all("run", [(*common, payload)] * self.world_size)
                return self._collect(
                    reference[1], self.timeout_s if timeout_s is None else timeout_s, on_message
                )

    def reset(self) -> None:
        """Replace the process group of the ranks without restarting the processes."""
        with self._lock:
            if not self._workers:
                return
            self._epoch += 1
            with self._killing_on_error():
                self._send_all("reset", [self._store()] * self.world_size)
                self._collect("reset", self._start_timeout_s)

    def restart(self) -> None:
        """End the workers; the next run starts new ones."""
        with self._lock:
            worker_process.kill_all(self._workers)

    def interrupt(self) -> None:
        """End the workers, even during another thread's run, which then fails."""
        for worker in list(self._workers):
            with contextlib.suppress(OSError):
                worker.process.kill()

    def close(self) -> None:
        """End all workers for good; further calls of this method have no effect."""
        with self._lock:
            self._closed = True
            for worker in self._workers:
                with contextlib.suppress(OSError, ValueError):
                    worker.connection.send_bytes(pickle.dumps(("exit", None)))
            deadline = time.monotonic() + worker_process.EXIT_S
            for worker in self._workers:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    worker.process.wait(timeout=max(0.0, deadline - time.monotonic()))
            self._finalizer()

    def _store(self) -> str:
        """Return the path of the file through which the ranks form their process group."""
        return str(self._directory / f"store-{self._epoch}")

    def _setup(self, rank: int) -> dict[str, Any]:
        return {
            "rank": rank,
            "world_size": self.world_size,
            "core": None if self._cores is None else self._cores[rank],
            "backend": self.backend,
            "gpu": 0 if self.share_gpu else rank if self.backend == "nccl" else None,
            "store": self._store(),
            "timeout_s": self.timeout_s,
        }

    def _send_all(self, verb: str, contents: Sequence[Any]) -> None:
        for worker, content in zip(self._workers, contents, strict=True):
            # If a worker died between runs, the wait for its answer reports it.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                worker.connection.send_bytes(pickle.dumps((verb, content)))

    def _collect(
        self, task: str, timeout_s: float, on_message: Callable[[int, Any], None] | None = None
    ) -> list[Any]:
        """Wait for all ranks and return their results; on a failure, reset or kill the workers and raise."""
        pending = {worker.connection: rank for rank, worker in enumerate(self._workers)}
        results: list[Any] = [None] * self.world_size
        failure: worker_process.RankError | None = None
        died = False
        timeout = worker_process.Timeout(timeout_s)
        while pending:
            ready = timeout.wait(list(pending))
            if not ready:
                break
            for item in ready:
                rank = pending.pop(item)
                try:
                    verdict, content = pickle.loads(item.recv_bytes())
                except (EOFError, OSError):
                    died = True
                    # Another rank's error may only report that this one is gone, and may arrive first.
                    if failure is None or failure.kind != "died":
                        failure = worker_process.died_during(self._workers[rank], rank, task)
                except Exception as error:
                    failure = failure or worker_process.RankError(
                        f"rank {rank}: the result of {task} cannot be unpickled ({error}); return plain data",
                        rank=rank,
                        kind="raised",
                    )
                else:
                    if verdict == "told":
                        pending[item] = rank
                        timeout.renew()
                        if on_message is not None:
                            on_message(rank, content)
                    elif verdict == "ok":
                        results[rank] = content
                    else:
                        failure = failure or worker_process.raised_in(rank, task, content)
            if failure is not None:
                timeout.at_most(_GRACE_S)
        if failure is None and pending:
            failure = worker_process.hangs_in(
                {rank: self._workers[rank] for rank in sorted(pending.values())}, task, timeout_s
            )
        if failure is None:
            return results
        if pending or died or task in ("start", "reset"):
            worker_process.kill_all(self._workers)
        else:
            self.reset()
        raise failure from failure.cause

    @contextlib.contextmanager
    def _killing_on_error(self) -> Iterator[None]:
        """Kill the workers on an error, so that no unread answers remain."""
        try:
            yield
        except worker_process.RankError:
            raise  # _collect has already cleaned up the pool
        except BaseException:
            worker_process.kill_all(self._workers)
            raise


def _clean_up(workers: list[worker_process.WorkerProcess], directory: Path) -> None:
    worker_process.kill_all(workers)
    shutil.rmtree(directory, ignore_errors=True)


def _reference(function: Callable[..., Any]) -> tuple[str, str]:
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    loaded = sys.modules.get(module or "")
    if module == "__main__" and getattr(loaded, "__spec__", None) is not None:
        module = loaded.__spec__.name  # type: ignore[union-attr]  # python -m package.module
    if module in (None, "__main__") or not name or "<" in name:
        raise MeasurementError(
            f"{name or function!r} of {module} cannot be run on other ranks: they import it by name;"
            " define it at the top level of a module, not in a script, function or lambda"
        )
    return str(module), name
