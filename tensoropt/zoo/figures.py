"""Figures of zoo models without building them, from ``figures.json`` (``make zoo-figures``)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources

FILE = "figures.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The figures of one training step at ``batch`` samples, in the model's own dtypes, unsplit.

    Attributes:
        parameters: scalars; tied ones count once.
        parameter_bytes: their bytes.
        kept_bytes: activations saved for backward (CPU kernels).
        output_bytes: the outputs of all forward operators but views.
        operators, groups: their numbers in the captured and the grouped graph.
        treewidth: an upper bound on the search graph's (min-fill order).
        flop: the FLOP of forward and backward, multiply-adds counted as two.
        rule_share: the share of forward FLOP in groups with rules for all operators.
        split_share: the share of forward FLOP in groups that can be split at least two ways.
    """

    batch: int
    parameters: int
    parameter_bytes: int
    kept_bytes: int
    output_bytes: int
    operators: int
    groups: int
    treewidth: int
    flop: float
    rule_share: float
    split_share: float


@lru_cache(maxsize=1)
def figures() -> dict[str, Figures]:
    """Return the figures of each model by name; uncounted models are missing."""
    text = resources.files("tensoropt.zoo").joinpath(FILE).read_text(encoding="utf-8")
    return {name: Figures(**row) for name, row in json.loads(text)["models"].items()}
