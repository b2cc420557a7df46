"""The manager of jobs: it starts, watches and cancels their processes, and stores jobs in folders."""

from __future__ import annotations

import contextlib
import multiprocessing
import secrets
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from tensoropt.errors import TensorOptError
from tensoropt.exploration.cluster_offers import folders_in
from tensoropt.question.question import Question

from ..safety import LOG as LOGGER
from .estimate import CompletedJob, Estimate, estimate, request_key
from .record import LOG, Job, State, is_alive, read_job, tail, this_server
from .request import Request, written
from .uploads import Uploads
from .worker import data_folder, run

_SAVE_EVERY_S = 1.0
KEPT_S = 600.0
"""The time in seconds for which a deleted job can be restored."""
_MOST_RUNNING = 2
"""Maximum number of concurrent jobs; a job that measures this machine's ranks runs alone, undisturbed."""


Growing = tuple[Sequence[float], Sequence[float], int]
"""Memory and time of some of the points that a running job has found, and the number of all points."""


@dataclass
class _Running:
    process: Any
    messages: Connection
    cancelled: bool = False
    saved: float = 0.0
    points: Growing | None = None
    first: str = ""


class JobManager:
    """The jobs stored in one folder.

    Args:
        root: a private folder for jobs and uploads; by default next to the profile store.
        target: the function that a job's process runs, which tests replace.
        own: the folder whose Python files may define models; None to run none.
    """

    def __init__(self, root: Path | None = None, target: Callable[..., None] = run, own: Path | None = None):
        self.root = root or data_folder()
        self.folder = self.root / "jobs"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.root.chmod(0o700)
        self.uploads = Uploads(self.root / "uploads", own)
        self.target = target
        # Not fork: a forked child would inherit locks of the server's threads.
        self._context = multiprocessing.get_context("spawn")
        self._lock = threading.RLock()
        self._server = this_server()
        self._running: dict[str, _Running] = {}
        self._jobs: dict[str, Job] = {}
        self._closed = False
        self.forgotten_folder = self.root / "forgotten"
        self._forgotten: dict[str, tuple[Job, float]] = {}
        # Deleted jobs that a killed dashboard left behind; nobody can restore them.
        for child in self.forgotten_folder.glob("*"):
            if time.time() - child.stat().st_ctime > KEPT_S:
                shutil.rmtree(child, ignore_errors=True)
        for child in self.folder.iterdir():
            job = read_job(child)
            if job is not None:
                self._jobs[job.id] = self._ended_if_lost(job)

    def _ended_if_lost(self, job: Job) -> Job:
        """Return the job, marked as interrupted if its server died while it ran."""
        if not job.active or is_alive(job.server):
            return job
        job = replace(job, state="interrupted", error="the dashboard ended meanwhile", ended=time.time())
        self._save(job)
        return job

    # -- queries of pages -------------------------------------------------------------------------------

    def jobs(self) -> list[Job]:
        """Return all jobs, newest first."""
        with self._lock:
            for id, job in self._jobs.items():
                if job.active and job.server != self._server:  # another dashboard's: its file is more recent
                    self._jobs[id] = self._ended_if_lost(read_job(self.folder / id) or job)
            return sorted(self._jobs.values(), key=lambda j: j.created, reverse=True)

    def sign(self) -> str:
        """Return a text that changes whenever a job has changed, and every second while one runs."""
        jobs = self.jobs()
        shown = [(job.id, job.state, job.error) for job in jobs], [job.id for job in self.forgotten()]
        moment = int(time.time()) if any(job.active for job in jobs) else 0
        return f"{zlib.crc32(repr(shown).encode()):08x}-{moment}"

    def results(self) -> list[tuple[str, Path]]:
        """Return (library key, folder) of all finished explorations, newest first; some jobs have several."""
        folders = []
        for job in self.jobs():
            for folder in folders_in(self.folder / job.id) if job.state == "done" else ():
                part = "" if folder.name == job.id else f"-{folder.name}"
                folders.append((f"job-{job.id}{part}", folder))
        return folders

    def log(self, id: str) -> str:
        """Return the end of a job's log; "" for an unknown job."""
        return tail(self.folder / id) if id in self._jobs else ""

    def first(self, id: str) -> str:
        """Return a running job's early sentence on usual strategies (such as FSDP); "" if there is none."""
        running = self._running.get(id)
        return "" if running is None else running.first

    def growing(self, id: str) -> Growing | None:
        """Return the points that a running job has found so far; None if there are none."""
        running = self._running.get(id)
        return None if running is None else running.points

    def submit(self, request: Request) -> Job:
        """Queue a request, or return the job that already runs it, as after a second press of a button.

        Raises:
            TensorOptError: the job cannot be written to disk.
        """
        data = request.question.data()
        if same := [job for job in self.jobs() if job.active and job.question == data]:
            return same[0]
        return self._queue(request.title, request.measures, request.question)

    def _queue(self, title: str, measures: bool, question: Question) -> Job:
        id = secrets.token_hex(6)
        folder = self.folder / id
        folder.mkdir(mode=0o700)
        try:
            job = Job(
                id,
                title,
                tuple(written(question, folder)),
                measures=measures,
                created=time.time(),
                server=self._server,
                question=question.data(),
            )
            job.save(folder)
        except (TensorOptError, OSError) as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise (
                error
                if isinstance(error, TensorOptError)
                else TensorOptError(f"cannot write into {self.folder} ({error.strerror}); free some space")
            ) from error
        with self._lock:
            self._jobs[id] = job
            self._start_waiting()
        return self._jobs[id]

    def again(self, id: str) -> Job | None:
        """Queue a finished job again and keep its old result; None if the job is running or unknown.

        Raises:
            TensorOptError: another version stored the job, or it cannot be written to disk.
        """
        job = self._jobs.get(id)
        if job is None or job.active:
            return None
        return self._queue(job.title, job.measures, Question.of(job.question))

    def job(self, id: str) -> Job | None:
        """Return the job with this id; None if unknown."""
        return next((job for job in self.jobs() if job.id == id), None)

    def took(self, job: Job) -> float | None:
        """Return the seconds that the last finished job with the same request took; None if there is none."""
        alike = estimate(request_key(job.question), self._runs(but=job.id))
        return alike.last_s if alike is not None and alike.same else None

    def estimate(self, wanted: Request) -> Estimate | None:
        """Return the expected duration of a request, from similar jobs; None if there are none."""
        return estimate(request_key(wanted.question.data()), self._runs())

    def _runs(self, but: str = "") -> list[CompletedJob]:
        """Return the requests and durations of finished jobs, except job ``but``, newest first."""
        runs = []
        for job in self.jobs():
            if job.state != "done" or job.id == but or job.started is None or job.ended is None:
                continue
            with contextlib.suppress(TensorOptError):  # another version's question
                key = request_key(Question.of(job.question).data())
                runs.append(CompletedJob(key, job.ended - job.started))
        return runs

    def cancel(self, id: str) -> None:
        """End a job and every process that it started; do nothing if the job has ended or is unknown."""
        with self._lock:
            job, running = self._jobs.get(id), self._running.get(id)
            if job is not None and job.state == "queued" and job.server == self._server:
                self._update(replace(job, state="cancelled", ended=time.time()))
            if running is None:
                return
            running.cancelled = True
        # Outside the lock: waiting for processes to end must not block pages.
        _kill_tree(running.process.pid)

    def forget(self, id: str) -> None:
        """Delete a finished job from the list; :meth:`restore` can undo that for ten minutes."""
        with self._lock:
            job = self._jobs.get(id)
            if job is None or job.active:
                return
            try:
                self.forgotten_folder.mkdir(exist_ok=True)
                (self.folder / id).rename(self.forgotten_folder / id)
            except OSError as error:
                raise TensorOptError(
                    f"could not delete '{job.title}': {self.folder / id} cannot be moved ({error.strerror})"
                ) from error
            del self._jobs[id]
            self._forgotten[id] = (job, time.time())
        self._delete_forgotten(KEPT_S)

    def forgotten(self) -> list[Job]:
        """Return the jobs that :meth:`restore` can restore, the last deleted first."""
        self._delete_forgotten(KEPT_S)
        with self._lock:
            latest = sorted(self._forgotten.values(), key=lambda item: item[1], reverse=True)
            return [job for job, _ in latest]

    def restore(self, id: str) -> None:
        """Restore a deleted job with its folder; do nothing if it is unknown."""
        with self._lock:
            job, _ = self._forgotten.pop(id, (None, 0.0))
            if job is None:
                return
            (self.forgotten_folder / id).rename(self.folder / id)
            self._jobs[id] = job

    def _delete_forgotten(self, kept_s: float) -> None:
        """Remove jobs that were deleted longer than ``kept_s`` ago."""
        with self._lock:
            old = [id for id, (_, since) in self._forgotten.items() if time.time() - since >= kept_s]
            for id in old:
                del self._forgotten[id]
        for id in old:
            shutil.rmtree(self.forgotten_folder / id, ignore_errors=True)

    def close(self) -> None:
        """End everything that runs, and remove deleted jobs; called when the server ends."""
        self._delete_forgotten(0.0)
        with self._lock:
            self._closed = True
            running = list(self._running.values())
        for worker in running:
            _kill_tree(worker.process.pid)
        for worker in running:
            worker.process.join(timeout=10)

    # -- running --------------------------------------------------------------------------------------

    def _start_waiting(self) -> None:
        """Start queued jobs, oldest first, as far as the limits allow."""
        mine = sorted((j for j in self._jobs.values() if j.server == self._server), key=lambda j: j.created)
        for job in mine:
            active = [self._jobs[id] for id in self._running]
            alone = any(j.measures for j in active) or (job.measures and active)
            if job.state != "queued":
                continue
            # `return`, not `continue`: later jobs may not overtake one that must run alone, or it would never
            # start.
            if alone or len(active) >= _MOST_RUNNING or self._closed:
                return
            self._start(job)

    def _start(self, job: Job) -> None:
        folder = self.folder / job.id
        reader, writer = self._context.Pipe(duplex=False)
        process = self._context.Process(
            target=self.target,
            args=(list(job.arguments), str(folder / LOG), writer, self._server[0]),
            name=f"tensoropt-job-{job.id}",
        )
        process.start()
        writer.close()  # only the child's copy stays open, so its end closes the connection
        self._running[job.id] = _Running(process, reader)
        self._update(replace(job, state="running", started=time.time()))
        threading.Thread(target=self._watch, args=(job.id,), daemon=True).start()

    def _watch(self, id: str) -> None:
        """Read a job's messages until it ends, then record its outcome."""
        running = self._running[id]
        outcome: tuple[State, str] | None = None
        with contextlib.suppress(EOFError, OSError):
            while True:
                kind, content = running.messages.recv()
                if kind == "progress":
                    self._progress(id, running, *content)
                elif kind == "points":
                    running.points = content
                elif kind == "first":
                    running.first = str(content)
                else:
                    outcome = (kind, str(content))
        running.process.join()
        running.messages.close()
        with self._lock:
            self._running.pop(id, None)
            self._ended(self._jobs[id], running, outcome)
            self._start_waiting()

    def _progress(self, id: str, running: _Running, stage: str, done: int, total: int, what: str) -> None:
        with self._lock:
            job = self._jobs[id].progressed(stage, done, total, what[:200])
            self._jobs[id] = job
            # Reports come by the thousand; the file is for a successor server, not for the page.
            if (now := time.time()) - running.saved >= _SAVE_EVERY_S:
                running.saved = now
                self._save(job)

    def _ended(self, job: Job, running: _Running, outcome: tuple[State, str] | None) -> None:
        state: State = "failed"
        if outcome is not None:
            state, error = outcome
        else:
            error = f"its process ended without a result (exit code {running.process.exitcode}); " + (
                "see its log" if (running.process.exitcode or 0) > 0 else "out of memory, possibly"
            )
        if running.cancelled:
            state, error = "cancelled", ""
        elif self._closed and outcome is None:
            state, error = "interrupted", "the dashboard ended meanwhile"
        # Show an upload's own name, not the generated path in the message.
        for path, label in self.uploads.known().values():
            error = error.replace(str(path), label)
        self._update(replace(job, state=state, error=error, ended=time.time()))

    def _update(self, job: Job) -> None:
        self._jobs[job.id] = job
        self._save(job)

    def _save(self, job: Job) -> None:
        try:
            job.save(self.folder / job.id)
        except TensorOptError as error:
            LOGGER.warning("cannot save the state of job %s: %s", job.id, error)


def _kill_tree(pid: int) -> None:
    """Kill a child of this process and everything it started; do nothing if it has ended."""
    processes: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        child = psutil.Process(pid)
        if child.ppid() == psutil.Process().pid:  # otherwise the id now belongs to another process
            processes = [child, *child.children(recursive=True)]
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(processes, timeout=5)
