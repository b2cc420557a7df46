"""What is drawn later is in the layout from the beginning, and its component is one that the browser has."""

from __future__ import annotations

import json
from pathlib import Path

import tensoropt_app
from dash import html
from plotly.utils import PlotlyJSONEncoder
from tensoropt_app.later import Later


def test_children_are_known_to_callbacks_before_they_are_drawn() -> None:
    found = Later([html.P("a", id="inside")], id="later", page="plan")
    assert [part.id for part in found._traverse() if getattr(part, "id", None)] == ["inside"]


def test_the_browser_has_the_component() -> None:
    sent = json.loads(json.dumps(Later("a", id="later", page="plan"), cls=PlotlyJSONEncoder))
    assert sent["props"] == {"children": "a", "id": "later", "page": "plan"}
    script = (Path(tensoropt_app.__file__).parent / "assets" / "later.js").read_text()
    assert f"window.{sent['namespace']} = {{ {sent['type']} }}" in script
