"""The dashboard as a Dash application, and the server process that answers browsers."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

from dash import Dash, html, set_props
from werkzeug.serving import BaseWSGIServer, WSGIRequestHandler, make_server

from tensoropt.errors import TensorOptError
from tensoropt.version import __version__

from . import downloads
from .context import Context
from .jobs.manager import JobManager
from .library import Library
from .pages import shell
from .pages.parts import note
from .safety import LOG, SCHEME, Page, deliver, is_loopback, prepare, protect

TITLE = "TensorOpt"
_PORT = 8050
_ALIVE = "/alive"


def create_app(library: Library, jobs: JobManager | None = None, *, any_host: bool = False) -> Dash:
    """Return the dashboard as a Dash application (``.server`` is its WSGI side).

    Args:
        jobs: the job manager; None for a dashboard that only shows explorations.
        any_host: whether to answer under any host name, when listening beyond this machine.
    """
    context = Context(library, jobs)
    app = Page(
        "tensoropt_app",
        title=TITLE,
        update_title="",
        assets_folder=str(Path(__file__).parent / "assets"),
        assets_ignore=SCHEME,  # the document contains it already
        # Scripts come from this server, none from elsewhere.
        serve_locally=True,
        on_error=_said,
        # Pages are made later; tests/app/test_pages.py checks callbacks against them.
        suppress_callback_exceptions=True,
    )
    app.layout = lambda: shell.layout(context)

    @app.server.get(_ALIVE)
    def alive() -> dict[str, str]:
        """Answer open pages, which ask each second and update if jobs or the version have changed."""
        return {"version": __version__} | ({} if jobs is None else {"jobs": jobs.sign()})

    shell.register(app, context)
    downloads.register(app, context)
    protect(app, any_host=any_host)
    deliver(app)
    return app


def _said(error: Exception) -> None:
    """Show on the page that a callback failed; the traceback goes to the terminal."""
    if isinstance(error, TensorOptError):
        text = str(error)
    else:
        LOG.error("a callback failed", exc_info=error)
        text = (
            f"Something went wrong here ({type(error).__name__}). The page is unchanged; the terminal that "
            "runs the dashboard shows the details."
        )
    set_props("problem", {"children": html.Div(note(text, "error"))})


class _Quiet(WSGIRequestHandler):
    """A request handler that logs only errors."""

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        pass


def listen(app: Dash, host: str, port: int) -> BaseWSGIServer:
    """Return a server that is bound but not yet serving; port 0 takes any free port.

    Raises:
        TensorOptError: the address cannot be bound.
    """
    if not 0 <= port < 2**16:
        raise TensorOptError(f"port {port} is not between 0 and 65535; 0 takes any free one")
    try:
        return make_server(host, port, app.server, threaded=True, request_handler=_Quiet)
    # Werkzeug would exit the process if the port is taken.
    except (OSError, SystemExit) as error:
        raise TensorOptError(
            f"cannot listen on {host}:{port} ({error}); the port may be taken: --port 0 takes a free one"
        ) from error


def library_with(jobs: JobManager, folder: Path | None = None) -> Library:
    """Return a library of ready-made explorations, jobs' results, and an opened folder.

    Raises:
        TensorOptError: the folder holds no exploration.
    """
    return Library(folder, jobs.results, names=jobs.uploads.names)


def serve(folder: Path | None = None, *, host: str = "127.0.0.1", port: int = _PORT, say: Any = print) -> str:
    """Serve until interrupted; return the address.

    Raises:
        TensorOptError: the folder holds no exploration, or the address cannot be bound.
    """
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    beyond = not is_loopback(host)
    jobs = JobManager(own=None if beyond else Path.cwd())
    library = library_with(jobs, folder)
    app = create_app(library, jobs, any_host=beyond)
    try:
        server = listen(app, host, port)
    except TensorOptError:
        jobs.close()
        raise
    address = f"http://{f'[{host}]' if ':' in host else host}:{server.server_port}/"
    prepare(app)
    say(f"TensorOpt dashboard: {address}  (Ctrl-C ends it)")
    if beyond:
        say(
            f"There is no login: everyone who can reach {host}:{server.server_port} can see everything "
            "here and start jobs on this machine."
        )
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        say("ended")
    finally:
        server.server_close()
        jobs.close()
    return address
