"""A dashboard that runs in a thread of the test."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import workers_app
from tensoropt_app.jobs.manager import JobManager
from tensoropt_app.library import Library
from tensoropt_app.server import create_app, library_with, listen


@dataclass
class Site:
    """A running dashboard."""

    address: str
    jobs: JobManager
    library: Library

    def url(self, page: str = "result", query: str = "") -> str:
        return f"{self.address}{page}{'?' + query if query else ''}"

    def release(self) -> None:
        """Let the jobs of ``workers_app.held`` end."""
        (self.jobs.root / workers_app.RELEASED).touch()

    def clear(self) -> None:
        """End all jobs and forget them."""
        for job in self.jobs.jobs():
            self.jobs.cancel(job.id)
        while any(job.active for job in self.jobs.jobs()):
            time.sleep(0.02)
        for job in self.jobs.jobs():
            self.jobs.forget(job.id)
        self.jobs._delete_forgotten(0.0)
        (self.jobs.root / workers_app.RELEASED).unlink(missing_ok=True)


@contextmanager
def running(home: Path, folder: Path, target: Any, own: Path | None = None, port: int = 0) -> Iterator[Site]:
    jobs = JobManager(home, target, own)
    library = library_with(jobs, folder)
    server = listen(create_app(library, jobs), "127.0.0.1", port)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield Site(f"http://127.0.0.1:{server.server_port}/", jobs, library)
    finally:
        server.shutdown()
        thread.join(timeout=10)
        server.server_close()
        jobs.close()
