"""Ranks on all hosts of a job that ``torchrun`` started with one process per device.

    torchrun --nnodes 2 --nproc-per-node 8 ... -m tensoropt measure links --cluster hosts.yaml

The first process runs the command. The others wait for functions that it sends over torch.distributed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from tensoropt.cluster import Cluster, load_cluster, pin_rank, rank_cores
from tensoropt.errors import ClusterError
from tensoropt.ranks import worker
from tensoropt.ranks.kernel_settings import KernelSettings
from tensoropt.ranks.pool import RankPool
from tensoropt.ranks.worker_process import raised_in

_SIOCGIFADDR = 0x8915
"""The ioctl for the address of a network interface (netdevice(7))."""
_VARIABLES = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
_COMMAND_DAYS = 30
"""The days that other ranks wait for the next call."""


def in_job() -> bool:
    """Return whether torchrun's variables say that this process is one of several in a job."""
    return os.environ.keys() >= _VARIABLES and int(os.environ["WORLD_SIZE"]) > 1


def gathered_from_hosts(find: Callable[[], Any]) -> list[Any]:
    """Call ``find`` once per host of the job; return all results. A ClusterError of one host is raised on all
    ranks."""
    own = _of_host(find)
    with _joined("gloo") as control:
        return _of_hosts(own, control)


def _of_host(find: Callable[[], Any]) -> Any:
    """Call ``find`` on a host's first process; return (result,) or the error's text. Others return None."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return None
    try:
        return (find(),)
    except ClusterError as error:
        return str(error)


def _of_hosts(own: Any, control: Any) -> list[Any]:
    values = _gathered(own, control)
    if refused := [f"rank {rank}: {one}" for rank, one in enumerate(values) if isinstance(one, str)]:
        raise ClusterError(refused[0])
    return [one[0] for one in values if one is not None]


def _gathered(own: Any, control: Any) -> list[Any]:
    """Return the value ``own`` of every process, in the order of ranks; all processes must call this."""
    import torch.distributed as dist

    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, own, group=control)
    return values


@contextmanager
def _joined(backend: str) -> Iterator[Any]:
    import torch.distributed as dist

    if interface := _interface():
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    dist.init_process_group(backend)
    try:
        yield dist.new_group(backend="gloo", timeout=timedelta(days=_COMMAND_DAYS))
    finally:
        dist.destroy_process_group()


def _interface() -> str:
    """Return gloo's network interface: ``$GLOO_SOCKET_IFNAME``, else the one that leads to the first host. If
    there is neither, return "", which lets gloo choose."""
    if given := os.environ.get("GLOO_SOCKET_IFNAME"):
        return given
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((os.environ["MASTER_ADDR"], 9))  # sends nothing
        except (KeyError, OSError):
            return ""
        own = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no address
                packed = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(packed[20:24]) == own and name != "lo":
                    return name
    return ""


class HostRanks(RankPool):
    """A pool of ranks made of the processes of a ``torchrun`` job; rank 0 sends the others their work.

    Args:
        clusters: the devices of each host as a cluster, in the order of ranks.
        control: process group over which functions and results are sent.
    """

    def __init__(self, clusters: Sequence[Cluster], backend: str, control: Any):
        import torch.distributed as dist

        super().__init__(dist.get_world_size(), backend=backend)
        self._clusters, self._control = tuple(clusters), control

    @property
    def hosts(self) -> int:
        return len(self._clusters)

    def check(self, cluster: Cluster) -> None:
        """Raise ClusterError unless ``cluster`` has the devices of this job's hosts."""
        each = self.world_size // self.hosts
        asked = [kind.name for kind in cluster.devices]
        if asked != [kind.name for host in self._clusters for kind in host.devices[:each]]:
            each_has = "; ".join(host.counts for host in self._clusters)
            raise ClusterError(
                f"{cluster.name} has {cluster.counts}, but the {self.hosts} hosts of this job have "
                f"{each_has}, with {each} processes each; start one process per device (torchrun --nnodes "
                f"{self.hosts} --nproc-per-node {cluster.device_count // self.hosts} ...), with the cluster "
                "file that '-m tensoropt measure host --out hosts.yaml' writes on these hosts"
            )

    def start(self) -> None:
        """Do nothing: ``torchrun`` has started the ranks."""

    def restart(self) -> None:
        """Do nothing: only ``torchrun`` can start a rank again."""

    def close(self) -> None:
        """Do nothing: the ranks serve until the command ends."""

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout_s: float | None = None,
        on_message: Callable[[int, Any], None] | None = None,
    ) -> list[Any]:
        """Call as :meth:`RankPool.run` does, but without time-out (``timeout_s`` is ignored), and with all
        messages at the end."""
        with self._lock:
            _send((KernelSettings.now(), function, args), self._control)
            answers = _gathered(_answer(function, args), self._control)
        for rank, (messages, *_) in enumerate(answers):
            for message in messages:
                if on_message is not None:
                    on_message(rank, message)
        for rank, (_, failure, _) in enumerate(answers):
            if failure is not None:
                raise raised_in(rank, function.__qualname__, failure)
        return [result for *_, result in answers]


def _send(call: Any, control: Any) -> Any:
    """Broadcast ``call`` from the first process to all others; every process returns it."""
    import torch.distributed as dist

    sent = [call]
    dist.broadcast_object_list(sent, 0, group=control)
    return sent[0]


def _answer(function: Callable[..., Any], args: tuple) -> tuple[list, Any, Any]:
    """Call a function on this rank; return (its messages, its failure or None, its result)."""
    import torch.distributed as dist

    messages: list[Any] = []
    with worker.heard_by(messages.append):
        try:
            return messages, None, function(dist.get_rank(), dist.get_world_size(), *args)
        except Exception as error:
            return messages, worker.failure_of(error), None


_job: list[HostRanks] = []
"""The ranks of the job whose first process this is; at most one pool."""


def job_ranks() -> HostRanks | None:
    """Return all ranks of the job if :func:`run_in_job` runs a command in this process, else None."""
    return _job[0] if _job else None


def _pinned() -> str:
    """Pin this process to a GPU or core for measurements; return the backend, ``nccl`` or ``gloo``."""
    import torch

    local, ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        torch.cuda.set_device(local)
        return "nccl"
    cores = rank_cores(ranks)
    pin_rank(None if cores is None else cores[local])
    torch.set_num_threads(1)
    return "gloo"


def run_in_job(command: Callable[[], int]) -> int:
    """Run a command on the first process of a job, with all processes as its ranks; return the exit code.

    Raises:
        ClusterError: a host's devices cannot be found.
    """
    rank = int(os.environ.get("RANK", "0"))
    if not in_job() or os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
        return 0 if rank else command()  # a single host's ranks are started by whoever needs them
    own = _of_host(lambda: load_cluster("local").to_dict())  # with all cores, so before this rank is pinned
    backend = _pinned()
    with _joined(backend) as control:
        hosts = _of_hosts(own, control)
        worker.is_on(len(hosts))
        if rank:
            while (call := _send(None, control)) is not None:
                settings, function, args = call
                settings.apply()
                _gathered(_answer(function, args), control)
            return 0
        try:
            _job.append(HostRanks([Cluster.from_dict(data) for data in hosts], backend, control))
            return command()
        finally:
            _job.clear()
            _send(None, control)
