"""Access rules for requests, and compression and caching of answers.

There is no login. By default the server listens only on this machine; it answers only under its own host
names (so that no web site can reach it by DNS rebinding), accepts changes only from its own pages, and
refuses anything but this application's callbacks before Dash sees it.

Answers are compressed if the browser accepts that, and cached while they cannot change. Dash's own
Flask-Compress would compress a script again for every request and install two more codecs. The standard
library's gzip suffices, also through a tunnel.
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
from flask import Flask, Response, request

from .recent import Recent
from .standalone import plotly
from .state import PAGES

SUITES = "/_dash-component-suites/"
"""Path of the components' scripts, whose addresses contain their versions, so that they can be cached."""
_LEAST_BYTES = 1024
"""Smaller answers are not compressed, as they fit into one packet anyway."""
PLOTLY = f"{SUITES}plotly/package_data/plotly.min.js"
"""The path of Plotly's script in Dash."""
_BEST, _QUICK = 9, 1
"""gzip levels: for scripts, which are compressed once, and for answers, which are compressed each time."""
KEPT = 64
"""Maximum number of compressed scripts in the cache, about 3 MiB."""
_TEXT = re.compile(r"text/|application/(json|javascript|manifest\+json|x-ndjson)|image/svg\+xml")


def deliver(app: Dash) -> None:
    """Compress the server's answers, and set how long browsers may cache them."""
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
                response.cache_control.immutable = True  # its address contains its version
            else:
                response.cache_control.no_cache = True  # revalidated, and answered by 304
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
            # Weak, as compression changes the bytes. Dash compares only strong tags.
            response.set_etag(tag, weak=True)
            response.make_conditional(request)
        return response


def prepare(app: Dash) -> threading.Thread:
    """Compress the files of every page in the background, before the first request."""

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
"""Scripts that components would load when drawn; they are preloaded, as the first page needs all of them."""


SCHEME = "scheme.js"
"""The script that runs before the document is painted."""


class Page(Dash):
    """Dash with a document that names its language and preloads large scripts."""

    def interpolate_index(self, **parts: Any) -> str:  # type: ignore[override]
        # First of all, so that a dark page is never painted white.
        early = [f'<script src="{self.get_asset_url(SCHEME)}"></script>']
        early += [f'<link rel="preload" as="script" href="{address}">' for address in LATER]
        parts["css"] = "\n".join([*early, parts["css"]])
        document = str(super().interpolate_index(**parts))
        return document.replace("<html>", '<html lang="en">', 1)


LOG = logging.getLogger("tensoropt_app")
MAX_UPLOAD_BYTES = 512 * 2**20
"""Maximum size of a model file, which callbacks send as base64 text."""
MAX_REQUEST_BYTES = MAX_UPLOAD_BYTES * 4 // 3 + 2**20
UPDATE = "/_dash-update-component"
# Dash uses inline scripts, dash-ag-grid compiles value formatters; nothing is loaded from elsewhere.
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
"""Dash's route for all other addresses."""
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
    """Install the checks of requests. ``any_host``: whether the server also listens beyond this machine."""
    server: Flask = app.server
    server.config["MAX_CONTENT_LENGTH"] = MAX_REQUEST_BYTES
    server.config["MAX_FORM_MEMORY_SIZE"] = MAX_REQUEST_BYTES

    @server.before_request
    def check() -> Response | None:
        # Against DNS rebinding: a web site may point its own name at this machine, and requests then carry
        # that name.
        if not any_host and not is_loopback(_host_name(request.host)):
            return _refused(403, "this server answers on this machine only")
        # These methods change nothing.
        if request.method in ("GET", "HEAD", "OPTIONS"):
            return None
        # Browsers send the origin with every change; command-line tools, which no web site controls, do not.
        origin = request.headers.get("Origin")
        if origin is not None and origin.partition("://")[2] != request.host:
            return _refused(403, "changes are accepted from this server's own pages only")
        if request.content_length is not None and request.content_length > MAX_REQUEST_BYTES:
            return _refused(413, f"the request is larger than {MAX_REQUEST_BYTES // 2**20} MiB")
        if request.path == UPDATE:
            # Cached, as Dash reads the body again.
            fault = _callback_fault(request.get_data(cache=True), app.callback_map)
            return _refused(400, fault) if fault else None
        return None

    @server.before_request
    def nowhere() -> Response | None:
        # Dash answers every unknown address with its page.
        rule = request.url_rule.rule if request.url_rule is not None else ""
        if rule == _CATCH_ALL and request.path.strip("/") not in PAGES:
            return Response(_NOWHERE, status=404, mimetype="text/html")
        return None

    @server.errorhandler(DependencyException)
    def no_such_script(_: DependencyException) -> Response:
        # A request for a component's missing script is made up: not worth a traceback.
        return _refused(404, "there is no such script")

    @server.after_request
    def harden(response: Response) -> Response:
        for name, value in _HEADERS.items():
            response.headers.setdefault(name, value)
        return response


def _host_name(host: str) -> str:
    return host.rpartition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]


def _refused(status: int, why: str) -> Response:
    return Response(json.dumps({"error": why}) + "\n", status=status, mimetype="application/json")


def _callback_fault(body: bytes, callbacks: Any) -> str:
    """Return the fault of a callback request's body; "" if it is valid."""
    try:
        data = json.loads(body)
    # Deeply nested JSON exceeds Python's recursion limit while decoding.
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
        want = [(dep["id"], dep["property"]) for dep in callbacks[output][part]]
        have = [(item["id"], item["property"]) for item in listed if not isinstance(item, list)]
        # Pattern controls (`ALL`) come as lists of unknown length.
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
