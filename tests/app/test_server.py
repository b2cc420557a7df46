"""The server: downloads, headers, and what it does with requests that no page of its own sends."""

from __future__ import annotations

import csv
import io
import json
import re
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples_app import exploration
from tensoropt_app.library import Library
from tensoropt_app.safety import MAX_REQUEST_BYTES, UPDATE
from tensoropt_app.server import create_app, listen, serve

from tensoropt import TensorOptError, load_plan

EXPLORED = exploration()


@pytest.fixture(scope="module")
def dash(tmp_path_factory):
    folder = tmp_path_factory.mktemp("explorations")
    EXPLORED.save(folder / "a")
    return create_app(Library(folder))


@pytest.fixture(scope="module")
def client(dash):
    found = dash.server.test_client()
    assert found.get("/").status_code == 200  # sets the callbacks up, as the first page does
    assert found.get("/_dash-dependencies").status_code == 200
    return found


def test_the_plan_and_the_tables_are_those_of_the_command_line(client, tmp_path):
    answer = client.get("/download/opened-a/plan.json?point=4")
    (tmp_path / "plan.json").write_bytes(answer.data)
    assert load_plan(tmp_path / "plan.json").predicted.memory_bytes == EXPLORED.points[3].memory_bytes
    assert 'filename="plan.json"' in answer.headers["Content-Disposition"]
    rows = list(csv.reader(io.StringIO(client.get("/download/opened-a/frontier.csv").text)))
    assert (rows[0][:3], len(rows)) == (["point", "memory_bytes", "time_s"], 9)
    strategies = list(csv.reader(io.StringIO(client.get("/download/opened-a/strategies.csv").text)))
    assert len(strategies) == 1 + 8 * 4


def test_several_explorations_are_one_table(client):
    rows = list(csv.DictReader(io.StringIO(client.get("/download/several/opened-a,gpt2-dgx-h100").text)))
    one = list(csv.DictReader(io.StringIO(client.get("/download/opened-a/frontier.csv").text)))
    other = list(csv.DictReader(io.StringIO(client.get("/download/gpt2-dgx-h100/frontier.csv").text)))
    assert len(rows) == len(one) + len(other)
    for alone, line in zip((*one, *other), rows, strict=True):
        assert {name: line[name] for name in alone if name in line}.items() <= alone.items()
    assert client.get("/download/several/opened-a,..%2F..").status_code == 404


def test_the_standalone_page_takes_point_and_limits_from_its_address(client):
    text = client.get("/download/opened-a/frontier.html?point=3&budget=45GiB").text
    assert "gpt2-tiny on dgx-h100" in text
    assert "Chosen: point 3 of 8" in text
    assert re.search(r"Fits [^.]*45(\.0)? GiB", text)


@pytest.mark.parametrize("path", [
    "opened-a/plan.json?point=9", "opened-a/plan.json?point=0", "opened-a/plan.json?point=-1",
    "opened-a/plan.json?point=1e3",
    "opened-a/exploration.json", "opened-b/plan.json", "..%2F..%2Fetc/plan.json",
    "opened-a/..%2Fpoints.npz",
])  # fmt: skip
def test_downloads_come_from_the_exploration_only(client, path):
    answer = client.get(f"/download/{path}")
    assert answer.status_code == 404
    assert b"root:" not in answer.data


def test_only_this_machine_and_its_own_pages_are_answered(dash, client):
    assert client.get("/", headers={"Host": "evil.example"}).status_code == 403
    assert client.get("/", headers={"Host": "127.0.0.1:8050"}).status_code == 200
    assert client.get("/", headers={"Host": "[::1]:8050"}).status_code == 200
    assert client.post(UPDATE, json={}, headers={"Origin": "https://evil.example"}).status_code == 403
    beyond = create_app(Library(), any_host=True).server.test_client()
    assert beyond.get("/", headers={"Host": "box.example"}).status_code == 200


def test_pages_may_load_from_this_server_only(client):
    policy = client.get("/").headers["Content-Security-Policy"]
    assert "default-src 'self'" in policy
    assert "http" not in policy


@pytest.mark.parametrize("path", ["/", "/result", "/new/", "/details?x=opened-a"])
def test_pages_are_found(client, path):
    answer = client.get(path)
    assert answer.status_code == 200
    assert "react-entry-point" in answer.text


@pytest.mark.parametrize("path", ["/nowhere", "/result/a", "/assets/", "/_dash-component-suites/../"])
def test_an_address_of_nothing_is_not_found(client, path):
    answer = client.get(path)
    assert answer.status_code == 404
    assert "There is no such page" in answer.text
    assert "Content-Security-Policy" in answer.headers


@pytest.mark.parametrize("path", ["x/y.js", "dash/nope.js", "dash/../../etc/passwd", "dash/dcc/async-no.js"])
def test_a_script_of_nobody_is_not_found_without_a_traceback(client, path, caplog):
    answer = client.get(f"/_dash-component-suites/{path}")
    assert (answer.status_code, answer.json) == (404, {"error": "there is no such script"})
    assert not caplog.records


def test_a_request_that_is_too_large_is_refused_before_it_is_read(client):
    too_long = {"CONTENT_LENGTH": str(MAX_REQUEST_BYTES + 1)}
    assert client.post(UPDATE, data=b"{}", environ_overrides=too_long).status_code == 413


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(
    body=st.binary(max_size=60)
    | json_values.map(lambda v: json.dumps(v).encode())
    | st.fixed_dictionaries(
        {"output": st.text(max_size=20) | st.just("state.data")},
        optional=dict.fromkeys(("inputs", "outputs", "state", "changedPropIds"), json_values),
    ).map(lambda v: json.dumps(v).encode())
)
def test_malformed_callbacks_are_refused(client, body):
    answer = client.post(UPDATE, data=body, content_type="application/json")
    assert 400 <= answer.status_code < 500
    assert answer.json["error"]


def test_callbacks_with_any_values_leave_the_server_standing(dash, client):
    """Every callback that runs here, called as a page calls it, with values of the wrong kinds."""
    called = 0
    for output, known in dash.callback_map.items():
        if "callback" not in known:
            continue  # it runs in the browser
        for value in (None, 3, "x", ["y"], {"view": {"exploration": "opened-a", "point": 10**8}}):
            inputs = [{**_plain(d), "value": value} for d in known["inputs"]]
            request = {
                "output": output,
                "outputs": _outputs(output),
                "inputs": inputs,
                "state": [{**_plain(d), "value": value} for d in known["state"]],
                "changedPropIds": [f"{i['id']}.{i['property']}" for i in inputs[:1]],
            }
            answer = client.post(UPDATE, json=request)
            assert answer.status_code in (200, 204), (output, value, answer.data[:300])
            called += 1
    assert called > 60
    assert client.get("/").status_code == 200


def _plain(dependency: dict[str, Any]) -> dict[str, Any]:
    return {"id": dependency["id"], "property": dependency["property"]}


def _outputs(output: str) -> Any:
    """What a page sends beside the callback's name."""
    if output.startswith(".."):
        parts = [part.rpartition(".") for part in output.strip(".").split("...")]
        return [{"id": i, "property": p} for i, _, p in parts]
    name, _, prop = output.rpartition(".")
    return {"id": name, "property": prop}


def test_a_server_beyond_this_machine_says_that_there_is_no_login(monkeypatch):
    said: list[str] = []
    ended = Mock(server_port=1, serve_forever=Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setattr("tensoropt_app.server.listen", lambda *_: ended)
    serve(host="0.0.0.0", port=0, say=said.append)
    assert any("no login" in line for line in said)
    said.clear()
    assert serve(port=0, say=said.append) == "http://127.0.0.1:1/"
    assert not any("no login" in line for line in said)


def test_an_address_in_use_is_an_error_in_words(dash):
    first = listen(dash, "127.0.0.1", 0)
    try:
        with pytest.raises(TensorOptError, match="cannot listen on"):
            listen(dash, "127.0.0.1", first.server_port)
        with pytest.raises(TensorOptError, match="between 0 and 65535"):
            listen(dash, "127.0.0.1", 70_000)
    finally:
        first.server_close()
