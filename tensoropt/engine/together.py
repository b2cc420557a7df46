"""Operations that all ranks must do together outside of the plan's own steps, and for which no rank waits in
vain.

Parts of a plan's parameters lie on other ranks, so a whole state dict, or the value of a penalty on
parameters, needs all of them. Scripts like to do such things only on rank 0; a collective would then wait
forever. Here a waiting rank checks whether another one has continued without it, and says so.
"""

from __future__ import annotations

import atexit
import contextlib
import time
import weakref
from typing import Any

import torch
import torch.distributed as dist

from tensoropt.errors import PlanError

LOOKS_AFTER_S, SURE_AFTER_S = 1.0, 3.0
"""When a waiting rank begins to look for ranks that have gone on, and how long it sees one before it says so:
what that rank did before may still be under way."""
_alive: weakref.WeakSet[JobRanks] = weakref.WeakSet()


class JobRanks:
    """The ranks of a job, for what their scripts do at the same time. All ranks must make it."""

    def __init__(self) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        # On the host, and of its own: what one rank alone sends here meets nothing of the plan's.
        # A fake rank has no others beside it, and no network that gloo could use.
        self._fake = dist.get_backend() == "fake"
        self._group: Any = dist.new_group(backend=None if self._fake else "gloo")
        self._store: Any = dist.distributed_c10d._get_default_store()
        # The same on all ranks, and no other group's.
        self._name = f"tensoropt/{self._group.group_name}"
        self._calls = 0
        if not _alive:
            atexit.register(leave)
        _alive.add(self)

    def went_on(self) -> None:
        """Record that this rank begins another call of the model."""
        self._calls += 1
        if self._fake:
            return
        self._store.set(f"{self._name}/calls/{self.rank}", str(self._calls))

    def summed(self, value: torch.Tensor, what: str, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        """Return a value summed over all ranks, on its device.

        Args:
            what: what the ranks do, for people, with what to do if only some of them do it.

        Raises:
            PlanError: another rank has gone on without it.
        """
        # A copy even on the host: the script's own value must not change.
        found = value.detach().to("cpu", copy=True)
        work = dist.all_reduce(found, op=op, group=self._group, async_op=True)
        self._wait(work, what)
        return found.to(value.device)

    def meet(self, what: str) -> None:
        """Wait until all ranks are here.

        Raises:
            PlanError: another rank has gone on without it.
        """
        self.summed(torch.zeros(1), what)

    def _wait(self, work: Any, what: str) -> None:
        began = looked = time.monotonic()
        gone_since: float | None = None
        while not work.is_completed():
            now = time.monotonic()
            time.sleep(0.0 if now - began < 1e-3 else 1e-4 if now - began < 0.1 else 1e-2)
            if now - began < LOOKS_AFTER_S or now - looked < LOOKS_AFTER_S / 4:
                continue
            looked = now
            gone = self._gone_on()
            if gone is None:
                gone_since = None
            elif gone_since is None:
                gone_since = now
            elif now - gone_since > SURE_AFTER_S:
                raise PlanError(f"rank {gone[0]} {gone[1]} while rank {self.rank} waits for it in {what}")
        try:
            work.wait()
        except RuntimeError as error:
            raise PlanError(
                f"another rank has left the job while rank {self.rank} waits in {what}"
            ) from error

    def _gone_on(self) -> tuple[int, str] | None:
        """Return a rank that is ahead of this one, and what it does."""
        for rank in range(self.world):
            if rank == self.rank:
                continue
            if self._store.check([f"{self._name}/left/{rank}"]):
                return rank, "has left the job"
            key = f"{self._name}/calls/{rank}"
            if self._store.check([key]) and int(self._store.get(key)) > self._calls:
                return rank, "has gone on to the next call of the model"
        return None

    def left(self) -> None:
        """Record that this rank has nothing more to do here."""
        # A job that has ended has no store any more.
        with contextlib.suppress(RuntimeError):
            self._store.set(f"{self._name}/left/{self.rank}", "1")


def leave() -> None:
    """Tell ranks that wait for this one that it is leaving the job."""
    for together in list(_alive):
        together.left()
