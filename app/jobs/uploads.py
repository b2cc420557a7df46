"""Uploaded model files: limited in size, kept under generated names, never opened by the server itself."""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
import secrets
from pathlib import Path

from tensoropt.errors import TensorOptError

from ..safety import MAX_UPLOAD_BYTES

MOST_TOGETHER_BYTES = 8 * 2**30


class UploadError(TensorOptError):
    """A file that is not taken; says why."""


class Uploads:
    """Files under ``folder``, by token; only a job's own process reads what is in them."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)

    def known(self) -> dict[str, tuple[Path, str]]:
        """token -> (file, what its owner called it), newest last."""
        found = {}
        for note in sorted(self.folder.glob("*.json"), key=lambda f: f.stat().st_mtime):
            token = note.stem
            path = self.folder / f"{token}.onnx"
            if path.is_file() and re.fullmatch(r"upload-[0-9a-f]{16}", token):
                try:
                    found[token] = (path, str(json.loads(note.read_text(encoding="utf-8"))["label"]))
                except (OSError, ValueError, KeyError, TypeError):
                    continue
        return found

    def names(self) -> dict[str, str]:
        """file -> what its owner called it."""
        return {str(path): label for path, label in self.known().values()}

    def keep(self, contents: object, name: object) -> str:
        """Store what a page uploaded (a ``data:`` URL); gives its token.

        Raises:
            UploadError: not an ONNX file by its name, empty, too large, or damaged on the way.
        """
        label = label_of(name)
        if not label.lower().endswith(".onnx"):
            raise UploadError(f"'{label}' is not taken: only files that end in .onnx are")
        if not isinstance(contents, str) or "," not in contents[:200]:
            raise UploadError(f"'{label}' did not arrive whole; upload it again")
        try:
            # Strict: what was damaged on the way must not become another file.
            data = base64.b64decode(contents.partition(",")[2], validate=True)
        except (binascii.Error, ValueError) as error:
            raise UploadError(f"'{label}' did not arrive whole; upload it again") from error
        if not data:
            raise UploadError(f"'{label}' is empty; export the model again")
        if len(data) > MAX_UPLOAD_BYTES:
            raise UploadError(
                f"'{label}' has {len(data) / 2**20:.0f} MiB; at most {MAX_UPLOAD_BYTES // 2**20} MiB are "
                "taken. Use the command line for larger files"
            )
        together = sum(f.stat().st_size for f in self.folder.iterdir())
        if together + len(data) > MOST_TOGETHER_BYTES:
            raise UploadError(f"{together / 2**30:.1f} GiB of uploads are kept; delete some in {self.folder}")
        token = f"upload-{secrets.token_hex(8)}"
        _write(self.folder / f"{token}.onnx", data)
        _write(self.folder / f"{token}.json", json.dumps({"label": label}).encode())
        return token


def label_of(name: object) -> str:
    """The last part of a file's name, without anything a terminal or page could trip over."""
    last = re.split(r"[/\\]", str(name or "file"))[-1]
    return re.sub(r"[^\w.\- ]", "_", last)[-80:] or "file"


def _write(path: Path, data: bytes) -> None:
    # Made with its permissions rather than given them afterwards, and never through a link that is there
    # already.
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
