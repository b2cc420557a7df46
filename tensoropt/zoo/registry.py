"""The registry of the zoo's models, which builds a model from its name and options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tensoropt.errors import TensorOptError, closest, import_extra, suggest
from tensoropt.units import read_number, read_whole
from tensoropt.zoo.lora import LORA, Lora, with_adapters


def tokens(vocabulary: int, *shape: int) -> Tensor:
    """Return random int64 token numbers in ``[0, vocabulary)``, of the given shape."""
    return torch.randint(0, vocabulary, shape)


def images(batch: int, channels: int, size: int) -> Tensor:
    """Return standard normal float32 images ``(batch, channels, size, size)``."""
    return torch.randn(batch, channels, size, size)


_Size = Literal["laptop", "paper"]
Recipe = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


class ZooError(TensorOptError, ValueError):
    """An unknown model or option, or a value of an option with which a model cannot be built."""


def require_multiple(of: int, why: str, **options: int) -> None:
    """Raise :class:`ZooError` for an option that is no multiple of ``of``.

    Args:
        why: the reason, as the end of the sentence "... is no multiple of 4, as ...".
    """
    for name, value in options.items():
        if value % of:
            down = value - value % of
            nearest = f"{down} or {down + of}" if down else f"{of}"
            raise ZooError(f"{name}={value} is no multiple of {of}, as {why}; use {nearest}")


def require_at_least(least: float, why: str, **options: float) -> None:
    """Raise :class:`ZooError` for an option that is less than ``least``.

    Args:
        why: the reason, as the end of the sentence "... is below 32, as ...".
    """
    for name, value in options.items():
        if value < least:
            raise ZooError(f"{name}={value} is below {least:g}, as {why}; use {least:g} or more")


def require_one_of(values: Collection[int], **options: int) -> None:
    """Raise :class:`ZooError` for an option that is none of ``values``."""
    for name, value in options.items():
        if value not in values:
            listed = ", ".join(map(str, sorted(values)))
            raise ZooError(f"{name}={value} is none of {listed}; use one of them")


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooEntry:
    """One registered model.

    ``batch`` is its default batch size in samples. ``requires`` is the package of the extra ``zoo`` that its
    builder imports, or None.
    """

    name: str
    description: str
    paper: str
    size: _Size
    batch: int
    builder: Callable[..., Recipe]
    requires: str | None = None

    @property
    def overrides(self) -> dict[str, Any]:
        """The options of the model except ``batch``, mapped to their defaults."""
        parameters = inspect.signature(self.builder).parameters
        return {name: p.default for name, p in parameters.items() if name != "batch"}

    def with_sequence(self, length: int) -> str:
        """Return ``OPTION=LENGTH`` with the option that sets the model's sequence length.

        Raises:
            ZooError: the model reads no sequence, or several.
        """
        option = next((name for name in _LENGTHS if name in self.overrides), None)
        if option is None:
            raise ZooError(
                f"a sequence of {length} can be given to models that read one sequence; '{self.name}' has "
                f"other options: {_shown(self.overrides)}. Write values of these behind its name, as in "
                f"'zoo:{self.name}?{next(iter(self.overrides))}=...'"
            )
        return f"{option}={length}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooModel:
    """A module in training mode with example inputs: ``model(*args, **kwargs)`` is a scalar loss."""

    name: str
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def parameter_count(self) -> int:
        """The number of elements of all parameters; tied parameters count once."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def parameter_bytes(self) -> int:
        """The size in bytes of all parameters, in the model's own dtypes."""
        return sum(p.numel() * p.element_size() for p in self.model.parameters())


_LENGTHS = ("sequence", "steps")
"""The names of options that set the length of a sequence."""
_ENTRIES: dict[str, ZooEntry] = {}


def register(
    name: str, *, paper: str, size: _Size, batch: int, requires: str | None = None, **fixed: Any
) -> Callable[[Callable[..., Recipe]], Callable[..., Recipe]]:
    """Return a decorator that registers a builder under ``name``; ``fixed`` are new defaults of options.

    The first line of the builder's docstring is the model's description. ``requires`` names a package that
    the builder imports when it is called.
    """

    def add(builder: Callable[..., Recipe]) -> Callable[..., Recipe]:
        assert name not in _ENTRIES, f"{name} is registered twice"
        description = (inspect.getdoc(builder) or name).splitlines()[0].rstrip(".")
        _ENTRIES[name] = ZooEntry(
            name=name,
            description=description,
            paper=paper,
            size=size,
            batch=batch,
            builder=partial(builder, **fixed),
            requires=requires,
        )
        return builder

    return add


def list_models() -> tuple[ZooEntry, ...]:
    """Return all registered models, sorted by name."""
    return tuple(_ENTRIES[name] for name in sorted(_ENTRIES))


def entry(name: str) -> ZooEntry:
    """Return the registered model ``name``; raise :class:`ZooError` with similar names if there is none."""
    if name in _ENTRIES:
        return _ENTRIES[name]
    hint = suggest(name, _ENTRIES)
    raise ZooError(f"the zoo has no model '{name}'; {hint} ('tensoropt list models' shows all)")


_MOST_SAMPLES = 2**31 - 1
"""The largest batch, so that element counts fit 64 bits; an assumption."""


def build(
    name: str, batch: int | None = None, device: str | torch.device = "cpu", seed: int = 0, **overrides: Any
) -> ZooModel:
    """Build the model ``name`` with random weights and example inputs on ``device``.

    ``name`` may contain options (``deeplab-v3?width=2&image=224``), which ``overrides`` replace. Every model
    has the option ``lora``, as in ``lora="r=16"`` (:mod:`tensoropt.zoo.lora`). On ``meta`` nothing is
    allocated. The global random state is not changed.

    Args:
        batch: batch in samples; by default the registered one.

    Raises:
        ZooError: unknown name or option, a value that the model cannot have, or a batch below 1.
        MissingExtraError: a package that the model needs is not installed.
    """
    name, written = read_name(name)
    chosen, overrides = entry(name), {**written, **overrides}
    lora = overrides.pop(LORA, None)
    batch = chosen.batch if batch is None else batch
    if batch < 1:
        raise ZooError(f"batch {batch} for '{name}' is below 1; leave it out for the default {chosen.batch}")
    if batch > _MOST_SAMPLES:
        raise ZooError(f"batch {batch} for '{name}' is more than {_MOST_SAMPLES:,}; give a smaller one")
    for key, value in overrides.items():
        _check_option(name, chosen.overrides, key)
        _check_range(name, chosen.overrides[key], key, value)
    if chosen.requires:
        import_extra(chosen.requires, "zoo", f"zoo:{name}")
    try:
        with torch.random.fork_rng(devices=[]), torch.device(device):
            torch.manual_seed(seed)
            model, args, kwargs = chosen.builder(batch=batch, **overrides)
            if lora is not None:
                model = with_adapters(model, Lora.of(lora))
    except ZooError as refusal:
        raise ZooError(f"'{name}': {refusal}; its defaults are {_shown(chosen.overrides)}") from None
    except (AssertionError, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if not overrides:
            raise
        raise ZooError(
            f"'{name}' cannot be built with {_shown(overrides)} ({type(error).__name__}: {error}); its "
            f"defaults are {_shown(chosen.overrides)}"
        ) from error
    return ZooModel(name=name, model=model.train(), args=args, kwargs=kwargs)


def read_name(text: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the options of a text such as ``deeplab-v3?width=2&image=224``.

    Each value has the type of the option's default: int, float or bool. The value of ``lora`` stays a text.

    Raises:
        ZooError: an unknown, repeated or empty option, a malformed value, or one out of range.
    """
    name, mark, written = text.partition("?")
    return name, read_options(name, written, entry(name).overrides) if mark else {}


def read_options(name: str, written: str, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options in ``OPTION=VALUE&OPTION=VALUE``; each value has the type of the option's default.

    Args:
        name: the model's name, for messages.
        known: all options of the model, with their defaults.

    Raises:
        ZooError: an unknown, repeated or empty option, a malformed value, or one out of range.
        TensorOptError: ``lora`` cannot be read.
    """
    options: dict[str, Any] = {}
    for part in written.split("&"):
        key, equals, value = part.partition("=")
        if not equals:
            raise ZooError(
                f"'{name}?{written}': options are written NAME?OPTION=VALUE&OPTION=VALUE; '{part}' is no "
                f"OPTION=VALUE. '{name}' has: {_shown(known)}"
            )
        if key in options:
            raise ZooError(f"'{name}?{written}' has the option '{key}' twice; write it once")
        if key == LORA:
            Lora.of(value)
            options[key] = value
            continue
        _check_option(name, known, key)
        try:
            options[key] = _READERS[type(known[key])](value)
        except TensorOptError as error:
            raise ZooError(f"'{name}?{written}': {key}: {error}; its default is {known[key]!r}") from None
        _check_range(name, known[key], key, options[key])
    return options


def _check_option(name: str, options: Mapping[str, Any], key: str) -> None:
    if key == "batch":
        raise ZooError(
            "the batch is no option behind a model's name; give it by --batch, in Python as an argument"
        )
    if key not in options:
        near = closest(key, options, most=1)
        hint = f"did you mean '{near[0]}'? " if near else ""
        raise ZooError(f"'{name}' has no option '{key}'; {hint}it has: {_shown(options)}")


def _check_range(name: str, default: Any, key: str, value: Any) -> None:
    if isinstance(default, bool) or not isinstance(value, int | float):
        return
    if key == "dropout":
        fits, rule = 0 <= value <= 1, "between 0 and 1"
    elif isinstance(default, int):
        fits, rule = value >= 1, "at least 1"
    else:
        fits, rule = 0 < value < inf, "above 0"
    if not fits:
        raise ZooError(f"'{name}': {key}={value} has to be {rule}; its default is {default!r}")


def _shown(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in options.items()) or "none"


def _read_switch(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise TensorOptError(f"'{text[:40]}' is neither true nor false")
    return text.lower() == "true"


_READERS: dict[type, Callable[[str], Any]] = {int: read_whole, float: read_number, bool: _read_switch}
"""Type of an option's default -> function that reads the option's value from a text."""
