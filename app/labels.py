"""Names, tags and colours that people give to runs, kept in one file next to the jobs, never in their
folders.

Every change reads the file anew under a lock and changes one field, so that two browsers, or two dashboards,
do not undo each other's changes. A file that cannot be read is set aside under another name and reported.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensoropt.errors import TensorOptError
from tensoropt.files import check_size, write_text

FILE = "labels.json"
SCHEMA = "tensoropt.labels/1"
MOST_BYTES = 2**24
"""The most bytes of the file: about a hundred thousand explorations."""
NAME, _TAG, _TAGS = 80, 40, 20
"""The most characters of a name and of a tag, and the most tags of one exploration."""
_MOST_STYLES = 2**16


class LabelError(TensorOptError):
    """The text cannot be a name or a tag; the message says the rule."""


@dataclass(frozen=True)
class Label:
    """A person's label of an exploration; ``style``: the number of its colour and dash, None for none yet."""

    name: str = ""
    tags: tuple[str, ...] = ()
    style: int | None = None


class Labels:
    """Labels by the identity of an exploration (:attr:`.library.Entry.identity`); safe between threads.

    Args:
        file: the file that keeps them; None keeps them in memory, for a dashboard that only shows.
    """

    def __init__(self, file: Path | None = None):
        self._file = file
        self._lock = threading.RLock()
        self._stamp: tuple[int, int] | None = None
        self._data: dict[str, Any] = {}
        self._blocked = False
        self.fault = ""
        """What happened to the file, in a sentence; "" for nothing."""

    def of(self, identity: str) -> Label:
        """Return the label of an exploration; an empty one if it has none."""
        return _label(self._runs().get(identity, {}))

    def rename(self, identity: str, text: str, before: str | None = None) -> str:
        """Give a name, or "" to restore the exploration's own title; return a remark on what it replaced if
        that was not ``before``.

        Raises:
            LabelError: it is too long.
            TensorOptError: it cannot be written down.
        """
        name = _plain(text)
        if len(name) > NAME:
            raise LabelError(
                f"a name has at most {NAME} characters, this one has {len(name)}; it is not changed"
            )
        with self._changing(identity) as run:
            current = _label(run).name
            _set(run, "name", name)
        if before is not None and current not in (_plain(before), name, ""):
            return f"It was meanwhile called “{current}” elsewhere; it is “{name}” now."
        return ""

    def retag(self, identity: str, text: str, before: str | None = None) -> tuple[str, ...]:
        """Give tags, separated by commas; return those it has now.

        If ``before`` says what it had, only the difference is applied: tags that were added or removed
        elsewhere meanwhile stay so.

        Raises:
            LabelError: one is too long, or they are too many.
            TensorOptError: they cannot be written down.
        """
        wanted, earlier = _tags_of(text), _tags_of(before or "")
        with self._changing(identity) as run:
            have = _label(run).tags if before is not None else earlier
            gone = set(earlier) - set(wanted)
            tags = tuple(dict.fromkeys((*(t for t in have if t not in gone), *wanted)))
            if not set(have) - set(earlier):
                tags = wanted  # in the order in which they were typed
            if len(tags) > _TAGS:
                raise LabelError(f"at most {_TAGS} tags, these are {len(tags)}; they are not changed")
            _set(run, "tags", list(tags))
        return tags

    def restyle(self, identity: str, style: int) -> None:
        """Give a colour and dash by their number.

        Raises:
            LabelError: there is no such number.
            TensorOptError: it cannot be written down.
        """
        if not 0 <= style < _MOST_STYLES:
            raise LabelError(f"there is no colour {style}")
        with self._changing(identity) as run:
            run["style"] = style

    def give_styles(self, identities: Iterable[str]) -> None:
        """Give all that have none the lowest numbers that none of the others has.

        If they cannot be written down, they are kept in memory, and :attr:`fault` says so.
        """
        order = list(dict.fromkeys(identities))
        if all(self.of(i).style is not None for i in order):
            return
        try:
            with self._changing_all() as runs:
                _number(runs, order)
        except TensorOptError as error:
            self.fault = f"Colours are not kept: {error}"
            with self._lock:
                _number(self._data, order)

    # -- the file -----------------------------------------------------------------------------------

    def _runs(self) -> Mapping[str, Any]:
        with self._lock:
            if self._file is None or self._stamp == _stamp(self._file):
                return self._data
            with _locked(self._file):
                self._read()
            return self._data

    def _read(self) -> None:
        """Read the file, and set aside what cannot be read. The caller holds both locks."""
        assert self._file is not None
        stamp, self._blocked = _stamp(self._file), False
        if stamp is None:
            self._data, self._stamp = {}, None
            return
        try:
            check_size(self._file, MOST_BYTES)
            text = self._file.read_text(encoding="utf-8")
            data = json.loads(text)
            if not isinstance(data, dict) or data.get("schema") != SCHEMA:
                raise ValueError("it is of another kind or version")
            runs = data.get("runs")
            if not isinstance(runs, dict):
                raise ValueError("it has no runs")
        # RecursionError: nested more deeply than Python reads.
        except (OSError, ValueError, RecursionError, TensorOptError) as error:
            self._set_aside(str(error)[:200])
            self._data, self._stamp = {}, _stamp(self._file)
            return
        good = {name: run for name, run in runs.items() if _is_run(run)}
        if len(good) < len(runs):
            aside = _beside(self._file)
            with contextlib.suppress(TensorOptError):
                write_text(aside, text)
                self.fault = (
                    f"{len(runs) - len(good)} of the names and tags in {self._file} cannot be read and are "
                    f"left out; the file as it was is kept as {aside.name}."
                )
                self._data = good
                self._write(good)
                return
        self._data, self._stamp = good, stamp

    def _set_aside(self, why: str) -> None:
        assert self._file is not None
        aside = _beside(self._file)
        try:
            os.rename(self._file, aside)
        except OSError as error:
            self.fault = (
                f"Names, tags and colours cannot be read from {self._file} ({why}), nor can it be set aside "
                f"({error.strerror}); they cannot be changed until it is moved away."
            )
            self._blocked = True
            return
        self.fault = (
            f"Names, tags and colours could not be read ({why}): they begin anew, and the file as it "
            f"was is kept as {aside}."
        )

    def _write(self, runs: Mapping[str, Any]) -> None:
        assert self._file is not None
        write_text(self._file, json.dumps({"schema": SCHEMA, "runs": runs}, indent=1) + "\n")
        self._data, self._stamp = dict(runs), _stamp(self._file)

    @contextlib.contextmanager
    def _changing(self, identity: str) -> Iterator[dict[str, Any]]:
        """Yield the fields of one exploration, which are written if the block ends without an error."""
        with self._changing_all() as runs:
            run = dict(runs.get(identity, {}))
            yield run
            runs[identity] = run

    @contextlib.contextmanager
    def _changing_all(self) -> Iterator[dict[str, Any]]:
        with self._lock:
            if self._file is None:
                runs = dict(self._data)
                yield runs
                self._data = runs
                return
            with _locked(self._file):
                if self._stamp is None or self._stamp != _stamp(self._file):
                    self._read()
                if self._blocked:
                    raise TensorOptError(self.fault)
                runs = dict(self._data)
                yield runs
                self._write(runs)


def _tags_of(text: str) -> tuple[str, ...]:
    """Return the tags in a text such as ``a, b``, without repeats.

    Raises:
        LabelError: one is too long.
    """
    tags = tuple(dict.fromkeys(tag for part in text.split(",") if (tag := _plain(part))))
    for tag in tags:
        if len(tag) > _TAG:
            raise LabelError(
                f"a tag has at most {_TAG} characters, “{tag[:20]}…” has {len(tag)}; commas separate tags"
            )
    return tags


def _plain(text: str) -> str:
    """Return a text on one line, without characters that could disturb a page or terminal."""
    # Cc and the marks that turn the direction of writing.
    return " ".join(re.sub(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]", " ", text).split())


def _label(run: Mapping[str, Any]) -> Label:
    return Label(run.get("name", ""), tuple(run.get("tags", ())), run.get("style"))


def _is_run(run: Any) -> bool:
    if not isinstance(run, dict) or not isinstance(run.get("name", ""), str):
        return False
    tags, style = run.get("tags", []), run.get("style")
    if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
        return False
    return style is None or (type(style) is int and 0 <= style < _MOST_STYLES)


def _set(run: dict[str, Any], field: str, value: Any) -> None:
    if value:
        run[field] = value
    else:
        run.pop(field, None)


def _number(runs: dict[str, Any], order: list[str]) -> None:
    taken = {run["style"] for name in order if (run := runs.get(name, {})).get("style") is not None}
    free = 0
    for name in order:
        if runs.get(name, {}).get("style") is None:
            while free in taken:
                free += 1
            taken.add(free)
            runs[name] = {**runs.get(name, {}), "style": free}


def _stamp(file: Path) -> tuple[int, int] | None:
    try:
        state = file.stat()
    except OSError:
        return None
    # Also the inode: two files written within one tick of the clock may have the same size.
    return state.st_mtime_ns, state.st_ino


def _beside(file: Path) -> Path:
    """Return a name that is not taken."""
    base = f"{file.name}.bad-{time.strftime('%Y%m%d-%H%M%S')}"
    names = (base, *(f"{base}-{n}" for n in range(1, 1000)))
    return next(p for name in names if not (p := file.with_name(name)).exists())


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Make other dashboards wait meanwhile; without support for locks, only this one is kept in order."""
    try:
        import fcntl

        handle = os.open(file.with_name(f".{file.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
    except (ImportError, OSError):
        yield
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
