"""TensorOpt finds the worthwhile trade-offs of memory and time of distributed training, and runs one of them.

``import tensoropt`` is fast, since each module is imported only when one of its names is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tensoropt import errors
from tensoropt.errors import (
    CaptureError,
    ClusterError,
    InfeasibleError,
    MeasurementError,
    MissingExtraError,
    PlanError,
    TensorOptError,
)
from tensoropt.version import __version__

if TYPE_CHECKING:
    from tensoropt.api import compare, explore, recost
    from tensoropt.capture.onnx import load_onnx
    from tensoropt.cluster import Cluster, load_cluster
    from tensoropt.execute import (
        load_checkpoint,
        original_shape,
        parallelize,
        sampler,
        save_checkpoint,
        save_pretrained,
        shutdown,
        whole,
    )
    from tensoropt.exploration.exploration import Exploration
    from tensoropt.exploration.exploration import load_exploration as load
    from tensoropt.machine import dashboard, detect, measure_links
    from tensoropt.plan.plan import Plan, load_plan
    from tensoropt.plan.point import Point
    from tensoropt.plan.space import Space
    from tensoropt.question.model_source import load_model
    from tensoropt.question.settings import Settings
    from tensoropt.saved import choose, export_job
    from tensoropt.session.launched import with_jobs
    from tensoropt.sharding.constraints import ConstraintError
    from tensoropt.tuning.tune import tune
    from tensoropt.verify import verify_plan, verify_random

_NAMES = {
    "tensoropt.api": "compare explore recost",
    "tensoropt.capture.onnx": "load_onnx",
    "tensoropt.cluster": "Cluster load_cluster",
    "tensoropt.execute": "load_checkpoint original_shape parallelize sampler save_checkpoint "
    "save_pretrained shutdown whole",
    "tensoropt.exploration.exploration": "Exploration load",
    "tensoropt.machine": "dashboard detect measure_links",
    "tensoropt.plan.plan": "Plan load_plan",
    "tensoropt.plan.point": "Point",
    "tensoropt.plan.space": "Space",
    "tensoropt.question.model_source": "load_model",
    "tensoropt.question.settings": "Settings",
    "tensoropt.saved": "choose export_job",
    "tensoropt.session.launched": "with_jobs",
    "tensoropt.sharding.constraints": "ConstraintError",
    "tensoropt.tuning.tune": "tune",
    "tensoropt.verify": "verify_plan verify_random",
}
"""The public names by module."""
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}
_NAMED_THERE = {"load": "load_exploration"}

__all__ = [
    "CaptureError",
    "Cluster",
    "ClusterError",
    "ConstraintError",
    "Exploration",
    "InfeasibleError",
    "MeasurementError",
    "MissingExtraError",
    "Plan",
    "PlanError",
    "Point",
    "Settings",
    "Space",
    "TensorOptError",
    "__version__",
    "choose",
    "compare",
    "dashboard",
    "detect",
    "errors",
    "explore",
    "export_job",
    "load",
    "load_checkpoint",
    "load_cluster",
    "load_model",
    "load_onnx",
    "load_plan",
    "measure_links",
    "original_shape",
    "parallelize",
    "recost",
    "sampler",
    "save_checkpoint",
    "save_pretrained",
    "shutdown",
    "tune",
    "verify_plan",
    "verify_random",
    "whole",
    "with_jobs",
]


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'tensoropt' has no attribute '{name}'")
    # Python calls this for names that the module lacks (PEP 562).
    return getattr(importlib.import_module(_MODULE_OF[name]), _NAMED_THERE.get(name, name))
