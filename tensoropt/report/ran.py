"""The result of running a plan beside its predictions, in words that say how far these are off."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tensoropt.exploration.rates import for_gpus
from tensoropt.exploration.verified import Verified
from tensoropt.units import format_bytes, format_seconds

_OFF, _FAR = 1.25, 1.5
"""The ratios of measurement and prediction, in either direction, above which a prediction is off, and far
off. Smaller ones also occur between runs. Assumptions."""


def _miss_of(measured: float, predicted: float) -> str:
    if not measured or not predicted:
        return "far off" if measured != predicted else ""
    ratio = max(measured / predicted, predicted / measured) * (1 - 1e-9)
    return "far off" if ratio > _FAR else "off" if ratio > _OFF else ""


def _change_words(measured: float, predicted: float) -> str:
    """Return the error of a prediction as ``+1 %`` or ``+333 %, far off``; "" if nothing was predicted."""
    if not predicted:
        return ""
    change = f"{100 * (measured / predicted - 1):+.0f} %".replace("-", "−")
    miss = _miss_of(measured, predicted)
    return f"{'±0 %' if change in ('+0 %', '−0 %') else change}{f', {miss}' if miss else ''}"


def ran_words(
    verified: Verified,
    cluster: Mapping[str, Any],
    memory: Callable[[float], str] = format_bytes,
    seconds: Callable[[float], str] = format_seconds,
) -> str:
    """Return what was measured, with predictions: ``73.2 MiB tracked (72.3 MiB predicted, +1 %); 352 ms
    measured (...); numbers match the unsplit model``.

    Args:
        cluster: the cluster that the plan is for.
        memory, seconds: the functions that format sizes and durations.
    """
    if verified.error:
        return f"did not run: {verified.error}"
    parts = []
    for word, measured, predicted, text in (
        ("tracked", verified.memory_tracked_bytes, verified.memory_predicted_bytes, memory),
        ("measured", verified.time_measured_s, verified.time_predicted_s, seconds),
    ):
        if measured is None:
            continue
        words = [f"{text(predicted)} predicted", _change_words(measured, predicted)]
        if word == "measured" and "CPU ranks" in verified.checked_on and for_gpus(cluster):
            words = [f"{text(predicted)} predicted, for other devices than these"]
        parts.append(f"{text(measured)} {word} ({', '.join(filter(None, words))})")
    if verified.loss_difference is None:
        parts.append(f"collectives {'as' if verified.ok else 'NOT as'} predicted")
    else:
        equal = "match" if verified.ok else "do NOT match"
        parts.append(f"numbers {equal} the unsplit model")
    return "; ".join(parts)
