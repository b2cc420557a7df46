"""Comparison of predictions with reality: plans are run beside the unsplit model on the same data.

Predictions come from the cost side (facts, measurements, link fits), measurements from the executor; here the
two meet and decide ``ok``: the numbers agree up to rounding, replicas agree, and the collectives issued are
those predicted, one by one and in order. Memory and time are shown and decide nothing.
"""

from __future__ import annotations

from tensoropt.engine.models import ModelSpec
from tensoropt.verify.plans import verify_plan, verify_plans
from tensoropt.verify.predict import Prediction, predict
from tensoropt.verify.random_plans import verify_random
from tensoropt.verify.unsplit import unsplit_plan, verify_unsplit

model_spec = ModelSpec.of
"""The model of a plan, as ranks build it."""

__all__ = [
    "Prediction",
    "model_spec",
    "predict",
    "unsplit_plan",
    "verify_plan",
    "verify_plans",
    "verify_random",
    "verify_unsplit",
]
