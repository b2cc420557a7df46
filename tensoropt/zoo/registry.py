"""The names of the zoo and the models that they stand for.

A family file registers *builders*. A builder takes ``batch`` and keyword overrides, and returns the module
with its example inputs; :func:`build` runs it on the requested device, seeded, so that every process of a job
that builds the same name holds the same weights. Example inputs are random, of the right shapes, on the
device that is the current default.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tensoropt.errors import TensorOptError, import_extra, suggest


def tokens(vocabulary: int, *shape: int) -> Tensor:
    """Return int64 token numbers in ``[0, vocabulary)``."""
    return torch.randint(0, vocabulary, shape)


def images(batch: int, channels: int, size: int) -> Tensor:
    """Return a float32 image ``(batch, channels, size, size)``, with unit normal values like a normalised
    photograph."""
    return torch.randn(batch, channels, size, size)


_Size = Literal["laptop", "paper"]
Recipe = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


class ZooError(TensorOptError, ValueError):
    """The zoo does not have the name or the override."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooEntry:
    """One registered name. ``batch`` is the default batch size (samples of one training step).

    ``requires`` is the package of the extra ``zoo`` that the builder imports.
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
        """The names that :func:`build` takes beside ``batch``, with their defaults."""
        parameters = inspect.signature(self.builder).parameters
        return {name: p.default for name, p in parameters.items() if name != "batch"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooModel:
    """A module in training mode with example inputs: ``model(*args, **kwargs)`` is a scalar loss.

    ``loss`` is always None: labels are among the inputs and the loss is inside the model.
    """

    name: str
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    loss: None = None
    description: str = ""
    paper: str = ""

    @property
    def parameter_count(self) -> int:
        """Number of parameters (scalars); a tied parameter counts once."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters in the model's own dtypes."""
        return sum(p.numel() * p.element_size() for p in self.model.parameters())


_ENTRIES: dict[str, ZooEntry] = {}


def register(
    name: str, *, paper: str, size: _Size, batch: int, requires: str | None = None, **fixed: Any
) -> Callable[[Callable[..., Recipe]], Callable[..., Recipe]]:
    """Register a builder under ``name``; ``fixed`` sets new defaults for the builder's own keywords.

    One builder may carry several names (``gpt2``, ``gpt2-xl``: same code, other ``fixed``). The first
    line of the builder's docstring is the description. ``requires`` names the package that the
    builder imports lazily.
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
            builder=_with_defaults(builder, fixed) if fixed else builder,
            requires=requires,
        )
        return builder

    return add


def _with_defaults(builder: Callable[..., Recipe], fixed: dict[str, Any]) -> Callable[..., Recipe]:
    signature = inspect.signature(builder)
    unknown = set(fixed) - set(signature.parameters)
    assert not unknown, f"{builder.__name__} has no {sorted(unknown)}"

    def call(batch: int, **overrides: Any) -> Recipe:
        return builder(batch=batch, **{**fixed, **overrides})

    call.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[p.replace(default=fixed.get(n, p.default)) for n, p in signature.parameters.items()]
    )
    return call


def list_models() -> tuple[ZooEntry, ...]:
    """Return every registered model, in the order of its name."""
    return tuple(_ENTRIES[name] for name in sorted(_ENTRIES))


def entry(name: str) -> ZooEntry:
    """Return the registered model ``name``; :class:`ZooError` with the nearest names otherwise."""
    if name in _ENTRIES:
        return _ENTRIES[name]
    hint = suggest(name, _ENTRIES)
    raise ZooError(f"the zoo has no model '{name}'; {hint} ('tensoropt list models' shows all)")


def build(
    name: str,
    batch: int | None = None,
    device: str | torch.device = "cpu",
    seed: int = 0,
    **overrides: Any,
) -> ZooModel:
    """Build the model ``name`` with random weights and example inputs, both on ``device``.

    ``batch`` is in samples (default: the entry's own). On the ``meta`` device nothing is allocated,
    whatever the size. ``overrides`` change the builder's keywords (``sequence=128``). The global
    random state is left as it was.

    Raises :class:`ZooError` for an unknown name, an unknown override or a batch below 1, and
    :class:`~tensoropt.errors.MissingExtraError` when the definition's package is not installed.
    """
    chosen = entry(name)
    batch = chosen.batch if batch is None else batch
    if batch < 1:
        raise ZooError(f"batch {batch} for '{name}' is below 1; leave it out for the default {chosen.batch}")
    allowed = chosen.overrides
    for key in overrides:
        if key not in allowed:
            shown = ", ".join(f"{k}={v!r}" for k, v in allowed.items()) or "none"
            raise ZooError(f"'{name}' has no setting '{key}'; it has: {shown}")
    if chosen.requires:
        import_extra(chosen.requires, "zoo", f"zoo:{name}")
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(seed)
        model, args, kwargs = chosen.builder(batch=batch, **overrides)
    return ZooModel(
        name=name,
        model=model.train(),
        args=args,
        kwargs=kwargs,
        description=chosen.description,
        paper=chosen.paper,
    )
