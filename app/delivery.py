"""The delivery of answers: compressed if the browser accepts that, and cached by it as long as they can't
change.

Dash's own way to do this is Flask-Compress, which compresses a script again for every request and brings
two more codecs along; gzip of the standard library is enough, here and through a tunnel to another machine.
"""

from __future__ import annotations

import gzip
import hashlib
import re
import threading
from pathlib import Path
from typing import Any

from dash import Dash
from flask import Flask, Response, request

from .recent import Recent

SUITES = "/_dash-component-suites/"
"""The path of the components' scripts: each has one version, so they never change while the server runs."""
LEAST_BYTES = 1024
"""The size below which an answer fits into a packet anyway."""
PLOTLY = f"{SUITES}plotly/package_data/plotly.min.js"
"""The path at which Dash looks for Plotly's script."""
BEST, QUICK = 9, 1
"""The gzip levels for scripts, which are compressed once, and for what every request makes anew."""
KEPT = 64
"""The most scripts kept compressed, about 3 MiB together."""
TEXT = re.compile(r"text/|application/(json|javascript|manifest\+json|x-ndjson)|image/svg\+xml")


def plotly() -> str:
    """Return Plotly's script with lines, markers and bars, which is all that the figures here use.

    It is ``plotly-basic.min.js`` 4.1.1 from npm's ``plotly.js-basic-dist-min``, MIT licence. The whole script
    that comes with Dash is four times as long: half a second of a first load, and most of an exported page.
    """
    return (Path(__file__).parent / "vendored" / "plotly-basic.min.js").read_text(encoding="utf-8")


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
        if not TEXT.match(response.mimetype or "") or response.headers.get("Content-Encoding"):
            return response
        response.vary.add("Accept-Encoding")
        if not request.accept_encodings["gzip"]:
            return response
        response.direct_passthrough = False
        body = response.get_data()
        if len(body) < LEAST_BYTES:
            return response
        fixed = request.path.startswith(SUITES)
        tag, _ = response.get_etag()
        if fixed:
            packed = scripts.get((request.path, hash(body)), lambda: gzip.compress(body, BEST, mtime=0))
        else:
            packed = gzip.compress(body, QUICK, mtime=0)
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


LATER = (
    PLOTLY,
    f"{SUITES}dash_ag_grid/async-community.js",
    f"{SUITES}dash/dcc/async-graph.js",
)
"""What components load once they are drawn. The first page needs all of it, so it is requested at once."""


class Page(Dash):
    """Dash with a document that names its language and requests early what takes long."""

    def interpolate_index(self, **parts: Any) -> str:  # type: ignore[override]
        """Return the document."""
        early = [f'<link rel="preload" as="script" href="{address}">' for address in LATER]
        parts["css"] = "\n".join([*early, parts["css"]])
        document = str(super().interpolate_index(**parts))
        return document.replace("<html>", '<html lang="en">', 1)
