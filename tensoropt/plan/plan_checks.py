"""What the fields of a plan must agree on among themselves, said before a model is asked for.

Types of single fields are checked by their declarations; here is what several of them say together, as an
edit by hand easily breaks it. That a plan fits its model is checked where the two meet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import isfinite
from typing import Any

from tensoropt.cluster import Cluster
from tensoropt.errors import PlanError, TensorOptError

STAGE_AXIS = "stage"
"""The name of a mesh axis along which the stages of a pipeline lie."""


def check_plan(plan: Any) -> None:
    """Refuse a plan that contradicts itself.

    Args:
        plan: a :class:`~tensoropt.plan.plan.Plan`, whose module imports this one.

    Raises:
        PlanError: says what does not agree, with its values and what to do.
    """
    _check_mesh(plan)
    _check_cluster(plan)
    axes = plan.mesh.names[1:] if plan.pipeline is not None else plan.mesh.names
    for name, operator in plan.operators.items():
        if plan.placed is None:
            _check_axes(name, operator.axes, axes)
        elif operator.device is None or operator.order is None:
            raise PlanError(f"operator {name} of a placed plan has no device or no order; say both")
    for name, parameter in plan.parameters.items():
        if plan.placed is None and plan.pipeline is None and len(parameter.stored) != 1 + len(axes):
            raise PlanError(
                f"parameter {name} is stored as {list(parameter.stored)}, but has one placement for the "
                f"micro-batches and one for each mesh axis ({_listed(axes)})"
            )
        if parameter.device is not None and parameter.device >= plan.devices:
            raise PlanError(
                f"parameter {name} lies on device {parameter.device}, but the plan has {plan.devices} "
                "devices, counted from 0"
            )
    _check_figures(plan)


def _check_mesh(plan: Any) -> None:
    mesh = plan.mesh
    if any(size < 1 for size in mesh.shape):
        raise PlanError(f"the mesh {list(mesh.shape)} has an axis below 1; give sizes of at least 1")
    if len(mesh.names) != len(mesh.shape) or len(set(mesh.names)) != len(mesh.names):
        raise PlanError(
            f"the mesh {list(mesh.shape)} needs {len(mesh.shape)} different names of axes, and has "
            f"{list(mesh.names)}"
        )
    if plan.pipeline is not None and mesh.names[:1] != (STAGE_AXIS,):
        raise PlanError(
            f"the first axis of a pipeline's mesh is called {STAGE_AXIS}, and here {_listed(mesh.names)}"
        )
    if plan.pipeline is not None and plan.placed is not None:
        raise PlanError("a plan is placed or has a pipeline, and this one both; leave out one of them")
    # The other way round is fine: the first placed plans did not say it of their mesh.
    if mesh.placed and plan.placed is None:
        raise PlanError("the mesh is said to be placed, but the plan has no 'placed'; make both agree")


def _check_cluster(plan: Any) -> None:
    """The cluster of a plan has as many devices as its mesh, where the plan says one."""
    if "kinds" not in plan.cluster:
        return
    try:
        cluster = Cluster.from_dict(plan.cluster)
    except TensorOptError as error:
        raise PlanError(f"the plan's cluster cannot be read: {error}") from error
    except (AttributeError, ValueError) as error:  # fields of a wrong kind, deep inside
        raise PlanError(f"the plan's cluster is not a saved one ({error}); choose the plan again") from error
    if cluster.device_count != plan.devices:
        raise PlanError(
            f"the plan's mesh {plan.mesh.label} has {plan.devices} devices, and its cluster {cluster.name} "
            f"{cluster.device_count}; explore on as many devices as are meant, for example --cluster "
            f"{cluster.name}[{plan.devices}]"
        )


def _check_axes(name: str, given: Mapping[str, str], axes: tuple[str, ...]) -> None:
    for axis in given:
        if axis not in axes:
            raise PlanError(
                f"operator {name} has the axis '{axis}', which the mesh has not; it has {_listed(axes)}"
            )
    for axis in axes:
        if axis not in given:
            raise PlanError(
                f"operator {name} says nothing of the mesh axis '{axis}'; write which of its dims that "
                "splits, or none"
            )


def _check_figures(plan: Any) -> None:
    for name, value in plan.predicted:
        # A gap may be without bound, and everything else is measured in bytes or seconds.
        figures = value.values() if isinstance(value, Mapping) else (value,)
        wrong = [x for x in figures if isinstance(x, int | float) and not (isfinite(x) and x >= 0)]
        if wrong and name != "gap":
            raise PlanError(f"the predicted {name} is {wrong[0]}, but figures are finite and not below 0")


def pairs_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object as a dict, after refusing a key that stands twice: readers would take one of both."""
    twice = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
    if twice:
        raise PlanError(f"the key '{twice[0]}' stands twice; keep one of them")
    return dict(pairs)


def no_constant(name: str) -> float:
    """Refuses NaN, which compares with nothing; infinities are numbers."""
    if name == "NaN":
        raise PlanError("NaN is no figure; choose the plan again")
    return float(name.replace("Infinity", "inf"))


def _listed(axes: tuple[str, ...]) -> str:
    return ", ".join(axes) or "no axes"
