"""Every rule on the models it will meet: each operator whole and in pieces, forward and backward.

``CORE`` runs always, ``BREADTH`` (families of ``transformers`` nobody designed the rules for) with the
slow tests. The operators without a rule are listed here, so that a lost rule is a failing test.
"""

from __future__ import annotations

import pytest

from tensoropt.ops.families.stages import ARRIVE, DEPART
from tensoropt.ops.registry import BY_TARGET, resolve_function
from tests.sharding.graph_check import Report, check_graph
from tests.sharding.models import BREADTH, CORE, graph_of

UNKNOWN: dict[str, set[str]] = {
    "mixtral": {"aten.histc.default", "aten.index_put.default", "transformers.grouped_mm_fallback.default"},
}
"""Targets that have no rule, by model: routing of tokens to experts depends on values."""

OWN = {ARRIVE, DEPART}
"""Operators of the graphs of a pipeline's stages, of which PyTorch knows nothing: they run as kernels."""

UNSPLIT = {
    "aten.add.Tensor",  # batch norm counts its batches in a scalar; CLIP scales by one
    "aten.exp.default",
    "aten.div.Tensor",
    "aten.sort.default",  # one dim, sorted
    "aten.cumsum.default",
    "aten.index_put.default",  # Mixtral turns a permutation around: any element may go anywhere
}


def check(name: str) -> Report:
    report = check_graph(graph_of(name))
    assert not report.mismatches, str(report)
    assert set(report.unknown) <= UNKNOWN.get(name, set()), str(report)
    assert set(report.unsplit) <= UNSPLIT, str(report)
    return report


@pytest.mark.slow
@pytest.mark.parametrize("name", CORE)
def test_core_models(name):
    assert check(name).coverage == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("name", BREADTH)
def test_families_of_models(name):
    assert check(name).coverage > 0.94


def test_every_rule_is_for_an_operator_that_exists():
    """A misspelt target would be a rule that never applies."""
    unknown = []
    for target in {name for name, spec in BY_TARGET.items() if spec.rule is not None} - OWN:
        try:
            resolve_function(target)
        except AttributeError:
            unknown.append(target)
    assert not unknown
