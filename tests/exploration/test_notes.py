"""Notes about what is not in the points, and the others."""

from dataclasses import replace

import pytest

from tensoropt.exploration.notes import notes_of
from tests.plan.explorations import small_exploration


@pytest.mark.parametrize(("note", "missing"), [
    ("some or all pipelines with the schedule zero_bubble were left out: use 1f1b", True),
    ("not searched: mesh 2x2x4, micro-batches 1: at 2 it has no strategy that beats others", True),
    ("placed plans were not tried: --placements always tries them", True),
    ("no plan of megatron: this model has no scaled_dot_product_attention", True),
    ("result kept from 2026-11-27 18:13, as nothing has changed; --anew explores again", True),
    ("the host's launch time is estimated: 15 us an operator forward", False),
    ("pipelines: 1,244 simulated, 20 of them among the points", False),
])  # fmt: skip
def test_what_is_missing_is_told_from_where_figures_come_from(note, missing):
    found = small_exploration()
    told = replace(found, spaces=(), report={**found.report, "notes": [note, note]})
    assert (notes_of(told, missing=missing), notes_of(told, missing=not missing)) == ([note], [])
