"""Functions that replace the compute dtype ``auto``: by bfloat16 for language models on GPUs that support it,
otherwise by float32, which leaves the model's own dtypes as they are.

Language models are trained in bfloat16 on such GPUs, so float32 figures would describe a step that nobody
runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from tensoropt.cluster import Cluster
from tensoropt.question.model_source import is_config
from tensoropt.question.settings import Settings
from tensoropt.question.zoo_table import listed

AUTO, _WIDE, _NARROW = "auto", "float32", "bfloat16"


def _is_language_model(source: str) -> bool:
    """Return whether a source names a language model: of the zoo, or a ``transformers`` config."""
    if is_config(source):
        return True
    if not source.startswith("zoo:"):
        return False
    name = source.removeprefix("zoo:").partition("?")[0]
    if name not in listed():
        from tensoropt.zoo import entry  # imports PyTorch

        entry(name)  # raises
    return listed()[name].language_model


def dtype_of(source: str, clusters: Iterable[Cluster]) -> tuple[str, str]:
    """Return the dtype that ``auto`` stands for, and a sentence with the reason, or "" if there is no choice.

    Args:
        source: the model's source; "" for a module.
        clusters: all clusters on which the model is explored; they share one dtype, so that steps compare.

    Raises:
        ZooError: the zoo does not have the model.
    """
    kinds = [kind for cluster in clusters for kind in cluster.device_kinds]
    if not _is_language_model(source) or "cuda" not in {kind.type for kind in kinds}:
        return _WIDE, ""
    without = next((kind.name for kind in kinds if not kind.has_bfloat16), "")
    if without:
        return _WIDE, f"computes in {_WIDE}: {without} has no {_NARROW}"
    return (
        _NARROW,
        f"computes in {_NARROW}, as is usual for language models and transformers ({_WIDE} can be chosen)",
    )


def with_dtype(settings: Settings, source: str, clusters: Iterable[Cluster]) -> Settings:
    """Return the settings with ``auto`` replaced by a dtype; any other dtype stays.

    Args:
        source, clusters: as in :func:`dtype_of`.
    """
    if settings.dtype != AUTO:
        return settings
    return replace(settings, dtype=dtype_of(source, clusters)[0])
