"""A plan's name in plain words."""

from __future__ import annotations

import re

from tensoropt.plan.plan_names import JOIN

_ZERO = {
    "1": "the optimizer's state in shards",
    "2": "gradients and the optimizer's state in shards",
    "3": "parameters, gradients and the optimizer's state in shards",
}
_WORDS = (
    (r"one device", "everything on one device"),
    (r"PP (\d+) (.+)", r"a pipeline of \1 stages (\2)"),
    (r"DP ([\d×]+)", r"the batch split over \1 devices"),
    (r"TP ([\d×]+) \+ SP", r"layers and sequences split over \1 devices"),
    (r"TP ([\d×]+)", r"layers split over \1 devices"),
    (r"CP ([\d×]+)(?: \((.+)\))?", r"each sequence shared by \1 devices"),
    (r"EP ([\d×]+)", r"experts spread over \1 devices"),
    (r"(\d+) micro-batches", r"\1 micro-batches"),
    (r"(\d+) alike", r"\1 devices that compute the same"),
    (r"recomputed", "all blocks computed again in backward"),
    (r"(.+) recomputed in part", r"\1 partly computed again in backward"),
    (r"(.+) recomputed", r"\1 computed again in backward"),
)
"""Parts of a plan's name as regular expressions, with their meanings; pipelines come first."""


def plain(name: str) -> str:
    """Return a plan's name as a sentence: ``A pipeline of 4 stages (1F1B), layers split over 2 devices, 17
    blocks computed again in backward.`` Unknown parts stay as they are."""
    said = sorted(map(_part, name.split(JOIN)), key=lambda words: not words.startswith("a pipeline"))
    sentence = ", ".join(said)
    return f"{sentence[:1].upper()}{sentence[1:]}."


def _part(part: str) -> str:
    if re.match(r"ZeRO-\d", part):
        return ", ".join(map(_stored, part.split(", ")))
    if other := re.fullmatch(r"(.+?) \((?:\w+, )?(.+ %)\)", part):
        shares = " and ".join(re.findall(r"[\d.]+ %", other.group(2)))
        return f"{_part(other.group(1))} (apart from {shares} of the time)"
    for pattern, words in _WORDS:
        if match := re.fullmatch(pattern, part):
            return match.expand(words)
    return part


def _stored(stage: str) -> str:
    """Return the words for ``ZeRO-2``, or for ``ZeRO-2 13 %`` with its share of the parameters."""
    name, _, share = stage.partition(" ")
    words = _ZERO.get(name.removeprefix("ZeRO-"), name)
    return f"{words} ({share})" if share else words
