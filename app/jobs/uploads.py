"""Uploaded files, limited in size and stored under generated names.

The server never opens model files; another process reads the names of dims without a size (open dims).
Cluster files are small texts, which are checked at the upload and stored as plain values.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensoropt.cluster import load_cluster
from tensoropt.errors import TensorOptError
from tensoropt.files import parse_typed
from tensoropt.question.onnx_dims import open_dims

from ..safety import MAX_UPLOAD_BYTES

_ENDINGS = (".yaml", ".yml", ".json")
MOST_BYTES = 64 * 2**10
"""Maximum size of a cluster file; use the command line for larger ones."""

MOST_DEVICES = 1024


class UploadError(TensorOptError):
    """An uploaded file was refused; the message gives the reason."""


@dataclass(frozen=True)
class ClusterFile:
    """A cluster from a file.

    Attributes:
        label: the user's name for the file.
        description: the parsed content of the file.
    """

    label: str
    description: Mapping[str, Any]


def read_description(data: bytes, label: str) -> dict[str, Any]:
    """Return the values in a cluster file.

    Raises:
        UploadError: the file is neither YAML nor JSON, or uses features that could make a small file expand.
    """
    try:
        content = parse_typed(data.decode("utf-8-sig"))
    except ValueError as error:
        reason = " ".join(str(error).split())[:200]
        raise UploadError(f"'{label}' is not valid YAML or JSON ({reason}); correct that line") from None
    if not isinstance(content, dict):
        raise UploadError(
            f"'{label}' is not a cluster file; write for example devices: [{{kind: H100-80GB, count: 8}}]"
        )
    return content


def cluster_file(description: Mapping[str, Any], label: str) -> ClusterFile:
    """Return the cluster that a file's content describes.

    Raises:
        UploadError: the content describes no valid cluster.
    """
    if any(number > MOST_DEVICES for number in _counts(description)):
        raise UploadError(f"'{label}' has more than {MOST_DEVICES:,} devices; use fewer")
    content = dict(description)
    try:
        # Every job's copy has the same file name; users know the cluster by their own file's name.
        content.setdefault("name", label.rpartition(".")[0] or label)
        cluster = load_cluster(content)
    except TensorOptError as error:
        raise UploadError(f"'{label}': {str(error)[:400]}") from None
    # Nesting that no check above foresees is still only an invalid file.
    except (TypeError, KeyError, ValueError, AttributeError, RecursionError) as error:
        raise UploadError(f"'{label}' is not a cluster file ({type(error).__name__})") from None
    if cluster.device_count > MOST_DEVICES:
        raise UploadError(f"'{label}' has {cluster.device_count:,} devices; the limit is {MOST_DEVICES:,}")
    return ClusterFile(label, content)


def _counts(value: Any) -> Iterator[int]:
    """Yield every number of devices or nodes in a cluster file."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if key in ("count", "nodes") and isinstance(inner, int):
                yield inner
            yield from _counts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _counts(inner)


MOST_TOGETHER_BYTES = 8 * 2**30


class Uploads:
    """The uploaded files in ``folder``, by generated name (token); only other processes read models.

    Args:
        own: the folder whose Python files may define models; None to run none.
    """

    def __init__(self, folder: Path, own: Path | None = None):
        self.folder, self.own = folder, own
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)

    def known(self) -> dict[str, tuple[Path, str]]:
        """Return (file, the user's name for it) of each uploaded model by token, newest last."""
        files = {}
        for note in sorted(self.folder.glob("*.json"), key=lambda f: f.stat().st_mtime):
            token = note.stem
            config = token.startswith("config-")
            path = self.folder / token / "config.json" if config else self.folder / f"{token}.onnx"
            if path.is_file() and re.fullmatch(r"(upload|config)-[0-9a-f]{16}", token):
                try:
                    files[token] = (path, str(json.loads(note.read_text(encoding="utf-8"))["label"]))
                except (OSError, ValueError, KeyError, TypeError):
                    continue
        return files

    def names(self) -> dict[str, str]:
        """Return the user's name for each model file, by path."""
        return {str(path): label for path, label in self.known().values()}

    def keep(self, contents: object, name: object) -> str:
        """Store an ONNX file that a page uploaded (a ``data:`` URL); return its token.

        Raises:
            UploadError: the content is not ONNX, or is empty, too large, or damaged in transit.
        """
        label = label_of(name)
        data = decoded(contents, label, MAX_UPLOAD_BYTES, "export the model again")
        self._check_room(len(data))
        token = f"upload-{secrets.token_hex(8)}"
        path = self.folder / f"{token}.onnx"
        _write(path, data)
        try:
            dims = open_dims(path)
        except ValueError as error:
            path.unlink()
            raise UploadError(f"'{label}' cannot be read as ONNX ({error}); export it again") from None
        _write(self.folder / f"{token}.json", json.dumps({"label": label, "dims": dims}).encode())
        return token

    def keep_any(self, contents: object, name: object) -> tuple[str, str]:
        """Store an ONNX file, a ``config.json`` or a cluster file; return (form field, its new text).

        Raises:
            TensorOptError: the file is none of these, or empty, too large, or damaged.
        """
        label = label_of(name)
        if label.lower().endswith(".onnx"):
            self.keep(contents, name)
            return "model", label
        if not label.lower().endswith(_ENDINGS):
            raise UploadError(
                f"'{label}' cannot be uploaded; choose a file that ends in {' or '.join(_ENDINGS)}"
            )
        data = read_description(decoded(contents, label, MOST_BYTES, "write something into it"), label)
        if label.lower().endswith(".json") and ("model_type" in data or "architectures" in data):
            return "model", self._keep_config(data, label)
        self.keep_description(data, label)
        return "devices", label

    def _keep_config(self, data: Mapping[str, Any], label: str) -> str:
        token = f"config-{secrets.token_hex(8)}"
        folder = self.folder / token
        folder.mkdir(mode=0o700)
        _write(folder / "config.json", json.dumps(data).encode())
        _write(self.folder / f"{token}.json", json.dumps({"label": label}).encode())
        return label

    def open_dims(self, label: str) -> list[str]:
        """Return the names of the open dims of an uploaded model, by the user's name for the model."""
        tokens = {known: token for token, (_, known) in self.known().items()}
        if label not in tokens:
            return []
        note = json.loads((self.folder / f"{tokens[label]}.json").read_text(encoding="utf-8"))
        return [str(name) for name in note.get("dims", ())]

    # -- clusters -----------------------------------------------------------------------------------

    def clusters(self) -> dict[str, ClusterFile]:
        """Return the uploaded clusters by token, newest last; unreadable files are left out."""
        clusters = {}
        for file in sorted(self.folder.glob("cluster-*.json"), key=lambda f: f.stat().st_mtime):
            if re.fullmatch(r"cluster-[0-9a-f]{16}", file.stem):
                try:
                    kept = json.loads(file.read_text(encoding="utf-8"))
                    clusters[file.stem] = cluster_file(kept["cluster"], str(kept["label"]))
                # A file of another version, or damaged: keep the rest of the list.
                except (OSError, ValueError, KeyError, TypeError, TensorOptError):
                    continue
        return clusters

    def keep_description(self, description: Mapping[str, Any], label: str) -> str:
        """Store a cluster file's content and return its token; the same content and name are stored once.

        Raises:
            TensorOptError: the content describes no valid cluster.
        """
        wanted = cluster_file(description, label)
        for token, earlier in self.clusters().items():
            if earlier == wanted:
                return token
        data = json.dumps({"label": label, "cluster": wanted.description}).encode()
        self._check_room(len(data))
        token = f"cluster-{secrets.token_hex(8)}"
        _write(self.folder / f"{token}.json", data)
        return token

    def _check_room(self, more_bytes: int) -> None:
        total = sum(f.stat().st_size for f in self.folder.iterdir())
        if total + more_bytes > MOST_TOGETHER_BYTES:
            raise UploadError(
                f"{total / 2**30:.1f} GiB of uploads are stored, the limit; delete some in {self.folder}"
            )


def decoded(contents: object, label: str, most_bytes: int, remedy: str) -> bytes:
    """Return the content of a ``data:`` URL; ``remedy`` is the advice for an empty file."""
    if not isinstance(contents, str) or "," not in contents[:200]:
        raise UploadError(f"'{label}' arrived incomplete; upload it again")
    try:
        # Strict: damaged data must not become another file.
        data = base64.b64decode(contents.partition(",")[2], validate=True)
    except (binascii.Error, ValueError) as error:
        raise UploadError(f"'{label}' arrived incomplete; upload it again") from error
    if not data:
        raise UploadError(f"'{label}' is empty; {remedy}")
    if len(data) > most_bytes:
        size, most = (f"{n / 2**20:.0f} MiB" if most_bytes >= 2**20 else f"{n / 2**10:.0f} KiB"
                      for n in (len(data), most_bytes))  # fmt: skip
        raise UploadError(f"'{label}' has {size}; the limit is {most}. Use the command line for larger files")
    return data


def label_of(name: object) -> str:
    """Return the last part of a file's name, without characters that could disturb a terminal or page."""
    last = re.split(r"[/\\]", str(name or "file"))[-1]
    return re.sub(r"[^\w.\- ]", "_", last)[-80:] or "file"


def _write(path: Path, data: bytes) -> None:
    # Created with its permissions, and never through an existing link.
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
