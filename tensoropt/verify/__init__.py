"""Prediction beside reality: plans are run next to the unsplit model on the same data.

What is predicted comes from the cost side (facts, measurements, link fits), what is measured from the
executor; here the two meet and ``ok`` is decided: the numbers agree to rounding, replicas agree, and the
collectives issued are those predicted, one by one. Memory and time are shown, not judged.
"""

from __future__ import annotations

from tensoropt.verify.plans import (
    model_spec,
    unsplit_plan,
    verify_plan,
    verify_plans,
    verify_random,
    verify_unsplit,
)
from tensoropt.verify.predict import Prediction, predict

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
