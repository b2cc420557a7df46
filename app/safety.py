"""The rules of who may request what from the server, and the delivery of its answers.

There is no login. The server listens only on this machine unless told otherwise, answers only under the names
it was started for (so that a web site cannot reach it by pointing its own name here), accepts changes only
from its own pages, and refuses what is not a callback of this application before Dash sees it.

Answers are compressed if the browser accepts that, and cached by it as long as they cannot change. Dash's own
way is Flask-Compress, which compresses a script again for every request and adds two more codecs; gzip of the
standard library suffices, here and through a tunnel to another machine.
"""

from __future__ import annotations

import gzip
import hashlib
import ipaddress
import json
import logging
import re
import threading
from typing import Any

from dash import Dash
from dash.exceptions import DependencyException
from flask import Flask, Response, redirect, request

from .recent import Recent
from .standalone import plotly
from .state import MOVED, PAGES

SUITES = "/_dash-component-suites/"
"""The path of the components' scripts: each has one version, so they never change while the server runs."""
_LEAST_BYTES = 1024
"""The size below which an answer fits into a packet anyway."""
PLOTLY = f"{SUITES}plotly/package_data/plotly.min.js"
"""The path at which Dash looks for Plotly's script."""
_BEST, _QUICK = 9, 1
"""The gzip levels for scripts, which are compressed once, and for what every request makes anew."""
KEPT = 64
"""The most scripts kept compressed, about 3 MiB together."""
_TEXT = re.compile(r"text/|application/(json|javascript|manifest\+json|x-ndjson)|image/svg\+xml")


def deliver(app: Dash) -> None:
    """Compress answers, and set how long a browser may keep them."""
    server: Flask = app.server
    scripts = Recent(KEPT)
    script = plotly()
    sign = hashlib.sha256(script.encode()).hexdigest()

    @server.before_request
    def basic() -> Response | None:
        if request.path != PLOTLY:
            return None
        response = Response(script, mimetype="text/javascript")
        response.set_etag(sign)
        response.make_conditional(request)
        return response

    @server.after_request
    def pack(response: Response) -> Response:
        if request.method not in ("GET", "HEAD", "POST") or response.status_code != 200:
            return response
        if request.path.startswith(SUITES):
            if response.cache_control.max_age:
                response.cache_control.immutable = True  # its address names its version
            else:
                response.cache_control.no_cache = True  # asked for again, answered by 304
        if response.is_streamed and not response.direct_passthrough:
            return response
        if not _TEXT.match(response.mimetype or "") or response.headers.get("Content-Encoding"):
            return response
        response.vary.add("Accept-Encoding")
        if not request.accept_encodings["gzip"]:
            return response
        response.direct_passthrough = False
        body = response.get_data()
        if len(body) < _LEAST_BYTES:
            return response
        fixed = request.path.startswith(SUITES)
        tag, _ = response.get_etag()
        if fixed:
            packed = scripts.get((request.path, hash(body)), lambda: gzip.compress(body, _BEST, mtime=0))
        else:
            packed = gzip.compress(body, _QUICK, mtime=0)
        response.set_data(packed)
        response.headers["Content-Encoding"] = "gzip"
        if tag:
            # Weak: the same script in other bytes. Dash compares the strong one only.
            response.set_etag(tag, weak=True)
            response.make_conditional(request)
        return response


def prepare(app: Dash) -> threading.Thread:
    """Compress what every page loads, in the background, before the first page asks for it."""

    def fetch() -> None:
        client = app.server.test_client()
        headers = {"Accept-Encoding": "gzip"}
        page = client.get("/", headers=headers)
        text = gzip.decompress(page.data).decode() if page.headers.get("Content-Encoding") else page.text
        for address in (*re.findall(rf'src="({SUITES}[^"]+)"', text), *LATER):
            client.get(address, headers=headers).close()

    thread = threading.Thread(target=fetch, daemon=True)
    thread.start()
    return thread


LATER = (PLOTLY, f"{SUITES}dash/dcc/async-graph.js")
"""Scripts that components load once they are drawn. The first page needs all of them, so they are requested
at once."""


SCHEME = "scheme.js"
"""The script that the document runs before it paints anything."""


class Page(Dash):
    """Dash with a document that names its language and requests early what takes long."""

    def interpolate_index(self, **parts: Any) -> str:  # type: ignore[override]
        """Return the document."""
        # First of all, so that a dark page is never painted white.
        early = [f'<script src="{self.get_asset_url(SCHEME)}"></script>']
        early += [f'<link rel="preload" as="script" href="{address}">' for address in LATER]
        parts["css"] = "\n".join([*early, parts["css"]])
        document = str(super().interpolate_index(**parts))
        return document.replace("<html>", '<html lang="en">', 1)


LOG = logging.getLogger("tensoropt_app")
MAX_UPLOAD_BYTES = 512 * 2**20
"""The most bytes of a model file. In a callback it travels as base64 text."""
MAX_REQUEST_BYTES = MAX_UPLOAD_BYTES * 4 // 3 + 2**20
UPDATE = "/_dash-update-component"
# Dash starts from inline scripts and dash-ag-grid compiles value formatters; nothing comes from elsewhere.
_POLICY = "; ".join(
    (
        "default-src 'self'",
        "script-src 'self' 'unsafe-inline' 'unsafe-eval'",
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data: blob:",
        "font-src 'self' data:",
        "worker-src 'self' blob:",
        "frame-ancestors 'none'",
        "base-uri 'none'",
        "form-action 'self'",
    )
)
_CATCH_ALL = "/<path:path>"
"""Dash's rule for addresses that match no other rule."""
_NOWHERE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Not found · TensorOpt</title>
<meta name="viewport" content="width=device-width"><style>:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 15vh auto; max-width: 32em; padding: 0 16px; }</style>
<h1>There is no such page</h1>
<p>The dashboard has three: <a href="/result">Result</a>, <a href="/new">Plan it</a> and
<a href="/details">Details</a>.</p></html>
"""
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "X-Frame-Options": "DENY",
}


def is_loopback(host: str) -> bool:
    """Return whether an address is this machine's own."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def protect(app: Dash, *, any_host: bool = False) -> None:
    """Install the checks; ``any_host`` is set if the server was told to listen beyond this machine."""
    server: Flask = app.server
    server.config["MAX_CONTENT_LENGTH"] = MAX_REQUEST_BYTES
    server.config["MAX_FORM_MEMORY_SIZE"] = MAX_REQUEST_BYTES
    outputs = _known_outputs(app)

    @server.before_request
    def check() -> Response | None:
        # Against DNS rebinding: a web site may point its own name at this machine, and its requests then
        # carry that name.
        if not any_host and not is_loopback(_host_name(request.host)):
            return _refused(403, "this server answers on this machine only")
        # These change nothing.
        if request.method in ("GET", "HEAD", "OPTIONS"):
            return None
        # Browsers send it with every change; command-line tools, which no web site controls, send none.
        origin = request.headers.get("Origin")
        if origin is not None and origin.partition("://")[2] != request.host:
            return _refused(403, "changes are accepted from this server's own pages only")
        if request.content_length is not None and request.content_length > MAX_REQUEST_BYTES:
            return _refused(413, f"the request is larger than {MAX_REQUEST_BYTES // 2**20} MiB")
        if request.path == UPDATE:
            # Cached, as Dash reads the body again.
            fault = _callback_fault(request.get_data(cache=True), outputs)
            return _refused(400, fault) if fault else None
        return None

    @server.before_request
    def nowhere() -> Any:
        # Dash answers every address that nothing else takes with its page.
        rule, name = request.url_rule.rule if request.url_rule is not None else "", request.path.strip("/")
        if rule == _CATCH_ALL and name in MOVED:
            query = request.query_string.decode("ascii", "replace")
            return redirect(f"/{MOVED[name]}{'?' + query if query else ''}")
        if rule == _CATCH_ALL and name not in PAGES:
            return Response(_NOWHERE, status=404, mimetype="text/html")
        return None

    @server.errorhandler(DependencyException)
    def no_such_script(_: DependencyException) -> Response:
        # A request for a script that no component has was made up: not worth a traceback.
        return _refused(404, "there is no such script")

    @server.after_request
    def harden(response: Response) -> Response:
        for name, value in _HEADERS.items():
            response.headers.setdefault(name, value)
        return response


def _host_name(host: str) -> str:
    """Return the name in a Host header, without its port."""
    return host.rpartition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]


def _known_outputs(app: Dash) -> Any:
    """Return the outputs of this application's callbacks, known once the first request has set them up."""
    return app.callback_map


def _refused(status: int, why: str) -> Response:
    return Response(json.dumps({"error": why}) + "\n", status=status, mimetype="application/json")


def _callback_fault(body: bytes, callbacks: Any) -> str:
    """Say what is wrong with the body of a callback request; "" for nothing."""
    try:
        data = json.loads(body)
    # Deeply nested JSON exceeds Python's recursion before it is decoded.
    except (ValueError, RecursionError):
        return "the body is not JSON"
    if not isinstance(data, dict):
        return "the body is not an object"
    output = data.get("output")
    if not isinstance(output, str) or output not in callbacks:
        return "there is no such callback"
    for part in ("inputs", "state"):
        listed = data.get(part, [])
        if not isinstance(listed, list) or not all(_is_dependency(item) for item in listed):
            return f"{part} is not a list of properties"
    expected = callbacks[output]
    for part in ("inputs", "state"):
        want = [(dep["id"], dep["property"]) for dep in expected[part]]
        have = [(item["id"], item["property"]) for item in data.get(part, []) if not isinstance(item, list)]
        # Controls of patterns (`ALL`) come as lists of as many as the page has: their number is not known.
        patterned = any(str(name).startswith("{") for name, _ in want)
        if not patterned and want != have:
            return f"{part} are not those of this callback"
    changed = data.get("changedPropIds", [])
    if not isinstance(changed, list) or not all(isinstance(c, str) and "." in c for c in changed):
        return "changedPropIds is not a list of properties"
    outputs = data.get("outputs")
    if outputs is not None and not isinstance(outputs, (dict, list)):
        return "outputs is neither one property nor a list"
    return ""


def _is_dependency(item: Any) -> bool:
    if isinstance(item, list):
        return all(_is_dependency(inner) for inner in item)
    return (
        isinstance(item, dict)
        and isinstance(item.get("id"), (str, dict))
        and isinstance(item.get("property"), str)
    )
