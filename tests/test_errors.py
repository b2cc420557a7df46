"""Every error that input can cause is one family, so that the command line can catch it."""

from __future__ import annotations

import inspect

import pytest

from tensoropt import errors
from tensoropt.errors import ClusterError, TensorOptError

ERRORS = [
    value for _, value in inspect.getmembers(errors, inspect.isclass) if value.__module__ == errors.__name__
]


@pytest.mark.parametrize("error", ERRORS)
def test_is_a_tensoropt_error_with_a_docstring(error: type[Exception]) -> None:
    assert issubclass(error, TensorOptError)
    assert error.__doc__


def test_a_bad_cluster_is_also_a_value_error() -> None:
    with pytest.raises(ValueError, match="negative"):
        raise ClusterError("link 0-1 has a negative bandwidth")
