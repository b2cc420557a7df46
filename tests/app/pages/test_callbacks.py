"""Which controls of the frontier page wait for an answer."""

from __future__ import annotations

from typing import Any

from tensoropt_app.pages.frontier.callbacks import unhandled

NOW = {"url.search": "?x=a", "budget.value": 80.0, "options.value": ["band"], "pick-knee.n_clicks": None}


def after(**changes: Any) -> dict[str, Any]:
    return NOW | {name.replace("__", ".").replace("_knee", "-knee"): value for name, value in changes.items()}


def test_what_fired_is_answered() -> None:
    assert unhandled(NOW, None, None, None, ["url.search"]) == {"url": "?x=a"}
    assert unhandled(after(budget__value=35.0), NOW, None, None, ["budget.value"]) == {"budget": 35.0}
    assert unhandled(NOW, NOW, NOW, None, ["."]) == {}


def test_clicks_whose_answers_were_dropped_come_in_their_order_before_what_followed() -> None:
    now = after(pick_knee__n_clicks=1, budget__value=35.0, options__value=[])
    order = ["pick-knee.n_clicks", "budget.value", "options.value"]
    assert list(unhandled(now, NOW, None, order, ["options.value"]).items()) == [
        ("pick-knee", 1), ("budget", 35.0), ("options", []),
    ]  # fmt: skip
    assert list(unhandled(now, NOW, None, order[::-1], ["options.value"])) == [
        "budget",
        "pick-knee",
        "options",
    ]
    assert set(unhandled(now, NOW, None, None, [])) == {"pick-knee", "budget", "options"}


def test_what_the_page_itself_showed_is_nothing_a_person_did() -> None:
    now = after(budget__value=35.0, pick_knee__n_clicks=1)
    assert unhandled(now, NOW, {"budget.value": 35.0}, [], ["pick-knee.n_clicks"]) == {"pick-knee": 1}


def test_stores_may_hold_anything() -> None:
    for odd in (3, "x", ["y"], {"view": {}}):
        assert set(unhandled(NOW, odd, odd, odd, ["budget.value", "nothing"])) >= {"budget"}
