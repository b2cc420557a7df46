"""Verification of plans: compare them with the unsplit model, and their steps with predictions.

A plan is ``ok`` if numbers agree up to rounding, replicas agree, each rank issues the predicted collectives,
ranks issue common ones in the same order, and none needs over 3 % more memory than predicted.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensoropt.verify.random_plans import verify_random
    from tensoropt.verify.run import verify_plan

_MODULE_OF = {"verify_plan": "run", "verify_random": "random_plans"}
"""The module of each name, imported on use, as ranks need no predictions."""

__all__ = ["verify_plan", "verify_random"]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'tensoropt.verify' has no attribute '{name}'")
    return getattr(importlib.import_module(f"tensoropt.verify.{_MODULE_OF[name]}"), name)
