"""What usual strategies need of the devices in the form, by arithmetic, before anything is searched."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from tensoropt.cluster import Cluster, load_cluster
from tensoropt.errors import TensorOptError
from tensoropt.estimate.fit import Fit, fit
from tensoropt.estimate.known import Known, known_by_name, known_model

from ..jobs.request import cluster_of, model_source
from ..jobs.uploads import Uploads

_OPTIMIZER = re.compile(r"--optimizer[ =](\w+)")


# A name of the Hugging Face Hub may take a download; a field asks again at every change.
@lru_cache(maxsize=64)
def _named(name: str) -> Known:
    return known_by_name(name)


def fit_of(form: Mapping[str, Any], uploads: Uploads) -> Fit:
    """Return the answer to a filled form.

    Raises:
        TensorOptError: a field cannot be used, or there is no estimate; the message says why.
    """
    text = {name: str(value or "").strip() for name, value in form.items()}
    source, label = model_source(text["model"], uploads)
    if source.endswith(".onnx") or ".py:" in source:
        raise TensorOptError("a file of your own is not estimated before the search")
    known = known_model(Path(source)) if source.endswith("config.json") else _named(label)
    # A kind of card that only its memory is known of is enough here.
    devices: str | Cluster = text["devices"]
    if not re.fullmatch(r"\d{1,4}x[\w.-]+", text["devices"]):
        devices = load_cluster(cluster_of(text["devices"], uploads))
    batch = re.match(r"\d+", text["batch"])
    sequence = re.fullmatch(r"\d+", text["sequence"])
    optimizer = _OPTIMIZER.search(text["more"])
    return fit(
        known, devices, batch=int(batch.group()) if batch else None,
        sequence=int(sequence.group()) if sequence and known.sequence else None,
        optimizer=optimizer.group(1) if optimizer else "adam",
        dtype="bfloat16" if text["dtype"] in ("", "auto") else text["dtype"],
    )  # fmt: skip
