"""Pages that are made later: callbacks speak of what there is of them, and the first page is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from dash.development.base_component import Component
from tensoropt_app.context import Context
from tensoropt_app.jobs.manager import JobManager
from tensoropt_app.library import Library
from tensoropt_app.pages import details, new, result
from tensoropt_app.server import create_app
from tensoropt_app.state import PAGES

MADE_LATER = {"points"}
"""The table of points, which a button asks for."""


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    return JobManager(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def app(jobs):
    return create_app(Library(), jobs)


def ids_of(content: Any) -> set[str]:
    """Of all components, whatever property they are in."""
    if isinstance(content, (list, tuple)):
        return set().union(*map(ids_of, content))
    if not isinstance(content, Component):
        return set()
    own = {content.id} if isinstance(getattr(content, "id", None), str) else set()
    return own.union(*(ids_of(getattr(content, name, None)) for name in content._prop_names if name != "id"))


def named(dependency: str) -> set[str]:
    """Ids of an output as Dash writes it, without patterns, which are made with what they stand on."""
    return set(re.findall(r"(?:^|\.\.\.?)([\w-]+)\.\w+", dependency))


def test_callbacks_speak_of_components_that_there_are(app, jobs):
    """Dash itself is told not to ask, since pages are made later."""
    context = Context(Library(), jobs)
    there = ids_of([app.layout(), result.layout(context), new.layout(context), details.layout()])
    for callback in app._callback_list:
        read = {i["id"] for i in (*callback["inputs"], *callback["state"]) if not i["id"].startswith("{")}
        assert named(callback["output"]) | read <= there | MADE_LATER, callback["output"]


@pytest.mark.parametrize("page", PAGES)
def test_the_page_that_is_asked_for_is_there_and_others_come_later(app, page):
    client = app.server.test_client()
    layout = client.get("/_dash-layout", headers={"Referer": f"http://localhost/{page}"}).text
    for name, mark in (("result", '"graph"'), ("new", '"start"'), ("details", '"details-head"')):
        assert (f'"id":{mark}' in layout) == (page == name)


def test_the_first_picture_waits_for_no_callback(app):
    client = app.server.test_client()
    client.set_cookie("tensoropt-scheme", "dark")
    layout = client.get("/_dash-layout", headers={"Referer": "http://localhost/result"}).text
    assert "verdict-big" in layout
    assert '"chosen"' in layout


def test_the_browser_knows_the_pages():
    script = (Path(__file__).parents[2] / "app" / "assets" / "tensoropt.js").read_text()
    (names,) = re.findall(r"const PAGES = \[(.*?)\]", script)
    assert tuple(re.findall(r'"(\w+)"', names)) == PAGES


def test_scripts_are_short():
    """What is computed in the browser is seen by no test without one."""
    assets = (Path(__file__).parents[2] / "app" / "assets").glob("*.js")
    assert sum(len(file.read_text().splitlines()) for file in assets) <= 500
