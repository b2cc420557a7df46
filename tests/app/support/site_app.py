"""A dashboard that runs in a thread of the test."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensoropt_app.jobs.manager import JobManager
from tensoropt_app.library import Library
from tensoropt_app.server import create_app, library_with, listen


@dataclass
class Site:
    """A running dashboard."""

    address: str
    jobs: JobManager
    library: Library

    def url(self, page: str = "frontier", query: str = "") -> str:
        return f"{self.address}{page}{'?' + query if query else ''}"


@contextmanager
def running(home: Path, folder: Path, target: Any) -> Iterator[Site]:
    jobs = JobManager(home, target)
    library = library_with(jobs, folder)
    server = listen(create_app(library, jobs), "127.0.0.1", 0)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield Site(f"http://127.0.0.1:{server.server_port}/", jobs, library)
    finally:
        server.shutdown()
        thread.join(timeout=10)
        server.server_close()
        jobs.close()
