"""What the frontier page shows before a callback has run, from the address and the scheme of the browser."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import tensoropt_app
from flask.testing import FlaskClient
from tensoropt_app.library import Library
from tensoropt_app.pages.frontier.first_look import NARROW_COOKIE, SCHEME_COOKIE
from tensoropt_app.server import create_app
from tensoropt_app.state import FRAME

from tests.app.support.samples_app import exploration

ASSETS = Path(tensoropt_app.__file__).parent / "assets"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> FlaskClient:
    folder = tmp_path_factory.mktemp("opened")
    exploration().save(folder / "a")
    return create_app(Library(folder)).server.test_client()


def props(layout: Any, id: str) -> dict[str, Any]:
    """Of a component in a layout as the browser gets it."""
    if isinstance(layout, list):
        return next((found for one in layout if (found := props(one, id))), {})
    if not isinstance(layout, dict):
        return {}
    own = layout.get("props", {})
    return dict(own) if own.get("id") == id else next((f for v in own.values() if (f := props(v, id))), {})


def asked(client: FlaskClient, address: str | None, scheme: str | None) -> Any:
    client.delete_cookie(SCHEME_COOKIE)
    if scheme is not None:
        client.set_cookie(SCHEME_COOKIE, scheme)
    headers = {} if address is None else {"Referer": f"http://localhost{address}"}
    return client.get("/_dash-layout", headers=headers).get_json()


def test_plot_and_card_are_those_of_the_address(client: FlaskClient) -> None:
    layout = asked(client, "/frontier?x=opened-a&point=2", "dark")
    frame, scheme, selected = props(layout, "drawn")["data"]
    assert scheme == "dark"
    assert tuple(frame) == FRAME
    assert frame["exploration"] == "opened-a"
    assert props(layout, "card-title")["children"][0].startswith("Point 2 of")
    assert props(layout, "state")["data"]["view"]["point"] == 1
    assert selected == [1, None, None, None]
    ring = props(layout, "graph")["figure"]["data"][-1]
    assert len(ring["x"]) == 1
    assert props(layout, "points-count")["children"] == f"{len(exploration().points)} points"


@pytest.mark.parametrize(
    ("address", "scheme"),
    [
        (None, "light"),
        ("/frontier", None),
        ("/frontier", "purple"),
        ("/plan", "light"),
        ("/frontier?x=gone", "light"),
        ("/frontier?x=" + "%00" * 50 + "&point=999999999999999999999&budget=nonsense", "light"),
    ],
)
def test_what_is_not_known_is_left_to_callbacks(
    client: FlaskClient, address: str | None, scheme: str | None
) -> None:
    layout = asked(client, address, scheme)
    assert "data" not in props(layout, "drawn")
    assert props(layout, "card")["children"] is None


def test_the_browser_draws_from_the_same_fields() -> None:
    """Otherwise what was drawn first would be drawn once more."""
    found = re.search(r"const FRAME = \[([^\]]*)\]", (ASSETS / "tensoropt.js").read_text())
    assert tuple(re.findall(r'"(\w+)"', found.group(1))) == FRAME


def test_the_browser_says_scheme_and_width_under_the_names_that_are_read() -> None:
    written = (ASSETS / "scheme.js").read_text()
    assert all(f'"{name}="' in written for name in (SCHEME_COOKIE, NARROW_COOKIE))
