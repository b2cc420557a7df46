"""What a first load weighs, and that a browser need not load it twice."""

import gzip
import re
from pathlib import Path

import pytest
from tensoropt_app import figures as drawing
from tensoropt_app.library import Library
from tensoropt_app.safety import LATER, PLOTLY, SUITES, prepare
from tensoropt_app.server import create_app
from tensoropt_app.standalone import plotly

GZIP = {"Accept-Encoding": "gzip, deflate, br"}
MOST_BYTES = 3 * 10**6


@pytest.fixture(scope="module")
def app():
    return create_app(Library())


@pytest.fixture(scope="module")
def client(app):
    prepare(app).join()
    return app.server.test_client()


def test_a_first_load_is_at_most_three_megabytes(client):
    page = client.get("/", headers=GZIP)
    addresses = re.findall(r'(?:src|href)="(/[^"]+)"', gzip.decompress(page.data).decode())
    assert len(addresses) > 12
    answers = [client.get(a, headers=GZIP) for a in {*addresses, *LATER, "/_dash-layout"}]
    assert all(answer.status_code == 200 for answer in answers)
    assert len(page.data) + sum(len(answer.data) for answer in answers) < MOST_BYTES


def test_what_takes_long_is_asked_for_at_once(client):
    text = client.get("/").text
    for address in LATER:
        assert f'<link rel="preload" as="script" href="{address}">' in text
        assert client.get(address).status_code == 200
    assert '<html lang="en">' in text


def test_plotly_is_the_part_that_figures_need(client):
    assert client.get(PLOTLY).text == plotly()
    assert "plotly.js (basic - minified)" in plotly()[:100]
    drawn = Path(drawing.__file__).parent.glob("*.py")
    kinds = {kind for file in drawn for kind in re.findall(r'"type": "(\w+)"', file.read_text())}
    assert kinds <= {"scatter", "bar"} | {"log", "linear"} | {"rect", "line", "path"}


def test_what_is_compressed_is_the_same(client):
    for address in (LATER[0], "/assets/style.css", "/_dash-layout"):
        plain, packed = client.get(address), client.get(address, headers=GZIP)
        assert "Content-Encoding" not in plain.headers
        assert packed.headers["Content-Encoding"] == "gzip"
        assert "Accept-Encoding" in packed.headers["Vary"]
        assert gzip.decompress(packed.data) == plain.data


def test_scripts_are_kept_by_the_browser(client):
    first = client.get(LATER[0], headers=GZIP)
    assert first.cache_control.no_cache
    again = client.get(LATER[0], headers={**GZIP, "If-None-Match": first.headers["ETag"]})
    assert (again.status_code, again.data) == (304, b"")
    text = client.get("/").text
    versioned = next(a for a in re.findall(rf'src="({SUITES}[^"]+)"', text) if re.search(r"\.v\d", a))
    kept = client.get(versioned, headers=GZIP).cache_control
    assert kept.immutable
    assert kept.max_age


def test_pictures_and_crumbs_travel_as_they_are(client):
    for address in ("/_favicon.ico", "/assets/dashAgGridFunctions.js"):
        assert "Content-Encoding" not in client.get(address, headers=GZIP).headers
