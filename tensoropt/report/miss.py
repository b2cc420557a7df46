"""The words for how far a prediction is off a measurement, by the size of the miss, for every place that
shows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tensoropt.plan.made_for import for_gpus
from tensoropt.plan.verified import Verified
from tensoropt.units import format_bytes, format_seconds

OFF, FAR = 1.25, 1.5
"""The ratios, in either direction, above which a prediction is off, and far off; smaller ones also occur
between runs. Assumptions."""


def _miss_of(measured: float, predicted: float) -> str:
    """Return ``far off``, ``off``, or "" for a prediction that came true."""
    if not measured or not predicted:
        return "far off" if measured != predicted else ""
    ratio = max(measured / predicted, predicted / measured) * (1 - 1e-9)
    return "far off" if ratio > FAR else "off" if ratio > OFF else ""


def change_words(measured: float, predicted: float) -> str:
    """Format a change: ``+1 %``; ``+333 %, far off``; "" if nothing was predicted."""
    if not predicted:
        return ""
    change = f"{100 * (measured / predicted - 1):+.0f} %".replace("-", "−")
    miss = _miss_of(measured, predicted)
    return f"{'±0 %' if change in ('+0 %', '−0 %') else change}{f', {miss}' if miss else ''}"


def _ran_elsewhere(found: Verified, cluster: Mapping[str, Any]) -> bool:
    """Return whether a plan for GPUs ran on CPU ranks, whose seconds nobody predicted."""
    return for_gpus(cluster) and "CPU ranks" in found.checked_on


def ran_parts(
    found: Verified,
    cluster: Mapping[str, Any],
    memory: Callable[[float], str] = format_bytes,
    seconds: Callable[[float], str] = format_seconds,
) -> list[str]:
    """Format what is known of a run: ``73.2 MiB tracked (72.3 MiB predicted, +1 %)``, and the same for the
    step.

    Args:
        cluster: the cluster that the plan is for.
        memory, seconds: the functions that format figures.
    """
    told = []
    for word, measured, predicted, text in (
        ("tracked", found.memory_tracked_bytes, found.memory_predicted_bytes, memory),
        ("measured", found.time_measured_s, found.time_predicted_s, seconds),
    ):
        if measured is None:
            continue
        words = [f"{text(predicted)} predicted", change_words(measured, predicted)]
        if word == "measured" and _ran_elsewhere(found, cluster):
            words = [f"{text(predicted)} predicted, for other devices than these"]
        told.append(f"{text(measured)} {word} ({', '.join(filter(None, words))})")
    return told


def miss_sentences(found: Verified, cluster: Mapping[str, Any]) -> list[str]:
    """Say which figures of a run were far off their prediction, a sentence each; seconds only if the devices
    are those of ``cluster``, which the plan is for."""
    told = []
    seconds = None if _ran_elsewhere(found, cluster) else found.time_measured_s
    for what, measured, predicted, text in (
        ("memory", found.memory_tracked_bytes, found.memory_predicted_bytes, format_bytes),
        ("a step", seconds, found.time_predicted_s, format_seconds),
    ):
        if (
            not found.error
            and measured is not None
            and predicted
            and _miss_of(measured, predicted) == "far off"
        ):
            times = f"{measured / predicted:.2g} times what was predicted"
            told.append(
                f"The prediction of {what} is far off: {text(measured)} in the run, {times} "
                f"({text(predicted)}). Trust this plan's figures accordingly."
            )
    return told
