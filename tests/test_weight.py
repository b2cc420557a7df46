"""The weight of code, counted by hand."""

from __future__ import annotations

from tests.weight import weight

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
