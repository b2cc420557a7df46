"""The models that can be estimated: of the zoo, of the Hugging Face Hub, or in a ``config.json``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from tensoropt.errors import suggest
from tensoropt.estimate.hugging_face import ConfigError, download_config, read_config, sizes_of
from tensoropt.estimate.sizes import LAYER, TransformerSizes
from tensoropt.estimate.strategies import LayeredModel, SimulatedLines, SizedModel

FILE = "figures.json"
_ZOO = "zoo:"
_USUAL_SEQUENCE = 2048
"""The sequence of a model that reads longer ones, unless another is asked about; an assumption."""


@dataclass(frozen=True, kw_only=True)
class Known:
    """A model that can be estimated.

    Attributes:
        name: what people call it.
        source: the model for ``tensoropt explore``; "" if that has to be a Python function.
        batch, sequence: the usual ones; a sequence of 0 if it reads no tokens.
        longest: the longest sequence that it can read, if it has a table of positions; else None.
        notes: remarks on the model.
    """

    name: str
    model: SizedModel
    source: str
    batch: int
    sequence: int
    longest: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def parameters(self) -> int:
        """The number of parameters; tied ones count once."""
        return round(self.model.parameters_on(1))

    def at(self, sequence: int) -> Known:
        """Return the model with the table of positions that a sequence takes, for one of the zoo, whose table
        is as long as its sequence.

        Raises:
            ConfigError: its table of positions is shorter, or it reads no tokens.
        """
        if not self.sequence:
            raise ConfigError(f"'{self.name}' reads no sequence of tokens; leave the sequence out")
        if self.longest is not None and sequence > self.longest:
            raise ConfigError(
                f"'{self.name}' has {self.longest:,} positions, and a sequence of {sequence:,} is longer; "
                f"give at most {self.longest:,}"
            )
        if self.source.startswith(_ZOO) and isinstance(self.model, LayeredModel):
            sizes = self.model.sizes
            positions = sequence if sizes.positions else 0
            return replace(self, model=LayeredModel(replace(sizes, positions=positions)), sequence=sequence)
        return replace(self, sequence=sequence)


@lru_cache(maxsize=1)
def figures() -> Mapping[str, Any]:
    """Return the figures that are kept: of the zoo, and how far estimates are off the simulator's figures."""
    return json.loads(resources.files("tensoropt.estimate").joinpath(FILE).read_text(encoding="utf-8"))


def known_names() -> tuple[str, ...]:
    """Return the models of the zoo that can be estimated."""
    return tuple(figures()["models"])


def known_model(model: str | Path | Mapping[str, Any]) -> Known:
    """Return a model by its name (:func:`known_by_name`), or by the path or the content of a
    ``config.json``.

    Raises:
        ConfigError: nothing has that name, or it cannot be estimated; the message says what can.
    """
    if isinstance(model, Mapping):
        return _of_config(model, str(model.get("_name_or_path") or model.get("model_type") or "the config"))
    path = Path(text := str(model).strip())
    if path.is_dir():
        path /= "config.json"
    if path.suffix == ".json":
        return _of_config(read_config(path), path.stem if path.stem != "config" else path.parent.name or text)
    return known_by_name(text)


def known_by_name(text: str) -> Known:
    """Return a model of the zoo (``zoo:gpt2``, ``gpt2?sequence=512``) or of the Hugging Face Hub
    (``mistralai/Mistral-7B-v0.3``).

    Raises:
        ConfigError: as in :func:`known_model`.
    """
    name, _, options = text.removeprefix(_ZOO).partition("?")
    if name in figures()["models"]:
        return _of_zoo(name, options)
    if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", text, re.ASCII):
        return _of_config(download_config(text), text)
    raise ConfigError(
        f"'{text[:80]}' is neither a model of the zoo with figures, the path of a config.json, nor a name on "
        f"the Hugging Face Hub (ORGANISATION/MODEL); {suggest(name, known_names())}"
    )


def _of_zoo(name: str, options: str) -> Known:
    row, chosen = figures()["models"][name], dict[str, Any]()
    config = row.get("config")
    if options:
        from tensoropt import zoo  # with PyTorch, which is not needed without options

        _, chosen = zoo.read_name(f"{name}?{options}")
        if "lora" in chosen:
            raise ConfigError(
                f"'{name}?{options}' trains its adapters alone, and what is estimated trains all weights; "
                "explore it"
            )
        sequence = {key: value for key, value in chosen.items() if key == "sequence"}
        if config is None:
            raise ConfigError(
                f"'{name}' is estimated from figures of its own sizes; leave out ?{options}, or explore it"
            )
        if chosen != sequence:
            built: Any = zoo.build(name, device="meta", **chosen).model
            config = built.network.config.to_dict()
    source = f"{_ZOO}{name}{'?' * bool(options)}{options}"
    if config is None:
        lines = {
            dtype: {key: (fixed, each) for key, (fixed, each) in rows.items()}
            for dtype, rows in row["lines"].items()
        }
        if not lines:
            raise ConfigError(f"'{name}' is not estimated: {row['refusal']}; explore it")
        model: SizedModel = SimulatedLines(parameters=row["parameters"], lines=lines)
        return Known(name=name, model=model, source=source, batch=row["batch"], sequence=0)
    known = Known(
        name=name, model=LayeredModel(sizes_of(config, f"'{name}'")), source=source, batch=row["batch"],
        sequence=row["sequence"],
    )  # fmt: skip
    return known.at(chosen["sequence"]) if "sequence" in chosen else known


def _of_config(data: Any, name: str) -> Known:
    sizes = sizes_of(data, name)
    notes: list[str] = []
    window = data.get("sliding_window") if data.get("use_sliding_window", True) else None
    if isinstance(window, int):
        notes.append(
            f"attention sees {window:,} tokens back: of a longer sequence the mask is kept as well, which is "
            "not counted"
        )
    return Known(
        name=name, model=LayeredModel(sizes), source=_as_zoo(sizes), batch=1,
        sequence=min(sizes.positions or sizes.longest or _USUAL_SEQUENCE, _USUAL_SEQUENCE),
        longest=sizes.positions or None, notes=tuple(notes),
    )  # fmt: skip


def _as_zoo(sizes: TransformerSizes) -> str:
    plain = TransformerSizes(
        layers=sizes.layers, hidden=sizes.hidden, heads=sizes.heads, key_heads=sizes.key_heads,
        head_dim=sizes.hidden // sizes.heads, inner=sizes.inner, vocabulary=sizes.vocabulary,
        longest=sizes.longest,
    )  # fmt: skip
    options = {"layers": sizes.layers, "hidden": sizes.hidden, "heads": sizes.heads}
    if sizes == plain or sizes == replace(plain, experts=sizes.experts, chosen=sizes.chosen):
        options |= {"key_value_heads": sizes.key_heads, "inner": sizes.inner}
        if sizes.experts:
            options |= {"experts": sizes.experts, "chosen": sizes.chosen}
        name = "mixtral-8x7b" if sizes.experts else "llama3-8b"
    elif sizes.norm == LAYER and not sizes.head_product and sizes.inner == 4 * sizes.hidden and sizes.tied:
        name = "gpt2"
    else:
        return ""
    options["vocabulary"] = sizes.vocabulary
    return f"{_ZOO}{name}?" + "&".join(f"{key}={value}" for key, value in options.items())
