"""Weights in files, read one tensor at a time."""

from __future__ import annotations

import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tensoropt.errors import PlanError, import_extra

_ENDING = ".safetensors"
_MODEL = "model"
"""The key of the model in a checkpoint that has an optimizer as well."""


class StoredWeights(ABC):
    """Tensors in files, by state-dict key.

    Attributes:
        path: the path as it was given.
    """

    def __init__(self, path: Path):
        self.path = path

    @property
    @abstractmethod
    def names(self) -> Collection[str]:
        """Return the keys of all tensors."""

    @abstractmethod
    def read(self, name: str) -> torch.Tensor:
        """Return a whole tensor, on the CPU, in memory of its own."""


class DistributedCheckpoint(StoredWeights):
    """A folder of ``torch.distributed.checkpoint`` with a model's state dict, or with a dict that has it as
    ``model``."""

    def __init__(self, path: Path):
        super().__init__(path)
        self.reader = FileSystemReader(path)
        metadata = self.reader.read_metadata()
        found = metadata.state_dict_metadata
        self.entries = {k: v for k, v in found.items() if isinstance(v, TensorStorageMetadata)}
        # Nested dicts are written with their keys joined by dots; this tells `{"model": {"x": …}}` from a
        # model that has a module called "model".
        paths = metadata.planner_data or {}
        self.keys = {self._name(key, paths.get(key, ())): key for key in self.entries}

    @staticmethod
    def _name(key: str, path: tuple[Any, ...]) -> str:
        nested = len(path) > 1 and path[0] == _MODEL
        return ".".join(map(str, path[1:])) if nested else key

    @property
    def names(self) -> Collection[str]:
        return self.keys

    def read(self, name: str) -> torch.Tensor:
        key = self.keys[name]
        entry = self.entries[key]
        value = torch.empty(entry.size, dtype=entry.properties.dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of being used without a process group, which is meant
            dcp.load({key: value}, storage_reader=self.reader, no_dist=True)  # type: ignore[attr-defined]
        return value


class Safetensors(StoredWeights):
    """A file ``*.safetensors``, or a folder of such files, each with some of the tensors."""

    def __init__(self, path: Path):
        super().__init__(path)
        self._open = import_extra("safetensors", "safetensors", f"reading {path}").safe_open
        self.file_of: dict[str, Path] = {}
        for file in [path] if path.is_file() else sorted(path.glob(f"*{_ENDING}")):
            with self._opened(file) as content:
                for name in content.keys():  # noqa: SIM118, it is no mapping
                    if name in self.file_of:
                        raise PlanError(
                            f"{name} is in {self.file_of[name].name} and in {file.name} of {path}; keep "
                            "one of them"
                        )
                    self.file_of[name] = file

    def _opened(self, file: Path) -> Any:
        try:
            return self._open(file, framework="pt", device="cpu")
        except Exception as error:
            raise PlanError(f"{file} is no safetensors file ({error}); correct checkpoint=") from None

    @property
    def names(self) -> Collection[str]:
        return self.file_of

    def read(self, name: str) -> torch.Tensor:
        with self._opened(self.file_of[name]) as content:
            value: torch.Tensor = content.get_tensor(name)
        return value


def open_weights(path: str | os.PathLike[str]) -> StoredWeights:
    """Return the weights of a checkpoint folder, a safetensors file or a folder of those; nothing is read
    yet.

    Raises:
        PlanError: there are no weights.
        MissingExtraError: safetensors files need a package that is not installed.
    """
    source = Path(path)
    # `torch.distributed.checkpoint` writes it last: a folder without it is none, or not whole.
    if (source / ".metadata").is_file():
        return DistributedCheckpoint(source)
    if (source.is_file() and source.suffix == _ENDING) or any(source.glob(f"*{_ENDING}")):
        return Safetensors(source)
    what = "has no weights that can be read" if source.exists() else "does not exist"
    raise PlanError(
        f"checkpoint {source} {what}; give a folder of torch.distributed.checkpoint (save_checkpoint writes "
        "one), a file *.safetensors, or a folder of such files"
    )
