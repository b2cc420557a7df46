"""Comparison of predictions with reality: plans are run beside the unsplit model on the same data.

Predictions come from the cost side (facts, measurements, link fits), measurements from the executor; here the
two meet and decide ``ok``: the numbers agree up to rounding, replicas agree, each rank issues the collectives
predicted, ranks issue what they share in the same order, and none has over 3 % more memory in tensors than
predicted. Time is shown and decides nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensoropt.verify.random_plans import verify_random
    from tensoropt.verify.run import verify_plan

_MODULE_OF = {
    "verify_plan": "run",
    "verify_random": "random_plans",
}
"""The module that each name is imported from when it is first used: ranks need none of the predictions."""

__all__ = [
    "verify_plan",
    "verify_random",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'tensoropt.verify' has no attribute '{name}'")
    return getattr(importlib.import_module(f"tensoropt.verify.{_MODULE_OF[name]}"), name)
