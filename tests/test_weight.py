"""The weight of code, counted by hand."""

from __future__ import annotations

from tests.weight import faults, weight

TEXT = '''"""A module
of two lines."""

# A comment.
X = (1,
     2)


def f():
    """Return nothing."""
    return """no docstring
of two lines"""  # and a remark
'''


def test_code_is_what_is_no_docstring_comment_or_blank() -> None:
    assert weight(TEXT) == (5, 3)


def test_what_weighs_more_or_far_less_than_its_limit_is_said() -> None:
    assert faults({"package": 100}, {"package": 100}) == []
    assert "may have 99" in faults({"package": 100}, {"package": 99})[0]
    assert "lower the limit" in faults({"package": 100}, {"package": 400})[0]
