"""The zoo's models and their sizes, read from ``zoo/figures.json`` (``make zoo-figures``) without PyTorch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "zoo" / "figures.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A model of the zoo, as ``tensoropt list models`` shows it.

    Attributes:
        batch: the default batch in samples.
        requires: the package of the extra ``zoo`` that the model needs; None if it needs none.
        options: the options that can be set behind the model's name, with their defaults.
    """

    size: str
    batch: int
    description: str
    paper: str
    requires: str | None
    options: Mapping[str, Any]

    @property
    def language_model(self) -> bool:
        """Whether all inputs of the model are tokens, as for language models and translators."""
        return "vocabulary" in self.options and "image" not in self.options


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The sizes of one training step at ``batch`` samples, in the model's own dtypes, on one device.

    Attributes:
        parameters: number of parameter elements; tied ones count once.
        parameter_bytes: size of the parameters in bytes.
        kept_bytes: size in bytes of activations saved for backward (CPU kernels).
        output_bytes: size in bytes of the outputs of all forward operators but views.
        operators, groups: number of operators in the captured graph, and of groups that they are joined to.
        treewidth: an upper bound on the treewidth of the search's graph (min-fill order).
        flop: the FLOP of forward and backward, multiply-adds counted as two.
        rule_share: the share of forward FLOP in groups in which every operator has a rule for its splits.
        split_share: the share of forward FLOP in groups that can be split in two or more ways.
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


@cache
def _table() -> dict[str, dict[str, Any]]:
    table: dict[str, dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
    return table


@cache
def listed() -> dict[str, Listed]:
    """Return the models of the zoo by name."""
    return {name: Listed(**row) for name, row in _table()["listed"].items()}


@cache
def figures() -> dict[str, Figures]:
    """Return the sizes of each model's training step, by name."""
    return {name: Figures(**row) for name, row in _table()["models"].items()}
