"""Rules are of operators that exist; what they split, `tests/sweep` compares with whole operators."""

from __future__ import annotations

from tensoropt.ops.families.stages import ARRIVE, DEPART
from tensoropt.ops.registry import _BY_TARGET, resolve_function

OWN = {ARRIVE, DEPART}
"""Operators of the graphs of a pipeline's stages, of which PyTorch knows nothing: they run as kernels."""


def test_every_rule_is_for_an_operator_that_exists():
    """A misspelt target would be a rule that never applies."""
    unknown = []
    for target in {name for name, spec in _BY_TARGET.items() if spec.rule is not None} - OWN:
        try:
            resolve_function(target)
        except AttributeError:
            unknown.append(target)
    assert not unknown
