"""The figures of zoo models that are known without building them, from ``figures.json`` (``make
zoo-figures``)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources

FILE = "figures.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The figures of one training step of a model at ``batch`` samples, in the model's own dtypes, unsplit.

    Attributes:
        parameters: the number of scalars; tied parameters count once.
        parameter_bytes: their bytes.
        kept_bytes: activations kept from forward to backward (CPU kernels).
        output_bytes: the outputs of all operators, in forward alone; views have none of their own.
        operators, groups: their numbers in the captured graph, and in the graph that the search sees.
        treewidth: an upper bound on that of the search's graph (the width that the min-fill order gives).
        flop: the FLOP of forward and backward, multiply-adds counted as two.
        rule_share: the share of the forward FLOP in groups whose operators all have a sharding rule.
        split_share: the share of it in groups that can be split at least two ways.
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
    """Return the figures of each model of the zoo by name; a model that was not counted is missing."""
    text = resources.files("tensoropt.zoo").joinpath(FILE).read_text(encoding="utf-8")
    return {name: Figures(**row) for name, row in json.loads(text)["models"].items()}
