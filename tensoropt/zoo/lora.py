"""LoRA: low-rank adapters beside frozen linear layers (Hu et al., ICLR 2022), made by the package ``peft``.

Adapters are requested behind a model's name, so that command lines and plans build the same model:
``gpt2?lora=r=16,alpha=32,targets=c_attn``.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from tensoropt.errors import TensorOptError, import_extra, suggest
from tensoropt.ops.quantised import QuantisedLinear, Scheme, quantised
from tensoropt.units import read_number, read_whole

LORA = "lora"
"""The name of the option for adapters."""
_EXAMPLE = "r=16,alpha=32,targets=q_proj+v_proj"
_KEYS = ("r", "alpha", "dropout", "targets", "base")
_TASKS = {"ForCausalLM": "CAUSAL_LM", "LMHeadModel": "CAUSAL_LM", "ForConditionalGeneration": "SEQ_2_SEQ_LM"}
"""Ending of a class's name in ``transformers`` -> the task's name in peft."""


@dataclass(frozen=True)
class Lora:
    """The settings of LoRA adapters.

    Attributes:
        r: rank of the adapters.
        alpha: numerator of the factor ``alpha / r`` that scales adapters' outputs; None for peft's default.
        dropout: dropout probability of the adapters' inputs.
        targets: last parts of the names of layers that get adapters, or ``all-linear``; by default peft's
            choice for an architecture of ``transformers``, else ``all-linear``. With ``all-linear``, a model
            of ``transformers`` gets no adapters on its output layer.
        base: quantisation scheme (:data:`tensoropt.ops.quantised.SCHEMES`) of frozen weights; "" for none.
    """

    r: int
    alpha: int | None = None
    dropout: float = 0.0
    targets: tuple[str, ...] = ()
    base: str = ""

    @classmethod
    def of(cls, text: str) -> Lora:
        """Return the settings in ``r=16,alpha=32,dropout=0.05,targets=q_proj+v_proj,base=nf4``.

        Raises:
            TensorOptError: the text is malformed.
        """
        chosen: dict[str, str] = {}
        for part in text.split(","):
            key, equals, value = (word.strip() for word in part.partition("="))
            if not equals or not value:
                raise TensorOptError(f"lora: '{part[:40]}' is no KEY=VALUE; write {_EXAMPLE}")
            if key not in _KEYS:
                raise TensorOptError(f"lora: there is no key '{key[:40]}'; {suggest(key, _KEYS)}")
            if key in chosen:
                raise TensorOptError(f"lora: '{key}' is given twice; give it once")
            chosen[key] = value
        if "r" not in chosen:
            raise TensorOptError(f"lora: '{text[:40]}' has no rank; write r=16, or {_EXAMPLE}")
        try:
            rank, alpha = read_whole(chosen["r"]), read_whole(chosen.get("alpha", "1"))
            dropout, base = read_number(chosen.get("dropout", "0")), chosen.get("base", "")
            if base:
                Scheme.of(base)
        except TensorOptError as error:
            raise TensorOptError(f"lora: {error}") from None
        if rank < 1 or alpha < 1 or not 0 <= dropout < 1:
            raise TensorOptError(
                f"lora: r={rank} and alpha={alpha} have to be at least 1, and dropout={dropout:g} between 0 "
                "and 1"
            )
        targets = tuple(name for name in chosen.get("targets", "").split("+") if name)
        return cls(rank, alpha if "alpha" in chosen else None, dropout, targets, base)


def with_adapters(model: nn.Module, lora: Lora) -> nn.Module:
    """Add adapters to some layers of a model, freeze everything else, and return the model.

    If a ``transformers`` model inside of ``model`` has all parameters, peft wraps this inner model, so that
    its ``save_pretrained`` writes the adapters.

    Args:
        model: a model on the CPU or the meta device, which is changed in place.

    Raises:
        TensorOptError: no layer matches the targets, or a weight cannot be stored as ``lora.base``.
        MissingExtraError: ``peft`` is not installed.
    """
    peft = import_extra("peft", LORA, f"lora=r={lora.r}")
    place = _package_model(model)
    inner = model.get_submodule(place or "")
    chosen: dict[str, Any] = {
        "r": lora.r,
        "lora_dropout": lora.dropout,
        "target_modules": _targets(inner, lora),
    }
    if lora.alpha is not None:
        chosen["lora_alpha"] = lora.alpha
    name = type(inner).__name__
    if place is not None:
        chosen["task_type"] = next((task for end, task in _TASKS.items() if name.endswith(end)), None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft warns of GPT-2's transposed weights, and handles them
        try:
            adapted: nn.Module = peft.get_peft_model(inner, peft.LoraConfig(**chosen))
        except ValueError as error:
            layers = sorted({key.rpartition(".")[2] for key in _linear_layers(inner)})
            raise TensorOptError(
                f"lora: peft finds no adapters for {name} ({str(error).splitlines()[0][:120]}); its linear "
                f"layers are called {', '.join(layers) or 'nothing: it has none'}; name some, as in "
                f"targets={'+'.join(layers[:2]) or 'q_proj+v_proj'}"
            ) from None
    if lora.base:
        _store_in_bytes(adapted, lora.base, kept=_output_of(inner))
    if not place:
        return adapted
    holder, _, last = place.rpartition(".")
    setattr(model.get_submodule(holder), last, adapted)
    return model


def adapters_words(trained: Iterable[tuple[str, Sequence[int]]], schemes: Collection[str] = ()) -> str:
    """Return a text such as ``LoRA r16 on nf4`` for a model that trains only LoRA adapters; else "".

    Args:
        trained: (key, shape) of each trained parameter.
        schemes: quantisation schemes of the model's weights.
    """
    ranks = set()
    for key, shape in trained:
        if ".lora_" not in key:
            return ""
        if re.search(r"\.lora_(embedding_)?A\.", key):
            ranks.add(shape[0])
    base = f" on {' and '.join(sorted(schemes))}" if schemes else ""
    return f"LoRA r{', r'.join(map(str, sorted(ranks)))}{base}" if ranks else ""


def _store_in_bytes(model: nn.Module, scheme: str, kept: nn.Module | None) -> None:
    """Quantise the weights of frozen linear layers, except of ``kept`` and shared ones, as bitsandbytes
    does."""
    from transformers.pytorch_utils import Conv1D

    owners = Counter(id(value) for module in model.modules() for value in module._parameters.values())
    for name in _linear_layers(model):
        layer: Any = model.get_submodule(name)
        weight, bias = layer.weight, layer.bias
        if layer is kept or weight.requires_grad or owners[id(weight)] > 1:
            continue
        holder, _, last = name.rpartition(".")
        try:
            # Stored as (inputs, outputs) in GPT-2.
            stored = quantised(weight.T if isinstance(layer, Conv1D) else weight, scheme)
        except TensorOptError as error:
            raise TensorOptError(f"lora: base={scheme}: {name}: {error}") from None
        setattr(model.get_submodule(holder), last, QuantisedLinear(stored, scheme, bias))


def _output_of(model: nn.Module) -> nn.Module | None:
    """Return the output layer of a model of ``transformers``."""
    find = getattr(model, "get_output_embeddings", None)
    found = None if find is None else find()
    # With adapters on it, the layer itself is inside.
    return getattr(found, "base_layer", found)


def _package_model(model: nn.Module) -> str | None:
    """Return the module path of the ``transformers`` model that has all parameters, or None."""
    transformers = import_extra("transformers", LORA, "lora")
    for path, module in model.named_modules():
        if isinstance(module, transformers.PreTrainedModel):
            own = {id(parameter) for parameter in module.parameters()}
            return path if all(id(parameter) in own for parameter in model.parameters()) else None
    return None


def _targets(model: nn.Module, lora: Lora) -> list[str] | str | None:
    """Return the value of peft's setting ``target_modules``; None for peft's own choice."""
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as KNOWN

    named = lora.targets != ("all-linear",)
    if lora.targets and named:
        return list(lora.targets)
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind is not None:
        return None if named and kind in KNOWN else "all-linear"
    # A pattern of whole names: peft matches a plain name with the end of every module's name.
    return "|".join(map(re.escape, _linear_layers(model)))


def _linear_layers(model: nn.Module) -> list[str]:
    """Return the names of linear layers whose forward is called (not those in ``nn.MultiheadAttention``)."""
    from transformers.pytorch_utils import Conv1D

    inside = {
        id(child)
        for module in model.modules()
        if isinstance(module, nn.MultiheadAttention)
        for child in module.modules()
    }
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and id(module) not in inside
    ]
