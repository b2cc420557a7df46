"""What moved is in the table, whatever moved, and nothing else is."""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path

import pytest
import yaml

from tests.gate.answers import GateError, KeptAnswers, moved, read_answers, table, write_answers
from tests.gate.questions import FACTS, HERE, tasks

ONE = {"fastest_s": 0.1, "need_bytes": 2.0**30, "verdict": "fits", "name": "DP 8"}
QUESTIONS = yaml.safe_load((HERE.parent / "gate.yaml").read_text())


@pytest.mark.parametrize(
    ("change", "row"),
    [
        ({"fastest_s": 0.11}, r"fastest_s +100 ms +110 ms +\+10\.00 %"),
        ({"need_bytes": 2.0**29}, r"need_bytes +1 GiB +0\.5 GiB +-50\.00 %"),
        ({"verdict": "tight"}, r"verdict +fits +tight +other"),
        ({"name": None}, r"name +DP 8 +- +other"),
        ({"more_s": 1.0}, r"more_s +- +1000 ms +other"),
    ],
)
def test_whatever_moves_is_a_row(change: dict[str, object], row: str) -> None:
    before = KeptAnswers({"q": ONE, "other": ONE}, "abc", "2026-11-29")
    now = {"q": {name: value for name, value in {**ONE, **change}.items() if value is not None}, "other": ONE}
    said = table(before, moved(before.answers, now))
    assert "1 FIGURES OF 1 QUESTIONS MOVED since commit abc of 2026-11-29" in said
    (found,) = [line for line in said.splitlines() if line.startswith("q ")]
    assert re.search(row, found)


def test_what_did_not_move_is_no_row() -> None:
    before = KeptAnswers({"q": ONE}, "abc", "2026-11-29")
    assert table(before, moved(before.answers, {"q": {**ONE, "fastest_s": 0.1 * (1 + 1e-9)}})) == (
        "gate: nothing moved since commit abc of 2026-11-29"
    )


def test_lost_and_new_questions_are_named() -> None:
    lost, new = KeptAnswers({"q": ONE}, "abc", "2026-11-29").unlike({"r": ONE})
    assert "'q' is not answered any more" in lost
    assert "'r' has no accepted answer" in new


def test_answers_are_read_as_they_were_written(tmp_path: Path) -> None:
    write_answers(tmp_path / "answers.json", {"q": ONE, "r": ONE}, "abc", date(2026, 11, 29))
    assert read_answers(tmp_path / "answers.json") == KeptAnswers({"q": ONE, "r": ONE}, "abc", "2026-11-29")
    for damaged in ("", "[]", '{"schema": "other"}', '{"schema": "tensoropt.gate/1", "answers": {"q": 1}}'):
        (tmp_path / "answers.json").write_text(damaged)
        with pytest.raises(GateError, match=r"answers\.json"):
            read_answers(tmp_path / "answers.json")


def test_thirty_questions_have_an_answer_each(tmp_path: Path) -> None:
    asked = list(tasks(QUESTIONS, tmp_path))
    names = [f"{task.name} {budget}" for task in asked for budget in task.budgets]
    assert list(read_answers(HERE / "answers.json").answers) == names
    assert len(names) == 30
    assert sum(len(task.budgets) for task in asked if task.store.name != "kept") == 10
    assert FACTS.stat().st_size < 3 * 2**20
