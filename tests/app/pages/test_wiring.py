"""Callbacks that a page declares: with what, when, and in which dashboards."""

from __future__ import annotations

from typing import Any

import pytest
from dash import ALL, Dash
from tensoropt_app.context import Context
from tensoropt_app.jobs.manager import JobManager
from tensoropt_app.library import Library
from tensoropt_app.pages.wiring import Callbacks


@pytest.mark.parametrize("with_jobs", [False, True])
def test_what_is_declared_is_registered(tmp_path, with_jobs):
    inner, seen = Callbacks(), []

    @inner.answer(sets="a.data +b.value", when=[({"job": ALL}, "n_clicks")], given="c.data", at_start=True)
    def _always(context: Context, clicks: Any, kept: Any) -> Any:
        seen.append(context)
        return clicks, kept

    @inner.answer(sets="d.data", when="e.data", jobs=True)
    def _with_jobs(context: Context, e: Any) -> Any:
        return e

    callbacks = Callbacks(inner)
    callbacks.in_browser("tensoropt.title", sets="f.data", when="g.data", jobs=False)
    app, context = Dash(__name__), Context(Library(), JobManager(tmp_path) if with_jobs else None)
    callbacks.register(app, context)
    first, second = app._callback_list
    assert [port["id"] for port in first["inputs"]] == ['{"job":["ALL"]}']
    assert not first["prevent_initial_call"]
    assert "..a.data...b.value@" in first["output"]
    assert app.callback_map[first["output"]]["callback"].__wrapped__(1, 2) == (1, 2)
    assert seen == [context]
    assert [port["id"] for port in first["state"]] == ["c"]
    assert second["output"] == ("d.data" if with_jobs else "f.data")
    assert second["prevent_initial_call"] is True
