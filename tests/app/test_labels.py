"""Names on disk."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from samples_app import exploration
from tensoropt_app.labels import Labels
from tensoropt_app.library import Library
from tensoropt_app.views.runs import choices

from tensoropt.errors import TensorOptError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "labels.json"


def test_names_are_read_by_the_next_dashboard(file: Path) -> None:
    labels = Labels(file)
    labels.rename("a", "  bf16,\n small ")
    labels.rename("b", "left\u202eright\x00")
    assert [Labels(file).name(of) for of in "abc"] == ["bf16, small", "left right", ""]
    labels.rename("a", " ")
    assert Labels(file).name("a") == ""
    with pytest.raises(TensorOptError, match="at most 80 characters, this one has 81"):
        labels.rename("b", "x" * 81)
    assert Labels(file).name("b") == "left right"


def test_names_of_two_dashboards_are_both_kept(file: Path) -> None:
    one, other = Labels(file), Labels(file)
    one.rename("a", "first")
    other.rename("b", "second")
    assert [one.name(of) for of in "ab"] == ["first", "second"]


def test_names_at_the_same_time_are_all_kept(file: Path) -> None:
    labels = Labels(file)

    def work(name: str) -> None:
        for number in range(20):
            labels.rename(f"{name}{number}", name)

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(json.loads(file.read_text())["runs"]) == 80


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"schema": "tensoropt.labels/9", "runs": {}}', "[" * 10_000, "\xff"]
)
def test_a_file_that_cannot_be_read_is_left_as_it_is_and_said(file: Path, text: str) -> None:
    file.write_bytes(text.encode("latin-1"))
    labels = Labels(file)
    assert labels.name("a") == ""
    assert "nor changed until it is mended or moved away" in labels.fault
    with pytest.raises(TensorOptError, match="cannot be read"):
        labels.rename("a", "new")
    assert file.read_bytes() == text.encode("latin-1")
    file.unlink()
    labels.rename("a", "new")
    assert (labels.fault, Labels(file).name("a")) == ("", "new")


def test_what_is_no_name_is_none_and_stays_in_the_file(file: Path) -> None:
    runs = {"a": {"name": "good", "later": 1}, "b": {"name": 3}, "c": 4}
    file.write_text(json.dumps({"schema": "tensoropt.labels/1", "runs": runs}))
    labels = Labels(file)
    assert [labels.name(of) for of in "abc"] == ["good", "", ""]
    labels.rename("a", "better")
    assert json.loads(file.read_text())["runs"] == {**runs, "a": {"name": "better", "later": 1}}


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TensorOptError):
        Labels(tmp_path / "file" / "labels.json").rename("a", "name")


def test_names_show_wherever_explorations_are_listed(tmp_path: Path) -> None:
    for name in ("a", "b"):
        exploration().save(tmp_path / "opened" / name)
    library = Library(tmp_path / "opened", ready_made=tmp_path / "none")
    before = {f.name for f in (tmp_path / "opened" / "a").iterdir()}
    library.labels = Labels(tmp_path / "labels.json")
    library.labels.rename(library.entry("opened-a").identity, "the plain one")
    assert [i["label"] for group in choices(library) for i in group["items"]] == [
        "the plain one", "gpt2-tiny on dgx-h100",
    ]  # fmt: skip
    assert {f.name for f in (tmp_path / "opened" / "a").iterdir()} == before
    # The same folder, opened by another way.
    assert Library(tmp_path / "opened" / "a").entry("opened-a").identity == library.entry("opened-a").identity
