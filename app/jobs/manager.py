"""Jobs: started in spawned processes, watched, cancelled with all their children, remembered in folders."""

from __future__ import annotations

import contextlib
import multiprocessing
import secrets
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from tensoropt.errors import TensorOptError
from tensoropt.plan.cluster_offers import folders_in
from tensoropt.plan.question import Question

from ..safety import LOG as LOGGER
from .beside import shown_instead
from .estimate import Asked, CompletedJob, Estimate, asked, asked_in_words, estimate
from .record import LOG, Job, is_alive, read_job, tail, this_server
from .refill import question_of_job
from .request import Request, Wanted, written
from .uploads import Uploads
from .worker import data_folder, run

_SAVE_EVERY_S = 1.0
KEPT_S = 600.0
"""For so long a forgotten job can be brought back."""
_MOST_RUNNING = 2
"""Jobs at a time; one that measures this machine's ranks runs alone, or its figures would be wrong."""


@dataclass
class _Running:
    process: Any
    messages: Connection
    cancelled: bool = False
    saved: float = 0.0


class JobManager:
    """The jobs kept under one folder.

    Args:
        root: private folder for jobs and uploads; by default beside the profile store.
        target: what runs in the child, for tests.
    """

    def __init__(self, root: Path | None = None, target: Callable[..., None] = run):
        self.root = root or data_folder()
        self.folder = self.root / "jobs"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.root.chmod(0o700)
        self.uploads = Uploads(self.root / "uploads")
        self.target = target
        # Not fork: the server has threads, whose locks a forked child would inherit as they are.
        self._context = multiprocessing.get_context("spawn")
        self._lock = threading.RLock()
        self._server = this_server()
        self._running: dict[str, _Running] = {}
        self._jobs: dict[str, Job] = {}
        self._asked: dict[str, Asked] = {}
        self._closed = False
        self.forgotten_folder = self.root / "forgotten"
        self._forgotten: dict[str, tuple[Job, float]] = {}
        # Left by a dashboard that was killed: nobody can bring it back any more.
        for child in self.forgotten_folder.glob("*"):
            if time.time() - child.stat().st_ctime > KEPT_S:
                shutil.rmtree(child, ignore_errors=True)
        for child in self.folder.iterdir():
            job = read_job(child)
            if job is not None:
                self._jobs[job.id] = self._ended_if_lost(job)

    def _ended_if_lost(self, job: Job) -> Job:
        """A job that another, dead server was running when it died is interrupted."""
        if not job.active or is_alive(job.server):
            return job
        job = replace(job, state="interrupted", error="the dashboard ended while this ran", ended=time.time())
        self._save(job)
        return job

    # -- what pages ask -----------------------------------------------------------------------------

    def jobs(self) -> list[Job]:
        """All jobs, newest first."""
        with self._lock:
            for id, job in self._jobs.items():
                if job.active and job.server != self._server:  # another dashboard's: its file knows better
                    self._jobs[id] = self._ended_if_lost(read_job(self.folder / id) or job)
            return sorted(self._jobs.values(), key=lambda j: j.created, reverse=True)

    def sign(self) -> str:
        """Another text whenever there may be something new to show of the jobs: each second while one is at
        work."""
        jobs = self.jobs()
        told = [(job.id, job.state, job.error) for job in jobs], [job.id for job in self.forgotten()]
        moment = int(time.time()) if any(job.active for job in jobs) else 0
        return f"{zlib.crc32(repr(told).encode()):08x}-{moment}"

    def results(self) -> list[tuple[str, Path]]:
        """(key, folder) of what jobs left, newest first; several where a job explored parts of a cluster."""
        found = []
        for job in self.jobs():
            for folder in folders_in(self.folder / job.id) if job.state == "done" else ():
                part = "" if folder.name == job.id else f"-{folder.name}"
                found.append((f"job-{job.id}{part}", folder))
        return found

    def beside(self) -> Mapping[Path, Path]:
        """Per absolute folder of an exploration the one shown in its place, with planners beside it."""
        with self._lock:
            done = [job for job in self._jobs.values() if job.state == "done"]
        done.sort(key=lambda job: job.created, reverse=True)
        return shown_instead((job.arguments, self.folder / job.id) for job in done)

    def log(self, id: str) -> str:
        """The end of a job's log; "" for a job that is not known."""
        return tail(self.folder / id) if id in self._jobs else ""

    def submit(self, request: Wanted) -> Job:
        """Queue a request. Raises :class:`TensorOptError` if it cannot even be written down."""
        question = request.question if isinstance(request, Request) else None
        return self._queue(request.title, request.measures, question, request.arguments)

    def _queue(
        self, title: str, measures: bool, question: Question | None, words: Callable[[Path], list[str]]
    ) -> Job:
        """Queue a job; ``words`` gives those of its command line, of the folder of its result."""
        id = secrets.token_hex(6)
        folder = self.folder / id
        folder.mkdir(mode=0o700)
        try:
            job = Job(
                id,
                title,
                tuple(words(folder)),
                measures=measures,
                created=time.time(),
                server=self._server,
                question=None if question is None else question.data(),
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
        """Queue the same once more, beside what the job left; None for one that runs or is not known.

        Raises:
            TensorOptError: it cannot be written down.
        """
        job = self._jobs.get(id)
        if job is None or job.active:
            return None
        try:
            question = question_of_job(job)
        except TensorOptError:  # it does something else, or asks in words that only its own version knew
            return self._queue(job.title, job.measures, None, partial(_moved, job, self.folder / id))
        return self._queue(job.title, job.measures, question, partial(written, question))

    def job(self, id: str) -> Job | None:
        """The job called ``id``; None for one that is not known."""
        return next((job for job in self.jobs() if job.id == id), None)

    def took(self, job: Job) -> float | None:
        """Seconds that the last job that asked the same took to its end; None without one."""
        alike = estimate(self._asked_by(job), self._runs(but=job.id))
        return alike.last_s if alike is not None and alike.same else None

    def estimate(self, wanted: Request) -> Estimate | None:
        """How long a request will take, from what jobs like it took; None where there was none."""
        return estimate(asked(wanted.question.data()), self._runs())

    def _runs(self, but: str = "") -> list[CompletedJob]:
        """What jobs that came to their end asked, and the seconds they took; newest first."""
        runs = []
        for job in self.jobs():
            if job.state != "done" or job.id == but or job.started is None or job.ended is None:
                continue
            runs.append(CompletedJob(self._asked_by(job), job.ended - job.started))
        return runs

    def _asked_by(self, job: Job) -> Asked:
        """What a job asked, which never changes: at every key that is pressed it would be read again."""
        if job.id not in self._asked:
            try:
                self._asked[job.id] = asked(job.question or question_of_job(job).data())
            except (TensorOptError, KeyError, TypeError):  # another version's
                self._asked[job.id] = asked_in_words(job.arguments, str(self.folder / job.id))
        return self._asked[job.id]

    def cancel(self, id: str) -> None:
        """End a job and every process it started; nothing for one that has ended or isn't known."""
        with self._lock:
            job, running = self._jobs.get(id), self._running.get(id)
            if job is not None and job.state == "queued" and job.server == self._server:
                self._update(replace(job, state="cancelled", ended=time.time()))
            if running is None:
                return
            running.cancelled = True
        # Outside the lock: waiting for processes to end must not stop the pages.
        _kill_tree(running.process.pid)

    def forget(self, id: str) -> None:
        """Take a job that has ended out of the list; :meth:`restore` brings it back for a while."""
        with self._lock:
            job = self._jobs.get(id)
            if job is None or job.active:
                return
            try:
                self.forgotten_folder.mkdir(exist_ok=True)
                (self.folder / id).rename(self.forgotten_folder / id)
            except OSError as error:
                raise TensorOptError(
                    f"'{job.title}' is not forgotten: {self.folder / id} cannot be moved ({error.strerror})"
                ) from error
            del self._jobs[id]
            self._forgotten[id] = (job, time.time())
        self._delete_forgotten(KEPT_S)

    def forgotten(self) -> list[Job]:
        """Jobs that :meth:`restore` can bring back, the last one first."""
        self._delete_forgotten(KEPT_S)
        with self._lock:
            found = sorted(self._forgotten.values(), key=lambda item: item[1], reverse=True)
            return [job for job, _ in found]

    def restore(self, id: str) -> None:
        """Bring a forgotten job back, with its folder; nothing for one that is not known."""
        with self._lock:
            job, _ = self._forgotten.pop(id, (None, 0.0))
            if job is None:
                return
            (self.forgotten_folder / id).rename(self.folder / id)
            self._jobs[id] = job

    def _delete_forgotten(self, kept_s: float) -> None:
        """Delete what was forgotten longer ago."""
        with self._lock:
            old = [id for id, (_, since) in self._forgotten.items() if time.time() - since >= kept_s]
            for id in old:
                del self._forgotten[id]
        for id in old:
            shutil.rmtree(self.forgotten_folder / id, ignore_errors=True)

    def close(self) -> None:
        """End what runs, and delete what was forgotten; called when the server ends."""
        self._delete_forgotten(0.0)
        with self._lock:
            self._closed = True
            running = list(self._running.values())
        for one in running:
            _kill_tree(one.process.pid)
        for one in running:
            one.process.join(timeout=10)

    # -- what runs ----------------------------------------------------------------------------------

    def _start_waiting(self) -> None:
        """Start queued jobs, oldest first, as far as there is room for them."""
        mine = sorted((j for j in self._jobs.values() if j.server == self._server), key=lambda j: j.created)
        for job in mine:
            active = [self._jobs[id] for id in self._running]
            alone = any(j.measures for j in active) or (job.measures and active)
            if job.state != "queued":
                continue
            # `return`, not `continue`: a job that has to run alone is not passed by later ones, or it would
            # wait for ever.
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
        writer.close()  # the child's copy is the only one: its end is the end of the messages
        self._running[job.id] = _Running(process, reader)
        self._update(replace(job, state="running", started=time.time()))
        threading.Thread(target=self._watch, args=(job.id,), daemon=True).start()

    def _watch(self, id: str) -> None:
        """Read a job's messages until it ends, then say how it ended."""
        running = self._running[id]
        outcome: tuple[str, str] | None = None
        with contextlib.suppress(EOFError, OSError):
            while True:
                kind, content = running.messages.recv()
                if kind == "progress":
                    self._progress(id, running, *content)
                else:
                    outcome = (kind, str(content))
        running.process.join()
        running.messages.close()
        with self._lock:
            self._running.pop(id, None)
            self._ended(self._jobs[id], running, outcome)
            self._start_waiting()

    def _progress(self, id: str, running: _Running, stage: str, done: int, total: int, what: str) -> None:
        now = time.time()
        with self._lock:
            job = self._jobs[id].progressed(stage, done, total, what[:200], now)
            self._jobs[id] = job
            # Reports come by the thousand; the file is for a server that takes over, not for the page.
            if now - running.saved >= _SAVE_EVERY_S:
                running.saved = now
                self._save(job)

    def _ended(self, job: Job, running: _Running, outcome: tuple[str, str] | None) -> None:
        state, error = outcome or ("failed", "")
        if outcome is None:
            error = (
                f"its process ended without a result (exit code {running.process.exitcode}); "
                "the machine's memory may be used up"
            )
        if running.cancelled:
            state, error = "cancelled", ""
        elif self._closed and outcome is None:
            state, error = "interrupted", "the dashboard ended while this ran"
        # People know an upload by its own name, not by the generated path in the message.
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
            LOGGER.warning("the state of job %s is not saved: %s", job.id, error)


def _moved(job: Job, old: Path, new: Path) -> list[str]:
    """A job's command line with another folder in place of its own."""
    return [
        f"{new}{word.removeprefix(str(old))}" if word == str(old) or word.startswith(f"{old}/") else word
        for word in job.arguments
    ]


def _kill_tree(pid: int) -> None:
    """Kill a child of this process and everything it started; nothing if it has ended meanwhile."""
    found: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        child = psutil.Process(pid)
        if child.ppid() == psutil.Process().pid:  # else the id is another process's by now
            found = [child, *child.children(recursive=True)]
    for process in found:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(found, timeout=5)
