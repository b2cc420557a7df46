"""Ranks on all hosts of a job: the pool of its first process has workers on every host.

    torchrun --nnodes 2 --nproc-per-node 1 ... -m tensoropt measure links --cluster hosts.yaml

The first process that ``torchrun`` starts on a host is its agent: it starts the workers there, pinned as on
one host, and passes on the messages between them and the pool. The first host's agent runs the command.
Agents show that they belong together by a key that they exchange in the job's process group; after that,
functions and results are pickled, so that hosts trust one another, as those of any ``torch.distributed`` job
do.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import signal
import socket
import struct
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, NamedTuple

from tensoropt.cluster import Cluster, gpu_rank_cores, load_cluster, rank_cores
from tensoropt.errors import ClusterError, MeasurementError
from tensoropt.ranks.worker_process import WorkerProcess, start_worker

_SIOCGIFADDR = 0x8915
"""The request for the address of a network interface (netdevice(7))."""
_VARIABLES = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
_KEY_BYTES = 32
_KILLED_S = 10.0
"""The seconds in which the messages of a killed worker must end; an assumption."""
_GONE = (OSError, EOFError, MeasurementError)
"""What a request raises if the agent, or the worker, is no longer there."""


def in_job() -> bool:
    """Return whether ``torchrun``, or what sets the same variables, has started this process beside
    others."""
    return os.environ.keys() >= _VARIABLES and int(os.environ["WORLD_SIZE"]) > 1


def gathered(own: Any) -> list[Any]:
    """Return what each process of the job gives, in the order of ranks; all of them call it."""
    import torch.distributed as dist

    if interface := _interface():
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    dist.init_process_group("gloo")
    try:
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, own)
    finally:
        dist.destroy_process_group()
    return told


def gathered_from_hosts(find: Callable[[], Any]) -> list[Any]:
    """Return what ``find`` returns on each host of the job, called by its first process.

    Raises:
        ClusterError: it does on some host; on every rank.
    """
    own: Any = None
    if os.environ.get("LOCAL_RANK", "0") == "0":
        try:
            own = (find(),)
        except ClusterError as error:
            own = str(error)
    told = gathered(own)
    if refused := [f"rank {rank}: {one}" for rank, one in enumerate(told) if isinstance(one, str)]:
        raise ClusterError(refused[0])
    return [one[0] for one in told if one is not None]


def _interface() -> str:
    """Return the network interface over which this host reaches the others: the one that gloo is told of, or
    that of the address from which the job's first host is reached; "" if gloo should decide."""
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


# -- the first process ------------------------------------------------------------------------------


class _Meeting(NamedTuple):
    """Where agents meet the first process, and the key by which it knows them."""

    port: int
    key: bytes


class StartedRank(NamedTuple):
    """A rank's worker, and the cores that it may use there; None if none were chosen."""

    worker: WorkerProcess | RemoteWorker
    cores: tuple[int, ...] | None


@dataclass(frozen=True)
class _RemoteProcess:
    """A worker's process on another host, which its agent looks after."""

    ask: Callable[..., Any]
    pid: int

    def kill(self) -> None:
        with contextlib.suppress(*_GONE):
            self.ask("kill", self.pid)

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(*_GONE):
            self.ask("signal", self.pid, number)

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit code; raises what :meth:`subprocess.Popen.wait` raises."""
        code = None
        with contextlib.suppress(*_GONE):
            code = self.ask("wait", self.pid, timeout)
        if code is None:
            raise subprocess.TimeoutExpired("worker", timeout or 0.0)
        return int(code)


@dataclass(frozen=True)
class RemoteWorker:
    """A worker on another host, as a pool sees it.

    Attributes:
        process, connection: as those of :class:`~tensoropt.ranks.worker_process.WorkerProcess`.
    """

    process: _RemoteProcess
    connection: Connection

    def kill(self) -> None:
        """End the process, whatever it is doing, and release its connection."""
        with contextlib.suppress(*_GONE):
            self.process.ask("end", self.process.pid)
        self.connection.close()

    def output(self) -> str:
        """Return the output that the worker has printed since it started."""
        try:
            return str(self.process.ask("output", self.process.pid))
        except _GONE:
            return ""


class JobHosts:
    """The hosts of a job, as its first process sees them.

    Args:
        clusters: what each host has, in the order of ranks.
        listener: where agents and workers connect. agents: the connection to that of each host but the first.
    """

    def __init__(self, clusters: Sequence[Cluster], listener: Listener, agents: Sequence[Connection]):
        self.clusters = tuple(clusters)
        self._listener, self._agents = listener, tuple(agents)
        self._lock = threading.RLock()
        self.address = os.environ["MASTER_ADDR"]

    def __len__(self) -> int:
        return len(self.clusters)

    def check(self, cluster: Cluster) -> None:
        """Refuse a cluster that is not the hosts of this job.

        Raises:
            ClusterError: its devices are others, or not as many on each host.
        """
        each = cluster.device_count // len(self)
        asked = [kind.name for kind in cluster.devices]
        found = [kind.name for host in self.clusters for kind in host.devices[:each]]
        if asked != found:
            each_has = "; ".join(host.counts for host in self.clusters)
            raise ClusterError(
                f"{cluster.name} has {cluster.counts}, and the {len(self)} hosts of this job have, each, "
                f"{each_has}; write their file with: torchrun --nnodes {len(self)} --nproc-per-node 1 ... "
                "-m tensoropt measure host --out hosts.yaml"
            )

    def start(self, rank: int, ranks: int, log: Path, threads: int, backend: str) -> StartedRank:
        """Start the worker of a rank on its host.

        Raises:
            MeasurementError: the host's agent is gone, or cannot start it.
        """
        each = ranks // len(self)
        host, local_rank = divmod(rank, each)
        if host == 0:
            worker = start_worker(log, (), threads, _interface())
            return StartedRank(worker, _cores(local_rank, each, threads, backend))
        with self._lock:
            try:
                pid, cores = self._ask(host, "start", local_rank, each, threads, backend)
                connection = self._listener.accept()
            except (EOFError, OSError) as error:
                raise MeasurementError(
                    f"the agent of host {host} is gone ({error}); start the job anew"
                ) from None
        process = _RemoteProcess(lambda *request: self._ask(host, *request), pid)
        return StartedRank(RemoteWorker(process, connection), cores)

    def _ask(self, host: int, *request: Any) -> Any:
        """Return an agent's answer to a request, one at a time."""
        with self._lock:
            self._agents[host - 1].send(request)
            verdict, answer = self._agents[host - 1].recv()
        if verdict == "error":
            raise MeasurementError(f"host {host}: {answer}")
        return answer


_job: list[JobHosts] = []
"""The hosts of the job whose first process this is, if there are several; one per process, as torchrun's
variables are."""


def job_hosts() -> JobHosts | None:
    """Return the hosts of the job whose command this process runs; None outside of :func:`run_in_job` and on
    a single host."""
    return _job[0] if _job else None


def run_in_job(command: Callable[[], int]) -> int:
    """Return the exit code of a command of which all processes of a job are told: the first one runs it, and
    the first one on each other host starts workers for it; the others end at once.

    Raises:
        ClusterError: what a host has cannot be found.
    """
    if not in_job():
        return command()
    rank, key = int(os.environ["RANK"]), secrets.token_bytes(_KEY_BYTES)
    with ExitStack() as stack:
        listener = stack.enter_context(Listener(("", 0), authkey=key)) if rank == 0 else None
        meeting = None if listener is None else _Meeting(listener.address[1], key)
        told = gathered_from_hosts(lambda: (rank, load_cluster("local").to_dict(), meeting))
        if listener is None:
            numbers = [of for of, *_ in told]
            if rank in numbers:
                _serve(numbers.index(rank), told[0][-1])
            return 0
        clusters = [Cluster.from_dict(data) for _, data, _ in told]
        if len(clusters) > 1:
            agents = dict(_greeted(stack, listener) for _ in clusters[1:])
            _job.append(JobHosts(clusters, listener, [agents[number] for number in sorted(agents)]))
            stack.callback(_job.clear)
        return command()


def _greeted(stack: ExitStack, listener: Listener) -> tuple[int, Connection]:
    """Return the number of a host whose agent connects, and the connection, which closes with the stack."""
    connection = stack.enter_context(listener.accept())
    return int(connection.recv()), connection


# -- agents -----------------------------------------------------------------------------------------


def _cores(local_rank: int, ranks: int, threads: int, backend: str) -> tuple[int, ...] | None:
    """Return the cores of one of this host's ranks, as a pool on one host chooses them."""
    cores = gpu_rank_cores(ranks) if backend == "nccl" else rank_cores(ranks, threads)
    return None if cores is None else cores[local_rank]


def _serve(number: int, meeting: _Meeting) -> None:
    """Start workers on host ``number`` for the first process, until it ends."""
    address = (os.environ["MASTER_ADDR"], meeting.port)
    with Client(address, authkey=meeting.key) as requests, _Agent(address, meeting.key) as agent:
        requests.send(number)
        with contextlib.suppress(EOFError, OSError):
            while True:
                verb, *content = requests.recv()
                try:
                    requests.send(("ok", getattr(agent, verb)(*content)))
                except Exception as error:
                    requests.send(("error", f"{type(error).__name__}: {error}"))
                    continue
                if verb == "start":
                    agent.connect()


class _Agent:
    """The workers that were started on this host, by process id.

    Args:
        address, key: those of the first process.
    """

    def __init__(self, address: tuple[str, int], key: bytes):
        self._address, self._key = address, key
        self._workers: dict[int, WorkerProcess] = {}
        self._passing: dict[int, list[threading.Thread]] = {}
        self._logs = tempfile.TemporaryDirectory(prefix="tensoropt-agent-")

    def __enter__(self) -> _Agent:
        return self

    def __exit__(self, *error: object) -> None:
        for pid in list(self._workers):
            self.end(pid)
        self._logs.cleanup()

    def start(
        self, local_rank: int, ranks: int, threads: int, backend: str
    ) -> tuple[int, tuple[int, ...] | None]:
        """Start a worker; return its process id and the cores that it may use."""
        log = Path(self._logs.name) / f"rank-{local_rank}-{len(self._passing)}.log"
        worker = start_worker(log, (), threads, _interface())
        self._workers[worker.process.pid] = worker
        return worker.process.pid, _cores(local_rank, ranks, threads, backend)

    def connect(self) -> None:
        """Pass on messages between the worker that was started last and the first process."""
        pid, worker = next(reversed(self._workers.items()))
        there = Client(self._address, authkey=self._key)
        both = (worker.connection, there), (there, worker.connection)
        self._passing[pid] = [
            threading.Thread(target=_pass_on, args=ends, daemon=True, name="messages") for ends in both
        ]
        for thread in self._passing[pid]:
            thread.start()

    def kill(self, pid: int) -> None:
        """Kill a worker, which still counts as one."""
        with contextlib.suppress(OSError):
            self._workers[pid].process.kill()

    def signal(self, pid: int, number: int) -> None:
        """Send a worker a signal."""
        self._workers[pid].process.send_signal(signal.Signals(number))

    def wait(self, pid: int, timeout: float | None) -> int | None:
        """Return the exit code of a worker; None if it does not end in time."""
        try:
            return self._workers[pid].process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def output(self, pid: int) -> str:
        """Return what a worker has printed."""
        return self._workers[pid].output()

    def end(self, pid: int) -> None:
        """Kill a worker, and release all that it has."""
        self.kill(pid)
        worker = self._workers.pop(pid)
        # Its messages end with it, so that nobody reads from what is closed now.
        for thread in self._passing.get(pid, ()):
            thread.join(_KILLED_S)
        worker.kill()


def _pass_on(source: Connection, target: Connection) -> None:
    """Pass on messages until one side ends, then end the other."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            target.send_bytes(source.recv_bytes())
    for end in (source, target):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(end.fileno())) as own:
            own.shutdown(socket.SHUT_RDWR)
