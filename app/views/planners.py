"""Which published planners may find something beside a frontier."""

from __future__ import annotations

from tensoropt.planners import ENTRIES
from tensoropt.planners.registry import foreseen_refusal

from .frontier import FrontierData


def refusals(devices: int, *, training: bool, attention: bool | None = None) -> dict[str, str]:
    """Return why each planner is known to refuse, by name; "" for those that may find something."""
    return {
        name: foreseen_refusal(entry, devices, training=training, attention=attention)
        for name, entry in ENTRIES.items()
    }


def refusals_beside(data: FrontierData) -> dict[str, str]:
    """Return :func:`refusals` for an exploration, whose operators say whether it has attention."""
    shown = data.exploration
    attention = None
    if shown.recorded is not None:
        attention = any("scaled_dot_product_attention" in op.target for op in shown.recorded.graph.operators)
    training = shown.settings.get("mode", "train") == "train"
    return refusals(len(shown.cluster["devices"]), training=training, attention=attention)
