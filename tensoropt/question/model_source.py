"""Functions that build a model from its source, such as ``zoo:NAME``, ``file.py:function``, ``FILE.onnx``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tensoropt.errors import TensorOptError
from tensoropt.files import named_function


class ModelSourceError(TensorOptError):
    """The error if a model cannot be built from its source."""


@dataclass(frozen=True)
class OnnxOptions:
    """The options for importing an ONNX file; a plan stores them, so that every rank builds the same model.

    Attributes:
        dims: sizes of open dims, by name.
        outputs: names of tensors to return instead of the file's own outputs.
        loss: ``auto`` or a name of ``tensoropt.capture.onnx.LOSSES``; None returns the outputs.
    """

    dims: tuple[tuple[str, int], ...] = ()
    outputs: tuple[str, ...] = ()
    loss: str | None = None

    @classmethod
    def of(
        cls, dims: Mapping[str, int] | None = None, outputs: Sequence[str] = (), loss: str | None = None
    ) -> OnnxOptions:
        """Return options whose sizes are sorted by name, so that equal options compare as equal."""
        return cls(tuple(sorted((dims or {}).items())), tuple(outputs), loss)


@dataclass(frozen=True)
class LoadedModel:
    """A module with example inputs, and the arguments with which it can be built again.

    Attributes:
        source, seed, batch, onnx: the arguments of :func:`load_model`.
        notes: remarks on the import of an ONNX file.
    """

    model: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""
    notes: tuple[str, ...] = ()
    seed: int = 0
    batch: int | None = None
    onnx: OnnxOptions | None = None


def is_onnx(source: str) -> bool:
    """Return whether a source is an ONNX file, by its suffix."""
    return source.endswith(".onnx")


def is_config(source: str) -> bool:
    """Return whether a source is a Hugging Face config: ``hf:ID``, or a folder with a ``config.json``."""
    named = source.partition("?")[0]
    return named.startswith("hf:") or named.endswith("config.json") or (Path(named) / "config.json").is_file()


def load_model(
    source: str,
    *,
    device: str = "cpu",
    seed: int = 0,
    batch: int | None = None,
    onnx: OnnxOptions | None = None,
    lora: str | None = None,
) -> LoadedModel:
    """Build the model that a source names; the same seed gives the same weights in every process.

    Args:
        source: ``zoo:NAME`` or ``zoo:NAME?OPTION=VALUE&...`` (:func:`tensoropt.zoo.build`), ``FILE.onnx``,
            ``hf:ID`` or a folder with a ``config.json`` (:func:`tensoropt.zoo.configs.from_config`),
            ``package.module:function`` or ``path/file.py:function``. The function returns ``(model, args)``,
            ``(model, args, kwargs)`` or ``(model, args, kwargs, loss)``, where the loss is a function of the
            model's output. The function's parameters with a number or a switch as default are its options.
        device: ``cpu`` or ``meta`` (zoo models, and functions that build under ``torch.device``).
        seed: the seed of the weights.
        batch: the batch size of a zoo model, or of a function with a parameter ``batch``; None for its
            default.
        onnx: options of an ONNX file.
        lora: adapters, the only trained parameters, as ``r=16`` or ``r=16,alpha=32,targets=q_proj+v_proj``
            (:class:`tensoropt.zoo.lora.Lora`); the same as the source's option ``lora``.

    Raises:
        ModelSourceError: the source names no model; the message lists valid forms.
        OnnxError: the ONNX file cannot be imported.
    """
    if onnx is not None and not is_onnx(source):
        raise ModelSourceError(f"--dim, --output and --loss are for ONNX files; {source} is not one")
    source = source if lora is None else with_lora(source, lora)
    loaded = _loaded(source, device, seed, batch, onnx)
    return replace(loaded, source=source, seed=seed, batch=batch, onnx=onnx)


def _loaded(source: str, device: str, seed: int, batch: int | None, onnx: OnnxOptions | None) -> LoadedModel:
    if source.startswith("zoo:"):
        from tensoropt import zoo

        built = zoo.build(source.removeprefix("zoo:"), batch=batch, device=device, seed=seed)
        return LoadedModel(built.model, built.args, built.kwargs)
    if is_onnx(source):
        if batch is not None:
            raise ModelSourceError(f"{source} takes sizes of its inputs instead of a batch; {_DIM_INSTEAD}")
        return _load_onnx(source, device, seed, onnx or OnnxOptions())
    function = _building_function(source)
    arguments = _arguments(function, source, batch)
    return _call(function, source, device, seed, arguments, arguments.pop("lora", None))


_DIM_INSTEAD = "give them by --dim, as in --dim batch=8"


def _building_function(source: str) -> Callable[..., Any]:
    named = source.partition("?")[0]
    if is_config(source):
        from tensoropt.zoo import ZooError
        from tensoropt.zoo.configs import from_config

        try:
            return from_config(named)
        except ZooError as error:
            raise ModelSourceError(str(error)) from None
    if not all(named.rpartition(":")):
        raise ModelSourceError(
            f"'{source}' is not a model source; write zoo:NAME, hf:ID, package.module:function or "
            "path/file.py:function (`tensoropt list models` shows the zoo)"
        )
    try:
        return named_function(named, "() returning (model, args)")
    except TensorOptError as error:
        raise ModelSourceError(str(error)) from error


def _parameters(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some C functions have no signature
        return {}
    return {n: p.default for n, p in parameters.items() if type(p.default) in (int, float, bool)}


def _arguments(function: Callable[..., Any], source: str, batch: int | None) -> dict[str, Any]:
    from tensoropt.zoo import ZooError, read_options

    name, mark, written = source.partition("?")
    known = _parameters(function)
    own = known.pop("batch", None)
    try:
        arguments = read_options(name, written, known) if mark else {}
    except ZooError as error:
        raise ModelSourceError(str(error)) from None
    if batch is None:
        return arguments
    if own is None:
        raise ModelSourceError(
            f"--batch {batch} is for models of the zoo and functions with a parameter 'batch'; {name} "
            "brings its own example inputs: give it that parameter, with a number as default"
        )
    if batch < 1:
        raise ModelSourceError(f"batch {batch} for '{name}' is below 1; leave it out for the default {own}")
    return {**arguments, "batch": batch}


def with_sequence(source: str, length: int) -> str:
    """Return the source of a language model, changed to another sequence length.

    Args:
        length: the length in tokens.

    Raises:
        TensorOptError: the model has no sequence option, or the source sets it already.
    """
    if length < 1:
        raise TensorOptError(f"sequence length {length} is below 1; give at least 1")
    if is_onnx(source):
        raise TensorOptError(f"the file fixes the input sizes of {source}; {_DIM_INSTEAD}")
    if source.startswith("zoo:"):
        from tensoropt.zoo import entry

        option = entry(source.removeprefix("zoo:").partition("?")[0]).with_sequence(length)
    else:
        option = f"sequence={length}"
        name = source.partition("?")[0]
        if "sequence" not in (known := _parameters(_building_function(source))):
            raise TensorOptError(
                f"--sequence {length} is for language models of the zoo and functions with a parameter "
                f"'sequence'; {name} has {', '.join(known) or 'no options'}: give it that parameter, with a "
                "number as default"
            )
    if f"{option.partition('=')[0]}=" in source.partition("?")[2]:
        raise TensorOptError(f"'{source}' sets a sequence, and so does --sequence {length}; give one")
    return _with_option(source, option)


def with_lora(source: str, text: str) -> str:
    """Return the source of a model, changed to have LoRA adapters as its only trained parameters.

    Args:
        text: the adapters, as ``r=16,alpha=32,targets=q_proj+v_proj`` (:class:`tensoropt.zoo.lora.Lora`).

    Raises:
        TensorOptError: the text cannot be read, or the source is an ONNX file or has adapters already.
    """
    from tensoropt.zoo.lora import Lora

    if is_onnx(source):
        raise TensorOptError(
            f"--lora {text}: {source} has operators, not the layers that adapters attach to; "
            "export the model with its adapters, or give its PyTorch module"
        )
    Lora.of(text)
    if "lora=" in source.partition("?")[2]:
        raise TensorOptError(f"'{source}' has adapters, and --lora {text} gives others; give one")
    return _with_option(source, f"lora={text}")


def _with_option(source: str, option: str) -> str:
    return f"{source}{'&' if '?' in source else '?'}{option}"


def default_batch(source: str) -> int:
    """Return the default batch size of a model whose batch size can be chosen.

    Raises:
        TensorOptError: the batch size is fixed by the model's own example inputs.
    """
    if not source or is_onnx(source):
        raise TensorOptError(
            "a batch can be chosen for models of the zoo and functions with a parameter 'batch'; "
            f"{source or 'a module'} brings its own example inputs: explore it with inputs of each batch"
        )
    if source.startswith("zoo:"):
        from tensoropt.zoo import entry

        return entry(source.removeprefix("zoo:").partition("?")[0]).batch
    own = _parameters(_building_function(source)).get("batch")
    if type(own) is not int or own < 1:
        raise ModelSourceError(
            "a batch can be chosen for models of the zoo and functions with a parameter 'batch'; "
            f"{source} has no such parameter with a whole number of at least 1 as default: give it one"
        )
    return own


def _load_onnx(source: str, device: str, seed: int, options: OnnxOptions) -> LoadedModel:
    from tensoropt.capture.onnx import import_onnx

    imported = import_onnx(
        source, dict(options.dims), outputs=options.outputs, loss=options.loss, device=device
    )
    return LoadedModel(imported.module, imported.example(seed, device), notes=imported.notes)


def _call(
    function: Any, source: str, device: str, seed: int, arguments: Mapping[str, Any], lora: str | None
) -> LoadedModel:
    import torch

    from tensoropt.capture.fidelity import eager_step
    from tensoropt.capture.loss import WithLoss
    from tensoropt.capture.other_processes import no_other_processes, refuse_communication
    from tensoropt.capture.steps import seeded
    from tensoropt.zoo.lora import Lora, with_adapters

    def made() -> Any:
        # The caller's random state is restored; ranks that build with one seed get the same weights.
        with torch.random.fork_rng(devices=[]), seeded(seed), torch.device(device):
            torch.manual_seed(seed)
            return function(**arguments)

    def step(result: Any) -> None:
        model, args, kwargs, loss = (*result, None, None)[:4]
        eager_step(WithLoss(model, loss), tuple(args), kwargs or {})

    try:
        with no_other_processes() as asked:
            result = made()
    except (Exception, SystemExit) as error:
        raise ModelSourceError(f"{source}: the function raised {type(error).__name__}: {error}") from error
    if lora is not None and _is_module_first(result):
        result = (with_adapters(result[0], Lora.of(lora)), *result[1:])
    if not _is_module_first(result) or not isinstance(result[1], (tuple, list)):
        kind = type(result).__name__ if not isinstance(result, tuple) else f"a tuple of {len(result)}"
        raise ModelSourceError(
            f"{source} returned {kind}; it must return (model, args), (model, args, kwargs) or (model, args, "
            "kwargs, loss), args a tuple and loss a function of what the model returns"
        )
    if any("site-packages" not in line for line in asked):
        refuse_communication(step, made)
    kwargs = dict(result[2] or {}) if len(result) > 2 else {}
    model = result[0]
    if len(result) == 4:
        if not callable(result[3]):
            raise ModelSourceError(
                f"{source} returned a {type(result[3]).__name__} as its fourth item; it must be the loss, a "
                "function of what the model returns"
            )
        model = WithLoss(model, result[3])
    return LoadedModel(model, tuple(result[1]), kwargs)


def _is_module_first(result: Any) -> bool:
    import torch

    return isinstance(result, tuple) and len(result) in (2, 3, 4) and isinstance(result[0], torch.nn.Module)
