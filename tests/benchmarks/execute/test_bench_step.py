"""What the benchmark of executed steps times has a strategy, also where a placed plan would be faster."""

import pytest

from tensoropt.engine.models import ModelSpec
from tests.benchmarks.execute.bench_step import OURS, explored

pytest.importorskip("transformers")


def test_the_fastest_plan_has_a_strategy():
    # Without being told, an exploration of this model ends at a placed plan.
    spec = ModelSpec("zoo:gpt2-tiny", settings=(("layers", 1),))
    strategies, seconds, refused = explored(spec, measure="never")
    assert all(strategies[name]["groups"] for name in ("plan", OURS))
    assert seconds > 0
    assert refused == {}
