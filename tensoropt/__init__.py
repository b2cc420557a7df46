"""TensorOpt: a multi-objective cost-frontier explorer for distributed training.

``import tensoropt`` is light: a name's module is imported when the name is first used.
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
    from tensoropt.api import compare, explore, recost, with_jobs
    from tensoropt.capture.onnx import load_onnx
    from tensoropt.catalogue import list_clusters, list_models, list_planners
    from tensoropt.cluster import Cluster, load_cluster
    from tensoropt.estimate.fit import fit
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
    from tensoropt.machine import dashboard, detect, measure_links, profiles
    from tensoropt.plan.plan import Plan, load_plan
    from tensoropt.plan.point import Point
    from tensoropt.plan.space import Space
    from tensoropt.question.model_source import load_model
    from tensoropt.question.settings import Settings
    from tensoropt.saved import choose, export_csv, export_frontiers, export_job, show
    from tensoropt.sharding.constraints import ConstraintError
    from tensoropt.tuning.tune import tune
    from tensoropt.verify import verify_plan, verify_random

_MODULE_OF = {
    "Cluster": "tensoropt.cluster",
    "ConstraintError": "tensoropt.sharding.constraints",
    "Exploration": "tensoropt.exploration.exploration",
    "Plan": "tensoropt.plan.plan",
    "Point": "tensoropt.plan.point",
    "Settings": "tensoropt.question.settings",
    "Space": "tensoropt.plan.space",
    "choose": "tensoropt.saved",
    "compare": "tensoropt.api",
    "dashboard": "tensoropt.machine",
    "detect": "tensoropt.machine",
    "explore": "tensoropt.api",
    "export_csv": "tensoropt.saved",
    "export_frontiers": "tensoropt.saved",
    "export_job": "tensoropt.saved",
    "fit": "tensoropt.estimate.fit",
    "list_clusters": "tensoropt.catalogue",
    "list_models": "tensoropt.catalogue",
    "list_planners": "tensoropt.catalogue",
    "load": "tensoropt.exploration.exploration",
    "load_checkpoint": "tensoropt.execute",
    "load_cluster": "tensoropt.cluster",
    "load_model": "tensoropt.question.model_source",
    "load_onnx": "tensoropt.capture.onnx",
    "load_plan": "tensoropt.plan.plan",
    "measure_links": "tensoropt.machine",
    "original_shape": "tensoropt.execute",
    "parallelize": "tensoropt.execute",
    "profiles": "tensoropt.machine",
    "recost": "tensoropt.api",
    "sampler": "tensoropt.execute",
    "save_checkpoint": "tensoropt.execute",
    "save_pretrained": "tensoropt.execute",
    "show": "tensoropt.saved",
    "shutdown": "tensoropt.execute",
    "tune": "tensoropt.tuning.tune",
    "verify_plan": "tensoropt.verify",
    "verify_random": "tensoropt.verify",
    "whole": "tensoropt.execute",
    "with_jobs": "tensoropt.api",
}
"""The module that each name is imported from when it is first used."""
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
    "export_csv",
    "export_frontiers",
    "export_job",
    "fit",
    "list_clusters",
    "list_models",
    "list_planners",
    "load",
    "load_checkpoint",
    "load_cluster",
    "load_model",
    "load_onnx",
    "load_plan",
    "measure_links",
    "original_shape",
    "parallelize",
    "profiles",
    "recost",
    "sampler",
    "save_checkpoint",
    "save_pretrained",
    "show",
    "shutdown",
    "tune",
    "verify_plan",
    "verify_random",
    "whole",
    "with_jobs",
]


def __dir__() -> list[str]:
    """Return the public names; submodules are left out, because they are imported by their own names."""
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'tensoropt' has no attribute '{name}'")
    # Called by Python for names that the module does not have (PEP 562).
    return getattr(importlib.import_module(_MODULE_OF[name]), _NAMED_THERE.get(name, name))
