"""Measured files dropped on a plan: read as data on arrival, kept in memory, removed by a button."""

from __future__ import annotations

import base64
import binascii
import secrets
from typing import NoReturn

from tensoropt.errors import TensorOptError
from tensoropt.observed.files import KINDS, check_name, parse_observation
from tensoropt.observed.observation import Observation

from .jobs.uploads import UploadError, label_of
from .recent import Recent

MOST_BYTES = 64 * 2**20
"""The most bytes of a file as it is uploaded; the command line reads larger ones."""
MOST_UNPACKED = 128 * 2**20
MOST_OPCODES = 20_000_000
"""The most instructions of a pickle: a million of them takes about a second."""


class MeasuredFiles:
    """The last few files, by token; safe between threads. Nothing is written to disk."""

    def __init__(self, most: int = 8):
        self._recent = Recent(most)

    def keep(self, contents: object, name: object) -> str:
        """Read what a page uploaded (a ``data:`` URL), and return its token.

        Raises:
            TensorOptError: it is not of a kind that is read, or it is empty, too large, damaged or hostile.
        """
        label = label_of(name)
        check_name(label)
        if not isinstance(contents, str) or "," not in contents[:200]:
            raise UploadError(f"'{label}' did not arrive whole; upload it again")
        if len(contents) > MOST_BYTES * 4 // 3 + 300:
            raise UploadError(
                f"'{label}' has more than {MOST_BYTES // 2**20} MiB, which is the most that the page takes; "
                f"use tensoropt show DIR --point N --beside {label}"
            )
        try:
            content = base64.b64decode(contents.partition(",")[2], validate=True)
        except (binascii.Error, ValueError) as error:
            raise UploadError(f"'{label}' did not arrive whole; upload it again") from error
        if not content:
            raise UploadError(f"'{label}' is empty; give {KINDS}")
        limits = {"most_bytes": MOST_UNPACKED, "most_opcodes": MOST_OPCODES}
        observation = parse_observation(label, content, **limits)
        token = secrets.token_hex(8)
        self._recent.get(token, lambda: (label, observation))
        return token

    def get(self, token: object) -> tuple[str, Observation]:
        """Return (the name that its owner gave it, its content).

        Raises:
            TensorOptError: it is no longer kept.
        """
        kept: tuple[str, Observation] = self._recent.get(str(token), _gone)
        return kept

    def remove(self, token: object) -> None:
        """Forget a file."""
        self._recent.forget(str(token))


def _gone() -> NoReturn:
    raise TensorOptError(
        "the measured file is not kept any more (the server was restarted, or newer files replaced it); "
        "upload it again"
    )
