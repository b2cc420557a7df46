"""Two ranks on one device: split plans whose numbers its own kernels compute, with a single card."""

from __future__ import annotations

import math
from typing import Any

from tensoropt.profiling.store import ProfileStore
from tensoropt.selftest.outcome import Bounded, CheckContext, Outcome
from tensoropt.verify import verify_random

_CLUSTER = "dgx-a100[2]"
"""Two devices priced from data sheets: nothing is timed for them."""
STRATEGIES = (
    ("zoo:gpt-mini", "float32", False, 3),
    ("zoo:mlp", "bfloat16", False, 1),
    ("zoo:mlp", "float32", True, 1),
)
"""Models, precisions, whether strategies are placed, and how many there are. Of three, one is a pipeline."""


def run(context: CheckContext) -> Outcome:
    """Compare random legal strategies with the unsplit model, as ``verify --random`` does."""
    figures: list[Bounded] = []
    remarks: list[str] = []
    with ProfileStore(context.folder / "profiles.sqlite") as store:
        for source, dtype, placed, count in STRATEGIES:
            answer = verify_random(
                source, _CLUSTER, count, dtype=dtype, placed=placed, store=store, progress=False,
                where="share-gpu" if context.on_gpu else "ranks",
            )  # fmt: skip
            kind = "placements" if placed else "strategies"
            name = f"{source.removeprefix('zoo:')}, {dtype}, {count} random {kind}"
            figures += figures_of(name, answer)
            remarks += [f"{name}: {_reason(plan)}" for plan in _wrong(answer)]
    words = "two ranks share the GPU" if context.on_gpu else "two CPU ranks stand for two on one GPU"
    return Outcome.of(
        figures,
        f"{words}; they talk over gloo",
        "what is wrong depends on the model: how far its own rounding takes it is allowed",
        remarks=remarks,
    )


def figures_of(name: str, answer: dict[str, Any]) -> list[Bounded]:
    """Return what is wrong in an answer of ``verify``, and how far numbers differ."""
    largest = {
        kind: max(_number(plan[f"{kind}_difference"]) for plan in answer["plans"])
        for kind in ("loss", "gradient")
    }
    return [
        Bounded(f"{name}: wrong ones", len(_wrong(answer)) + (not answer["ok"] and not _wrong(answer)), 0),
        *(Bounded(f"{name}: {kind}", value) for kind, value in largest.items()),
    ]


def _wrong(answer: dict[str, Any]) -> list[dict[str, Any]]:
    return [plan for plan in answer["plans"] if not plan["ok"]]


def _reason(plan: dict[str, Any]) -> str | list[str]:
    return plan["error"] or [*plan["collectives_unlike"], *plan["order_unlike"]]


def _number(value: float | None) -> float:
    return math.inf if value is None else value
