"""How far a prediction is off what was measured, in words: a miss is said by its size, wherever it stands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tensoropt.plan.made_for import for_gpus
from tensoropt.plan.verified import Verified
from tensoropt.units import format_bytes, format_seconds

OFF, FAR = 1.25, 1.5
"""Ratios, either way, above which a prediction is off, and far off; below is what one run differs from
another. Assumptions."""


def miss_of(measured: float, predicted: float) -> str:
    """``far off``, ``off``, or "" of a prediction that came true."""
    if not measured or not predicted:
        return "far off" if measured != predicted else ""
    ratio = max(measured / predicted, predicted / measured) * (1 - 1e-9)
    return "far off" if ratio > FAR else "off" if ratio > OFF else ""


def change_words(measured: float, predicted: float) -> str:
    """``+1 %``; ``+333 %, far off``; "" where nothing was predicted."""
    if not predicted:
        return ""
    change = f"{100 * (measured / predicted - 1):+.0f} %".replace("-", "−")
    miss = miss_of(measured, predicted)
    return f"{'±0 %' if change in ('+0 %', '−0 %') else change}{f', {miss}' if miss else ''}"


def ran_elsewhere(found: Verified, cluster: Mapping[str, Any]) -> bool:
    """Whether a plan for GPUs ran on CPU ranks, whose seconds nobody predicted."""
    return for_gpus(cluster) and "CPU ranks" in found.checked_on


def ran_parts(
    found: Verified,
    cluster: Mapping[str, Any],
    memory: Callable[[float], str] = format_bytes,
    seconds: Callable[[float], str] = format_seconds,
) -> list[str]:
    """``73.2 MiB tracked (72.3 MiB predicted, +1 %)``, and the same of the step, of what is known.

    Args:
        cluster: that the plan is for.
        memory, seconds: how figures are written.
    """
    told = []
    for word, measured, predicted, text in (
        ("tracked", found.memory_tracked_bytes, found.memory_predicted_bytes, memory),
        ("measured", found.time_measured_s, found.time_predicted_s, seconds),
    ):
        if measured is None:
            continue
        words = [f"{text(predicted)} predicted", change_words(measured, predicted)]
        if word == "measured" and ran_elsewhere(found, cluster):
            words = [f"{text(predicted)} predicted, for other devices than these"]
        told.append(f"{text(measured)} {word} ({', '.join(filter(None, words))})")
    return told


def miss_sentences(found: Verified, cluster: Mapping[str, Any]) -> list[str]:
    """What of a run was far off its prediction, a sentence each; of seconds only where the devices are those
    of ``cluster``, that the plan is for."""
    told = []
    seconds = None if ran_elsewhere(found, cluster) else found.time_measured_s
    for what, measured, predicted, text in (
        ("memory", found.memory_tracked_bytes, found.memory_predicted_bytes, format_bytes),
        ("a step", seconds, found.time_predicted_s, format_seconds),
    ):
        if (
            not found.error
            and measured is not None
            and predicted
            and miss_of(measured, predicted) == "far off"
        ):
            times = f"{measured / predicted:.2g} times what was predicted"
            told.append(
                f"The prediction of {what} is far off: {text(measured)} in the run, {times} "
                f"({text(predicted)}). Trust this plan's figures accordingly."
            )
    return told
