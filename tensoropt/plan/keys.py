"""Hash keys of plans. Two plans have the same key if they do the same, even if their predictions differ.

A key is 16 hex digits: an order-independent hash of the model, optimizer, mesh and everything that a plan
states about its operators, parameters and tensors. Plan files do not contain their keys.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import reduce
from hashlib import blake2b
from operator import xor
from typing import Any

from tensoropt.plan.plan import Plan


def plan_key(plan: Plan) -> str:
    mesh, step = plan.mesh, (plan.model.fingerprint, plan.optimizer)
    base = _hash(("step", step, mesh.shape, mesh.names, mesh.placed, plan.micro_batches))
    return f"{reduce(xor, map(_hash, _said(plan)), base):016x}"


def _said(plan: Plan) -> Iterator[tuple[Any, ...]]:
    for name, one in plan.operators.items():
        place = one.device, one.order, one.backward_order
        yield "operator", name, list(one.axes.values()), place
    for name, parameter in plan.parameters.items():
        yield "parameter", name, parameter.stored, parameter.device
    for name, layout in plan.hubs.items():
        yield "hub", name, layout
    for word in ("recomputed", "once", "gathered_again"):
        for name in getattr(plan, word):
            yield word.replace("_", " "), name
    for name, own in plan.kind.key.items():
        data = plan.info.model_dump(mode="json", include=set(own))
        yield name, {field: value for field, value in data.items() if value or field != "kinds"}


def _hash(piece: object) -> int:
    text = json.dumps(piece, sort_keys=True, separators=(",", ":"))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")
