"""Sources of a rank's weights: the model itself, files, or a function that draws them.

A rank reads one whole tensor at a time on the CPU and keeps only its shard. Starting thus takes memory for
the rank's shards and one layer, whatever the model's size.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tensoropt.capture import Capture
from tensoropt.capture.bitsandbytes import replace_layers
from tensoropt.errors import PlanError, import_extra
from tensoropt.execute.initialise import Initialisation, InitWeights

_ENDING = ".safetensors"
_MODEL = "model"
"""The model's key in a checkpoint that also has an optimizer."""


@dataclass(frozen=True)
class _StoredWeights:
    """Tensors in files, by state-dict key.

    Attributes:
        path: the path as given.
        names: the keys of all tensors.
        read: a function that returns a whole tensor on the CPU, in memory of its own.
    """

    path: Path
    names: Collection[str]
    read: Callable[[str], torch.Tensor]


def _distributed_checkpoint(path: Path) -> _StoredWeights:
    """Open a ``torch.distributed.checkpoint`` of a model's state dict, possibly under the key ``model``."""
    reader = FileSystemReader(path)
    metadata = reader.read_metadata()
    # Keys of nested dicts are joined by dots; the paths distinguish `{"model": {"x": …}}` from a submodule
    # named "model".
    paths, keys = metadata.planner_data or {}, {}
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            outer, *inner = paths.get(key, (key,))
            keys[".".join(map(str, inner)) if inner and outer == _MODEL else key] = key, entry

    def read(name: str) -> torch.Tensor:
        key, entry = keys[name]
        value = torch.empty(entry.size, dtype=entry.properties.dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the missing process group, which is intended
            dcp.load({key: value}, storage_reader=reader, no_dist=True)  # type: ignore[attr-defined]
        return value

    return _StoredWeights(path, keys, read)


def _safetensors(path: Path) -> _StoredWeights:
    safe_open = import_extra("safetensors", "safetensors", f"reading {path}").safe_open

    def opened(file: Path) -> Any:
        try:
            return safe_open(file, framework="pt", device="cpu")
        except Exception as error:
            raise PlanError(f"{file} is not a safetensors file ({error}); correct checkpoint=") from None

    file_of: dict[str, Path] = {}
    for file in [path] if path.is_file() else sorted(path.glob(f"*{_ENDING}")):
        with opened(file) as content:
            for name in content.keys():  # noqa: SIM118, it is no mapping
                if name in file_of:
                    raise PlanError(
                        f"{name} is in {file_of[name].name} and in {file.name} of {path}; keep one of them"
                    )
                file_of[name] = file

    def read(name: str) -> torch.Tensor:
        with opened(file_of[name]) as content:
            value: torch.Tensor = content.get_tensor(name)
        return value

    return _StoredWeights(path, file_of, read)


def _open_weights(path: str | os.PathLike[str]) -> _StoredWeights:
    """Return a lazy reader of a checkpoint folder, a safetensors file or a folder of those.

    Raises:
        PlanError: there are no weights.
        MissingExtraError: safetensors files need a package that is not installed.
    """
    source = Path(path)
    # `torch.distributed.checkpoint` writes this file last: without it a checkpoint is incomplete.
    if (source / ".metadata").is_file():
        return _distributed_checkpoint(source)
    if (source.is_file() and source.suffix == _ENDING) or any(source.glob(f"*{_ENDING}")):
        return _safetensors(source)
    problem = "has no weights that can be read" if source.exists() else "does not exist"
    raise PlanError(
        f"checkpoint {source} {problem}; give a folder of torch.distributed.checkpoint (save_checkpoint "
        "writes one), a file *.safetensors, or a folder of such files"
    )


_REMEDY = "pass checkpoint= or init_weights=, or build the model on the CPU"


class WeightSource:
    """The values of a model's tensors: from files, else drawn by ``init_weights``, else the model's own.

    Args:
        model: the model, on any device; tensors on the meta device have no value.
        checkpoint: a folder of ``torch.distributed.checkpoint``, a safetensors file or a folder of those.
        init_weights: a function that draws the tensors that the checkpoint lacks, called with each module.
        seed: the seed of ``init_weights``.

    Raises:
        PlanError: the checkpoint is invalid, or a tensor of the model has no value.
    """

    def __init__(
        self,
        model: nn.Module,
        checkpoint: str | os.PathLike[str] | None = None,
        init_weights: InitWeights | None = None,
        seed: int = 0,
    ):
        replace_layers(model)  # before its tensors are listed, as in the capture
        self.model = model
        self.stored: _StoredWeights | None = None if checkpoint is None else _open_weights(checkpoint)
        self.drawn = None if init_weights is None else Initialisation(model, init_weights, seed)
        self.names = _names(model)
        self._check()

    def _check(self) -> None:
        """Check, before large tensors are read, that every tensor has a value."""
        not_saved = _not_saved(self.model)
        for name, value in self.own().items():
            if self.stored is not None and name not in not_saved:
                raise PlanError(
                    f"checkpoint {self.stored.path} lacks the model's {name}; give the "
                    "checkpoint of this model, or pass init_weights= for missing tensors"
                )
            if value.is_meta:
                why = f"; checkpoint {self.stored.path} does not have it" if self.stored is not None else ""
                raise PlanError(f"{name} is on the meta device and has no value{why}; {_REMEDY}")

    def _stored_as(self, names: Iterable[str]) -> str | None:
        return next((n for n in names if self.stored is not None and n in self.stored.names), None)

    def _is_own(self, names: Iterable[str]) -> bool:
        drawn = self.drawn is not None and any(name in self.drawn for name in names)
        return not drawn and self._stored_as(names) is None

    def own(self) -> dict[str, torch.Tensor]:
        """Return the tensors that neither files nor ``init_weights`` set, by the first of their names."""
        tensors = dict(_tensors(self.model))
        return {names[0]: tensors[names[0]].detach() for names in self.names if self._is_own(names)}

    def buffers(self) -> set[str]:
        """Return the names of the model's buffers."""
        return {name for name, _ in self.model.named_buffers(remove_duplicate=False)}

    def values(self, names: Iterable[str]) -> _Values:
        """Return a mapping from names to whole values, which are read or drawn on access."""
        return _Values(self, names)

    def fill_buffers(self) -> None:
        """Set the model's buffers in place, on the CPU, because captures read them."""
        buffers = self.buffers()
        self._fill([names for names in self.names if names[0] in buffers and not self._is_own(names)])

    def fill_unused(self, used: Iterable[str]) -> None:
        """Give values, whole and on the CPU, to tensors on the meta device that are not in ``used``."""
        used, tensors = set(used), dict(_tensors(self.model))
        self._fill([names for names in self.names if not used & {*names} and tensors[names[0]].is_meta])

    def _fill(self, chosen: Iterable[tuple[str, ...]]) -> None:
        aliases, tensors = {names[0]: names for names in chosen}, dict(_tensors(self.model))
        buffers = self.buffers()
        for name, value in self.values(aliases).items():
            is_parameter = name not in buffers
            new = nn.Parameter(value, tensors[name].requires_grad) if is_parameter else value
            for alias in aliases[name]:
                path, _, attribute = alias.rpartition(".")
                owner = self.model.get_submodule(path)
                place: dict[str, Any] = owner._parameters if is_parameter else owner._buffers
                place[attribute] = new


class _Values(Mapping[str, torch.Tensor]):
    """Whole tensors by state-dict key, read or initialised on access; on the CPU unless the model's own.

    In the mapping's own order, each tensor that ``init_weights`` sets is initialised only once, and at most
    one layer is in memory. In another order, the initialisation starts again from the first tensor.
    """

    def __init__(self, source: WeightSource, names: Iterable[str]):
        self.source = source
        aliases = {name: names for names in source.names for name in names}
        tensors = dict(_tensors(source.model))
        own: dict[str, Callable[[], torch.Tensor]] = {}
        stored: dict[str, Callable[[], torch.Tensor]] = {}
        drawn: list[str] = []
        for name in names:
            if (key := source._stored_as(aliases[name])) is not None:
                stored[name] = functools.partial(self._read, name, key, tuple(tensors[name].shape))
            elif source._is_own(aliases[name]):
                own[name] = tensors[name].detach
            else:
                drawn.append(name)
        self._drawn = [] if source.drawn is None else source.drawn.order(drawn)
        self._stream: Iterator[tuple[str, torch.Tensor]] = iter(())
        self._makers = own | stored | {name: functools.partial(self._draw, name) for name in self._drawn}

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._makers[name]()

    def _read(self, name: str, key: str, shape: tuple[int, ...]) -> torch.Tensor:
        assert self.source.stored is not None
        value = self.source.stored.read(key)
        if tuple(value.shape) != shape:
            raise PlanError(
                f"{name} has the shape {tuple(value.shape)} in checkpoint {self.source.stored.path}, but "
                f"{shape} in the model; give the checkpoint of this model"
            )
        return value

    def _draw(self, name: str) -> torch.Tensor:
        assert self.source.drawn is not None
        for drawn_name, value in self._stream:
            if drawn_name == name:
                return value
            del value
        # Out of order, tensors are drawn again from the beginning, with the same values.
        self._stream = self.source.drawn.stream(self._drawn)
        return next(value for drawn_name, value in self._stream if drawn_name == name)


class GraphValues(Mapping[str, torch.Tensor]):
    """A captured model's whole parameters and buffers by graph name; buffers are the model's own tensors.

    Raises:
        PlanError: a constant of the graph has no value, or the model lacks a tensor.
    """

    def __init__(self, captured: Capture, source: WeightSource):
        tensors = captured.graph.tensors.values()
        self.buffers = {}
        own = dict(_tensors(captured.model))
        all_names = {name for names in source.names for name in names}
        for tensor in tensors:
            if tensor.kind in ("parameter", "buffer") and tensor.key not in all_names:
                raise PlanError(f"the plan needs the {tensor.kind} {tensor.key}, which the model lacks")
            if tensor.kind == "buffer":
                self.buffers[tensor.name] = own[str(tensor.key)].detach()
        without = [name for name, value in captured.graph.constants.items() if value.is_meta]
        if without:
            raise PlanError(
                f"{len(without)} constants of the model have no value, since it was built on the meta "
                "device and its code keeps tensors that are not buffers; make them buffers (register_buffer "
                "with persistent=False), or build the model on the CPU"
            )
        names = {str(t.key): t.name for t in tensors if t.kind == "parameter"}
        self.parameters = source.values(names)
        self._key = {names[key]: key for key in self.parameters}

    def __iter__(self) -> Iterator[str]:
        return iter((*self.buffers, *self._key))

    def __len__(self) -> int:
        return len(self.buffers) + len(self._key)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.buffers[name] if name in self.buffers else self.parameters[self._key[name]]


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _names(model: nn.Module) -> list[tuple[str, ...]]:
    names_of: dict[int, list[str]] = {}
    for name, value in _tensors(model):
        names_of.setdefault(id(value), []).append(name)
    return [tuple(names) for names in names_of.values()]


def _not_saved(model: nn.Module) -> set[str]:
    return {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
