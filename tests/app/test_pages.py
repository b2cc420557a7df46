"""Pages that are made later: callbacks speak of what there is of them, and the first page is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from dash import Dash
from dash.development.base_component import Component
from tensoropt_app.jobs.manager import JobManager
from tensoropt_app.library import Library
from tensoropt_app.pages.shell import LATER
from tensoropt_app.server import create_app
from tensoropt_app.state import PAGES


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Dash:
    return create_app(Library(), JobManager(tmp_path_factory.mktemp("home")))


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


def test_callbacks_speak_of_components_that_there_are(app: Dash) -> None:
    """Dash itself is told not to ask, since pages are made later."""
    there = ids_of(app.layout())
    for callback in app._callback_list:
        read = {i["id"] for i in (*callback["inputs"], *callback["state"]) if not i["id"].startswith("{")}
        assert named(callback["output"]) | read <= there, callback["output"]


@pytest.mark.parametrize("page", PAGES)
def test_the_first_page_is_there_and_others_come_later(app: Dash, page: str) -> None:
    client = app.server.test_client()
    layout = client.get("/_dash-layout", headers={"Referer": f"http://localhost/{page}"}).text
    marks = {"explore": '"start"', "plan": '"plan-curve"', "frontier": '"graph"', "runs": '"runs-table"'}
    for name, mark in marks.items():
        assert (f'"id":{mark}' in layout) == (name == page or name not in LATER)


def test_without_an_address_all_are_there(app: Dash) -> None:
    assert '"id":"plan-curve"' in app.server.test_client().get("/_dash-layout").text


def test_the_browser_knows_which_pages_come_later() -> None:
    script = (Path(__file__).parents[2] / "app" / "assets" / "tensoropt.js").read_text()
    (names,) = re.findall(r"const LATER = \[(.*?)\]", script)
    assert tuple(re.findall(r'"(\w+)"', names)) == LATER
