"""The mutation runner: which places it changes, and how it names them."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest

from tests.mutants.mutant import ROOT, file_of
from tests.mutants.operators import mutants_of
from tests.mutants.report import decisions, markdown
from tests.mutants.sample import generated, handmade, sampled
from tests.mutants.sweep import Baseline
from tests.mutants.targets import EQUAL_RESULTS, TARGETS, Target


def changes(source: str) -> set[tuple[str, str]]:
    return {
        (m.before, m.after) for m in mutants_of("tensoropt/toy.py", textwrap.dedent(source)) if m.compiles()
    }


@pytest.mark.parametrize(
    ("source", "after"),
    [
        ("a < b", {"a <= b", "a >= b"}),
        ("a is not b", {"a is b"}),
        ("a + (b)", {"a - (b)"}),
        ("f(a, b)", {"f(b, a)", "pass"}),
        ("x = min(a, b)", {"x = max(a, b)"}),
        ("x = a and b", {"x = a or b"}),
        ("x = not a", {"x = (a)"}),
        ("x = -a", {"x = (a)"}),
        ("x = 3", {"x = 4", "x = 2"}),
        ("x = 0.5", {"x = (0.5 * 1.02)", "x = (0.5 * 0.5)"}),
        ("x = True", {"x = False"}),
        ("x += y", {"x -= y", "pass"}),
        ("x[y] = z", {"pass"}),
        ("x = y.sum(axis=0)", {"x = y.sum(axis=1)"}),
        ("def f():\n    return y[:n]", {"return y[:(n) + 1]"}),
        ("x = search(a, side='left')", {"x = search(a, side='right')"}),
        ("x = graph.memory", {"x = graph.time"}),
        ("x = [i for i in y if z]", {"x = [i for i in y if True]"}),
        ("def f() -> float:\n    return x", {"return (x) * 1.02"}),
        ("def f() -> bool:\n    return x", {"return not (x)"}),
        ("for x in y:\n    continue", {"break"}),
        ("if x:\n    raise ValueError(f'{a + b}')", {"if (not (x)):", "pass"}),
    ],
)
def test_each_kind_of_change(source: str, after: set[str]) -> None:
    assert {new for _, new in changes(source)} == after


@pytest.mark.parametrize(
    "source",
    [
        '"""Text, 3 < 4."""',
        "assert a < b, a + b",
        "log.debug('%d', a + b)",
        "x: NDArray[2] | None",
        "Floats = NDArray[np.float64]",
        "Both = A | B",
        "@njit(cache=True)\ndef f(a: int | None) -> int | None: ...",
        "def __repr__(self):\n    return a + b",
        "x = f'{a + b}'",
        "x = zip(a, strict=True)",
        "x = len(a.memory)",
        "x = a.memory.shape",
        "x = np.empty(1024)",
        "if TYPE_CHECKING:\n    f(a, b)",
    ],
)
def test_what_is_left_alone(source: str) -> None:
    assert changes(source) == set()


def test_names_stay_when_lines_move_and_tell_equal_lines_apart() -> None:
    source = "def f(a):\n    x = a < 1\n    x = a < 1\n    return x\n"
    first, moved = mutants_of("tensoropt/a.py", source), mutants_of("tensoropt/a.py", "\n\n# note\n" + source)
    assert [m.id for m in first] == [m.id for m in moved]
    assert len({m.id for m in first}) == len(first)
    assert {m.id.rsplit(":", 1)[0] for m in first} == {"a.py:f:compare", "a.py:f:constant"}
    assert [m.id for m in first] != [m.id for m in mutants_of("tensoropt/b.py", source)]
    assert first[0].line + 3 == moved[0].line


def test_changed_text_is_in_its_place() -> None:
    """Columns are counted in bytes by the parser; a name with an umlaut comes before the change."""
    (mutant, *_) = mutants_of("tensoropt/a.py", "größe = 'ä' if a < b else 'ö'\n")
    assert mutant.source == "größe = 'ä' if a <= b else 'ö'\n"


def test_constants_that_change_no_result_are_left_alone() -> None:
    for file, names in EQUAL_RESULTS.items():
        assert not [m for m in generated(file) if not m.function and m.before.split(" =")[0] in names]


def test_a_sample_is_the_same_every_time_and_part_of_a_larger_one() -> None:
    target = next(t for t in TARGETS if t.name == "frontier")
    small, large = sampled(target, 10), sampled(target, 40)
    assert [m.id for m in small] == [m.id for m in sampled(target, 10)]
    assert {m.id for m in small} <= {m.id for m in large}
    assert len({m.file for m in small}) > 1
    assert [m.id for m in sampled(target, 10, seed=2)] != [m.id for m in small]


def test_what_was_made_by_hand_says_where_it_no_longer_fits(tmp_path: Path) -> None:
    (tmp_path / "tensoropt").mkdir()
    (tmp_path / "tensoropt" / "a.py").write_text("def f(x):\n    y = x + 1\n    return y\n")
    entries = [
        {"file": "a.py", "before": "x + 1", "after": "x", "why": "-"},
        {"file": "a.py", "before": "gone", "after": "x", "why": "-"},
        {"file": "a.py", "before": "y", "after": "x", "why": "-"},
    ]
    (tmp_path / "hand.yaml").write_text(json.dumps(entries))
    found, complaints = handmade(tmp_path, tmp_path / "hand.yaml")
    assert [(m.id.rsplit(":", 1)[0], m.before, m.after) for m in found] == [
        ("a.py:f:hand", "y = x + 1", "y = x")
    ]
    assert ["gone" in complaints[0], "2 times" in complaints[1]] == [True, True]


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_every_target_names_files_and_tests_that_there_are(target: Target) -> None:
    assert not [p for p in target.files if not list((ROOT / target.below).glob(p))]
    assert not [p for p in target.test_files if not (ROOT / p).exists()]
    assert target.sources


def test_mutants_made_by_hand_fit_the_source() -> None:
    assert handmade()[1] == []


def test_decisions_and_constants_left_alone_are_of_files_that_there_are() -> None:
    files = {*map(file_of, decisions()), *EQUAL_RESULTS}
    assert not [file for file in files if not (ROOT / file).exists()]


def test_tests_that_execute_the_line_are_run_and_all_where_modules_are_imported() -> None:
    (inside, *_, outside) = mutants_of("tensoropt/a.py", "def f():\n    return x < 1\n\n\ny = 2 < z\n")
    lines = {"tensoropt/a.py": {"2": ["two.py", "one.py"], "5": ["two.py"]}}
    known = Baseline({"one.py": 3.0, "two.py": 0.2, "three.py": 0.01}, 1.0, lines)
    assert known.order(inside) == ["two.py", "one.py"]
    assert known.order(outside) == ["three.py", "two.py", "one.py"]


def test_every_decision_has_a_kind_and_a_reason(tmp_path: Path) -> None:
    decisions()
    (tmp_path / "d.yaml").write_text("{a: {decision: perhaps, reason: why not}}")
    with pytest.raises(ValueError, match="a needs a reason and one of the decisions equivalent"):
        decisions(tmp_path / "d.yaml")


def test_the_report_counts_what_is_equal_apart() -> None:
    figures = {"mutants": 10, "killed": 7, "timed out": 1, "survived": 2, "same_results": 1, "seconds": 30.0}
    row = {"id": "a.py:f:compare:1", "before": "a|b", "after": "c", "outcome": "survived", "by": ""}
    data = {
        "date": "2000-01-01", "commit": "c", "machine": {"cores": 2}, "load_at_end": 1.0,
        "no_longer_fitting": [], "targets": {"one": figures}, "mutants": [row],
    }  # fmt: skip
    text = markdown(data)
    assert "| one | 10 | 7 | 1 | 2 | 1 | 88.9 % | 3.0 |" in text
    assert "| a.py:f:compare:1 | `a\\|b` | `c` | **undecided** |  |" in text
