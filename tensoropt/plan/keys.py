"""Keys of plans: equal for plans that do the same, whatever their figures.

A key is 16 hex digits: a hash of the model, optimizer, mesh and everything that a plan states on its
operators, parameters and tensors. Plans do not store it.
"""

from __future__ import annotations

import json
from hashlib import blake2b

from tensoropt.plan.plan import Plan

_DONE = {
    "mesh", "micro_batches", "optimizer", "operators", "hubs", "parameters", "recomputed", "once",
    "gathered_again", "stages",
}  # fmt: skip
"""The fields of a plan that say what is done."""


def plan_key(plan: Plan) -> str:
    done = plan.model_dump(mode="json", include=_DONE, exclude={"stages": {"peak_bytes"}})
    text = json.dumps([plan.model.fingerprint, done], sort_keys=True)
    return blake2b(text.encode(), digest_size=8).hexdigest()
