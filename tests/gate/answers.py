"""Answers of the gate as a file, and what moved between two of them as a table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

SCHEMA = "tensoropt.gate/1"
LEAST_MOVE = 1e-4
"""The relative difference from which a figure has moved: less is rounding."""

Answers = dict[str, dict[str, Any]]
"""Question -> figure (its unit at the end of its name) or word -> value."""


class GateError(Exception):
    """Raised for questions and answers that cannot be used."""


class KeptAnswers(NamedTuple):
    """The answers that were accepted last, with the commit that gave them, and the day."""

    answers: Answers
    commit: str
    made: str

    def unlike(self, now: Answers) -> list[str]:
        """Return what is not of the kept answers' shape, in words."""
        lost = [f"'{question}' is not answered any more" for question in self.answers if question not in now]
        new = [f"'{question}' has no accepted answer" for question in now if question not in self.answers]
        return lost + [f"{words}; accept today's answers with `make gate ARGS=--keep`" for words in new]


class Move(NamedTuple):
    """A figure, or a word, that is not what it was; None where there was none."""

    question: str
    figure: str
    before: Any
    now: Any


def read_answers(path: Path) -> KeptAnswers:
    """Return the answers in a file.

    Raises:
        GateError: it is not a file of answers.
    """
    try:
        data = json.loads(path.read_text())
        if data["schema"] != SCHEMA:
            raise GateError(f"{path} has schema {data['schema']!r}, not {SCHEMA!r}; `make gate ARGS=--keep`")
        return KeptAnswers(
            {question: dict(data["answers"][question]) for question in data["answers"]},
            data["commit"],
            data["made"],
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise GateError(f"{path} is not a file of answers ({type(error).__name__}: {error})") from None


def write_answers(path: Path, answers: Answers, commit: str, made: date) -> None:
    """Write answers to a file, a line for each."""
    lines = ",\n".join(f"  {json.dumps(question)}: {json.dumps(of)}" for question, of in answers.items())
    head = {"schema": SCHEMA, "commit": commit, "made": made.isoformat()}
    path.write_text(f'{json.dumps(head)[:-1]}, "answers": {{\n{lines}\n}}}}\n')


def moved(before: Answers, now: Answers) -> list[Move]:
    """Return what moved in the questions that both answer."""
    return [
        Move(question, figure, old.get(figure), now[question].get(figure))
        for question, old in before.items()
        if question in now
        for figure in dict.fromkeys((*old, *now[question]))
        if _differ(old.get(figure), now[question].get(figure))
    ]


def _differ(before: Any, now: Any) -> bool:
    if isinstance(before, float | int) and isinstance(now, float | int):
        return abs(now - before) > LEAST_MOVE * abs(before)
    return bool(before != now)


def table(before: KeptAnswers, moves: Sequence[Move]) -> str:
    """Return what moved, a line for each, in words that cannot be overlooked."""
    since = f"since commit {before.commit} of {before.made}"
    if not moves:
        return f"gate: nothing moved {since}"
    rows = [("question", "figure", "before", "now", "change")]
    rows += [
        (m.question, m.figure, _shown(m.figure, m.before), _shown(m.figure, m.now), _change(m)) for m in moves
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    questions = len({move.question for move in moves})
    return "\n".join(
        [
            f"gate: {len(moves)} FIGURES OF {questions} QUESTIONS MOVED {since}",
            *lines,
            "gate: accept them with `make gate ARGS=--keep` once each is explained",
        ]
    )


def _shown(figure: str, value: Any) -> str:
    if value is None:
        return "-"
    if figure.endswith("_s"):
        return f"{1e3 * value:.4g} ms"
    return f"{value / 2**30:.4g} GiB" if figure.endswith("_bytes") else str(value)


def _change(move: Move) -> str:
    numbers = isinstance(move.before, float | int) and isinstance(move.now, float | int) and move.before
    return f"{100 * (move.now / move.before - 1):+.2f} %" if numbers else "other"
