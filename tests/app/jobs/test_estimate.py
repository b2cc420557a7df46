"""How long it will take: from runs that asked the same, else from their like, else nothing."""

from __future__ import annotations

from pathlib import Path

from tensoropt_app.jobs.estimate import REPEATED, Run, asked, estimate
from tensoropt_app.views.jobs import estimate_words

WORDS = ("explore", "zoo:mlp", "--cluster", "dgx-h100", "--out", "HERE", "--epsilon", "0.001")


def of(folder: Path, *changes: tuple[str, str]) -> tuple[str, ...]:
    words = list(WORDS)
    for name, value in changes:
        if name in words:
            words[words.index(name) + 1] = value
        else:
            words += [name, value]
    return tuple(str(folder) if word == "HERE" else word for word in words)


def test_the_same_in_another_folder_is_the_same(tmp_path: Path) -> None:
    one, other = tmp_path / "a", tmp_path / "b"
    assert asked(of(one), one) == asked(of(other), other)


def test_files_count_by_their_content(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "abc"]
    for folder, text in zip(folders, ("x", "x", "y"), strict=True):
        folder.mkdir()
        (folder / "cluster.json").write_text(text)
    first, same, other = (asked(of(f, ("--cluster", str(f / "cluster.json"))), f) for f in folders)
    assert first == same
    assert first.core != other.core


def test_settings_of_the_search_make_it_alike_and_the_model_does_not(tmp_path: Path) -> None:
    wanted = asked(of(tmp_path), tmp_path)
    finer = Run(asked(of(tmp_path, ("--epsilon", "0")), tmp_path), 40.0)
    batch = Run(asked(of(tmp_path, ("--batch", "8")), tmp_path), 3.0)
    beside = Run(asked(of(tmp_path, ("--planners", "zero")), tmp_path), 3.0)
    assert estimate(wanted, [batch, beside]) is None
    found = estimate(wanted, [batch, finer])
    assert found is not None
    assert (found.last_s, found.same) == (40.0, False)
    assert "with other settings, took that last time" in estimate_words(found)


def test_the_newest_is_the_estimate_and_the_range_is_said(tmp_path: Path) -> None:
    wanted = asked(of(tmp_path), tmp_path)
    found = estimate(wanted, [Run(wanted, seconds) for seconds in (12.0, 30.0, *[20.0] * REPEATED, 900.0)])
    assert found is not None
    assert (found.last_s, found.low_s, found.high_s) == (12.0, 12.0, 30.0)
    assert estimate_words(found) == "About 12 s: the same took 12 s to 30 s in 15 runs."
    assert estimate_words(None).startswith("No estimate yet")
