"""Names, tags and colours on disk."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from samples_app import exploration
from tensoropt_app.labels import Label, LabelError, Labels
from tensoropt_app.library import Library
from tensoropt_app.views.runs import choices

from tensoropt.errors import TensorOptError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "labels.json"


def test_labels_are_read_by_the_next_dashboard(file: Path) -> None:
    labels = Labels(file)
    labels.rename("a", "  bf16,\n small ")
    assert labels.retag("a", "paper, , slow,paper") == ("paper", "slow")
    labels.give_styles(["a", "b"])
    labels.restyle("b", 7)
    assert Labels(file).of("a") == Label("bf16, small", ("paper", "slow"), 0)
    assert Labels(file).of("b") == Label(style=7)
    assert Labels(file).of("c") == Label()
    labels.rename("a", " ")
    assert Labels(file).of("a").name == ""


def test_colours_stay_and_new_ones_take_what_is_free(file: Path) -> None:
    labels = Labels(file)
    labels.give_styles(["a", "b", "c"])
    labels.give_styles(["d", "c", "a"])
    assert [labels.of(name).style for name in "abcd"] == [0, 1, 2, 1]  # b is not among those that are there
    before = file.stat().st_mtime_ns
    labels.give_styles(["d", "c", "a"])
    assert file.stat().st_mtime_ns == before


def test_rules_are_said_and_nothing_is_changed(file: Path) -> None:
    labels = Labels(file)
    labels.rename("a", "kept")
    with pytest.raises(LabelError, match="at most 80 characters, this one has 81"):
        labels.rename("a", "x" * 81)
    with pytest.raises(LabelError, match="at most 40 characters"):
        labels.retag("a", "x" * 41)
    with pytest.raises(LabelError, match="at most 20 tags, these are 21"):
        labels.retag("a", ",".join(map(str, range(21))))
    with pytest.raises(LabelError):
        labels.restyle("a", -1)
    labels.rename("b", "left\u202eright\x00")
    assert Labels(file).of("a") == Label("kept")
    assert Labels(file).of("b").name == "left right"


def test_edits_of_two_browsers_are_both_kept(file: Path) -> None:
    one, other = Labels(file), Labels(file)
    one.retag("a", "x, y", "")
    assert other.retag("a", "z", "") == ("x", "y", "z")
    assert one.retag("a", "y", "x, y") == ("y", "z")  # x was taken away, z was not seen
    one.rename("a", "first", "")
    assert other.rename("a", "second", "") == "It was meanwhile called “first” elsewhere; it is “second” now."
    assert other.rename("a", "third", "second") == ""
    assert one.of("a") == Label("third", ("y", "z"))


def test_edits_at_the_same_time_are_all_kept(file: Path) -> None:
    def work(labels: Labels, name: str) -> None:
        for number in range(20):
            labels.rename(f"{name}{number}", name)

    threads = [threading.Thread(target=work, args=(Labels(file), name)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(json.loads(file.read_text())["runs"]) == 80


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"schema": "tensoropt.labels/9", "runs": {}}', "[" * 10_000, "\xff"]
)
def test_a_file_that_cannot_be_read_is_kept_aside(file: Path, text: str) -> None:
    file.write_bytes(text.encode("latin-1"))
    labels = Labels(file)
    assert labels.of("a") == Label()
    assert "begin anew" in labels.fault
    labels.rename("a", "new")
    aside = [f for f in file.parent.glob("labels.json.bad-*") if f.is_file()]
    assert [f.read_bytes() for f in aside] == [text.encode("latin-1")]
    assert Labels(file).of("a").name == "new"


def test_what_can_be_read_of_a_file_is_kept(file: Path) -> None:
    runs = {
        "a": {"name": "good", "later": 1},
        "b": {"name": 3},
        "c": 4,
        "d": {"style": True},
        "e": {"tags": ["t", 1]},
    }
    file.write_text(json.dumps({"schema": "tensoropt.labels/1", "runs": runs}))
    labels = Labels(file)
    assert labels.of("a").name == "good"
    assert labels.of("b") == Label()
    assert labels.fault.startswith("4 of the names and tags")
    labels.rename("a", "better")
    assert json.loads(file.read_text())["runs"]["a"] == {"name": "better", "later": 1}
    assert len(list(file.parent.glob("labels.json.bad-*"))) == 1


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    labels = Labels(tmp_path / "file" / "labels.json")
    labels.give_styles(["a", "b"])
    assert labels.fault.startswith("Colours are not kept: ")
    assert labels.of("b").style == 1
    with pytest.raises(TensorOptError):
        labels.rename("a", "name")


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
