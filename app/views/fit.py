"""The page *Fit* as data: what its form asks, and the question of a search for the same step."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from tensoropt.cluster import list_devices
from tensoropt.estimate.fit import Fit, fit
from tensoropt.estimate.known import Known, known_by_name, known_model
from tensoropt.question.question import Question
from tensoropt.question.settings import Settings
from tensoropt.units import read_whole

_MEMORY = ("16GiB", "24GiB", "40GiB", "48GiB", "80GiB")
"""Memory of cards, for a device that is not in the list."""
FORM = ("model", "device", "count", "batch", "sequence", "micro", "optimizer", "dtype")
"""The fields of the form."""


def device_names() -> list[str]:
    """Return the devices that the form offers."""
    return [*(name for name in list_devices() if not name.startswith("CPU")), *_MEMORY]


# A name of the Hugging Face Hub may take a download; a slider asks again at every step.
@lru_cache(maxsize=64)
def _named(name: str) -> Known:
    return known_by_name(name)


def fit_of(form: Mapping[str, Any], config: Any = None) -> Fit:
    """Return the answer to a filled form.

    Args:
        config: the content of an uploaded ``config.json``, which replaces the model's name.

    Raises:
        TensorOptError: a field cannot be used; the message says why.
    """
    text = {name: str(form.get(name) or "").strip() for name in FORM}
    known = known_model(config) if isinstance(config, Mapping) else _named(text["model"])
    wholes = {name: read_whole(text[name]) for name in ("count", "batch", "sequence", "micro") if text[name]}
    return fit(
        known, f"{wholes.get('count', 1)}x{text['device']}", batch=wholes.get("batch"),
        sequence=wholes.get("sequence") if known.sequence else None,
        micro_batches=wholes.get("micro", 1), optimizer=text["optimizer"], dtype=text["dtype"],
    )  # fmt: skip


def search_of(found: Fit) -> Question:
    """Return the question of a search for the same step."""
    step = found.step
    settings = Settings(optimizer=step.optimizer, dtype=step.dtype)
    return Question(
        model=found.search_source, cluster=found.cluster.name, batch=step.batch, settings=settings
    )
