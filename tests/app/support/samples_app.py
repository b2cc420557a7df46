"""Explorations made up for the dashboard's tests: small, exact in every figure, or as long as wanted."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tensoropt import Exploration, Point, Space, load_cluster
from tensoropt.costs.device_fit import _ALLOCATOR_SHARE, _DRIVER_SHARE
from tensoropt.plan.plan import MeshInfo, ModelInfo, OperatorPlan, StagesInfo
from tensoropt.plan.point_records import StagesRecord

GIB = 2.0**30
GROUPS = ("embedding", "attention", "mlp", "head")


def space(shape: Sequence[int] = (2, 4), micro_batches: int = 1) -> Space:
    """Four groups, each of which is split along the batch, along the model, or not at all."""
    names = tuple("ab"[: len(shape)])
    plain, data, model = (["none"] * len(names), ["d0"] * len(names), ["out_features"] * len(names))
    groups = {
        name: {
            "micro": "d0",
            "members": [name],
            "parameters": [f"p_{name}"],
            "configurations": [plain, data, model],
            "options": [[[["R", *["R"] * len(names)]]]] * 3,
        }
        for name in GROUPS
    }
    return Space(
        mesh=MeshInfo(shape=tuple(shape), names=names), micro_batches=micro_batches, groups=groups, hubs={},
        shared={}, keys={f"p_{name}": f"model.{name}.weight" for name in GROUPS},
    )  # fmt: skip


def point(needs_bytes: float, time_s: float, **more: Any) -> Point:
    """A point that needs so much of an H100, whose tensors are a fifth of each kind and whose time is two
    thirds compute."""
    context = min(GIB / 8, needs_bytes / 100)
    tensors = (needs_bytes - _DRIVER_SHARE * 80 * GIB - context) / (1 + _ALLOCATOR_SHARE)
    tensors = tensors if tensors > 0 else needs_bytes / 2
    memory_bytes = tensors + context
    fields: dict[str, Any] = {
        "memory_bytes": memory_bytes, "time_s": time_s, "compute_s": time_s * 2 / 3,
        "communication_s": time_s / 3, "exposed_s": time_s / 3, "hidden_s": 0.0,
        "additive_memory_bytes": memory_bytes, "additive_time_s": time_s, "memory": (tensors / 5,) * 5,
        "terms": {"context": context}, "space": 0, "choice": (1, 2, 0, 1), "options": (0, 0, 0, 0),
        "collectives": (("all_reduce", (0,), 1024, 3),), "sources": {"data sheet": 1.0}, "exact": True,
        "gap": 0.0,
    }  # fmt: skip
    return Point.of(**{**fields, **more})


def exploration(
    points: Sequence[Point] | None = None,
    spaces: Sequence[Space] | None = None,
    cluster: str = "dgx-h100",
    **more: Any,
) -> Exploration:
    """Eight points from 10 to 80 GiB and 800 to 100 ms by default."""
    if points is None:
        points = [point((i + 1) * 10 * GIB, 0.8 - 0.1 * i) for i in range(8)]
    fields: dict[str, Any] = {
        "model": ModelInfo(source="zoo:gpt2-tiny", fingerprint="f" * 64, parameters=124_000_000),
        "cluster": load_cluster(cluster).to_dict(),
        "settings": {"mode": "train", "optimizer": "adam", "micro_batches": "auto", "epsilon": 1e-3,
                     "dtype": "float32"},
        "versions": {"tensoropt": "0"},
        "report": {"operators": 4, "workloads_measured": 0, "device": "H100-80GB",
                   "notes": ["not searched: meshes of more than 2 axes (1)"]},
    }  # fmt: skip
    return Exploration(tuple(points), tuple(spaces or (space(),)), **{**fields, **more})


def of_model(found: Exploration, **fields: Any) -> Exploration:
    """The exploration with other fields of its model."""
    return replace(found, model=found.model.model_copy(update=fields))


def data_url(content: str | bytes) -> str:
    """What a page sends of a file."""
    data = content.encode() if isinstance(content, str) else content
    return "data:application/octet-stream;base64," + base64.b64encode(data).decode()


FORM: dict[str, Any] = {
    "model": "gpt2-tiny", "devices": "dgx-h100", "batch": "", "sequence": "", "dtype": "auto", "more": "",
}  # fmt: skip
"""What the page Plan it sends of its fields."""
CALL = {"args": [], "kwargs": {"input_ids": {"tensor": [16, 64], "dtype": "int64"}}}
"""How a model of tokens is called: 1,024 of them a step."""

PLACED = StagesRecord(
    StagesInfo(peak_bytes=(20 * GIB, 10 * GIB)),
    {
        name: OperatorPlan(axes={}, micro="", device=i % 2, order=i, backward_order=3 - i)
        for i, name in enumerate(("embedding", "attention", "mlp", "head"))
    },
)


def placed() -> Exploration:
    """The exploration with a plan of another planner beside it, which places operators on two devices."""
    mesh = space((2,)).mesh.model_copy(update={"placed": True, "names": ("device",)})
    bare = replace(space((2,)), mesh=mesh, groups={}, keys={})
    mark = point(20 * GIB, 0.9, planner="m_etf", space=1, choice=(), options=(), record=PLACED, exact=False)
    return replace(exploration(spaces=[space(), bare]), others=(mark,))


def long_exploration(count: int) -> Exploration:
    """``count`` points on a hyperbola, from 1 to 79 GiB."""
    memory = np.linspace(1, 79, count) * GIB
    return exploration([point(float(m), float(40 * GIB / m) / 100) for m in memory])
