"""Pickles read as data: containers, texts and numbers, and nothing that is looked up or called.

Python's own unpickler runs what a pickle tells it to: a file from elsewhere could do anything. It also sets
memory aside for sizes that a file only claims. This reader knows the opcodes of plain data alone (those of
protocols 2 to 5, :mod:`pickletools` describes them), refuses every other one by its name, and reads no more
than is there. Keys of dicts are texts: no choice of keys makes a dict slow.
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Callable
from typing import Any

from tensoropt.errors import TensorOptError

MOST_OPCODES = 200_000_000
"""More than a snapshot of a million events with their stacks has."""
MOST_INTEGER_BYTES = 16
NAMES = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}
CONSTANTS = {b"N": None, b"\x88": True, b"\x89": False}
NEW: dict[bytes, Callable[[], Any]] = {b"]": list, b"}": dict, b")": tuple}
INTEGERS = {b"J": "<i", b"K": "<B", b"M": "<H"}
LENGTHS = {
    b"\x8c": "<B", b"X": "<I", b"\x8d": "<Q",  # texts
    b"C": "<B", b"B": "<I", b"\x8e": "<Q", b"\x96": "<Q",  # bytes
    b"\x8a": "<B", b"\x8b": "<i",  # integers
}  # fmt: skip
TEXTS, RAW, LONG = (b"\x8c", b"X", b"\x8d"), (b"C", b"B", b"\x8e", b"\x96"), (b"\x8a", b"\x8b")
TUPLES = {b"\x85": 1, b"\x86": 2, b"\x87": 3}
_MARK = object()


class PickleDataError(TensorOptError):
    """A pickle that is damaged, or that holds more than plain data."""


def read_pickle(content: bytes, *, most_opcodes: int = MOST_OPCODES) -> Any:
    """What a pickle of plain data holds.

    Raises:
        PickleDataError: it asks for anything but containers, texts and numbers, is damaged, or has more than
            ``most_opcodes`` instructions.
    """
    return _Reader(content, most_opcodes).read()


class _Reader:
    """A stack and a memo, as the format has them."""

    def __init__(self, content: bytes, most_opcodes: int):
        self.content, self.at, self.most = content, 0, most_opcodes
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def read(self) -> Any:
        done = 0
        try:
            while (code := self._take(1)) != b".":
                done += 1
                if done > self.most:
                    raise PickleDataError(
                        f"the pickle has more than {self.most} instructions; it is not read"
                    )
                self._step(code)
            (value,) = self.stack
        except (IndexError, KeyError, ValueError, TypeError, AttributeError, struct.error) as error:
            raise PickleDataError(
                f"the pickle is damaged at byte {self.at} ({type(error).__name__}); save it again"
            ) from error
        if value is _MARK:
            raise PickleDataError("the pickle is damaged: it ends amid a list; save it again")
        return value

    def _take(self, count: int) -> bytes:
        found = self.content[self.at : self.at + count]
        if count < 0 or len(found) != count:
            raise PickleDataError(f"the pickle breaks off at byte {self.at}; save it again")
        self.at += count
        return found

    def _number(self, form: str) -> int:
        return int(struct.unpack(form, self._take(struct.calcsize(form)))[0])

    def _step(self, code: bytes) -> None:
        stack = self.stack
        if code in CONSTANTS:
            stack.append(CONSTANTS[code])
        elif code in INTEGERS:
            stack.append(self._number(INTEGERS[code]))
        elif code in LENGTHS:
            stack.append(self._sized(code))
        elif code == b"G":
            stack.append(struct.unpack(">d", self._take(8))[0])
        elif code in NEW:
            stack.append(NEW[code]())
        elif code in TUPLES:
            count = TUPLES[code]
            parts = tuple(stack[-count:])
            if len(parts) != count or any(part is _MARK for part in parts):
                raise IndexError(code)
            stack[-count:] = [parts]
        elif code == b"(":
            stack.append(_MARK)
        elif code in b"teaus":
            self._fill(code)
        else:
            self._remember(code)

    def _sized(self, code: bytes) -> Any:
        size = self._number(LENGTHS[code])
        if code in LONG and not 0 <= size <= MOST_INTEGER_BYTES:
            raise PickleDataError(f"the pickle has an integer of {size} bytes; at most {MOST_INTEGER_BYTES}")
        found = self._take(size)
        if code in TEXTS:
            return found.decode("utf-8", "surrogatepass")
        return int.from_bytes(found, "little", signed=True) if code in LONG else found

    def _fill(self, code: bytes) -> None:
        """Put what was read last into a container."""
        stack = self.stack
        if code == b"a":
            value = stack.pop()
            self._container(list).append(value)
        elif code == b"s":
            value, key = stack.pop(), stack.pop()
            self._container(dict)[_key(key)] = _plain(value)
        else:
            values = self._since_mark()
            if code == b"t":
                stack.append(tuple(values))
            elif code == b"e":
                self._container(list).extend(values)
            else:
                into = self._container(dict)
                if len(values) % 2:
                    raise ValueError("a key without a value")
                into.update(zip(map(_key, values[::2]), values[1::2], strict=True))

    def _container(self, kind: type) -> Any:
        if type(self.stack[-1]) is not kind:
            raise TypeError(kind)
        return self.stack[-1]

    def _since_mark(self) -> list[Any]:
        stack = self.stack
        place = len(stack) - 1
        while stack[place] is not _MARK:
            place -= 1
            if place < 0:
                raise IndexError("no mark")
        values = stack[place + 1 :]
        del stack[place:]
        return values

    def _remember(self, code: bytes) -> None:
        """Protocol, frames and memo; nothing else is known."""
        if code == b"\x80":
            self._take(1)
        elif code == b"\x95":
            self._take(8)
        elif code == b"\x94":
            self.memo[len(self.memo)] = _plain(self.stack[-1])
        elif code in (b"q", b"r"):
            self.memo[self._number("<B" if code == b"q" else "<I")] = _plain(self.stack[-1])
        elif code in (b"h", b"j"):
            self.stack.append(self.memo[self._number("<B" if code == b"h" else "<I")])
        else:
            name = NAMES.get(code[0], f"0x{code[0]:02x}")
            raise PickleDataError(
                f"the pickle asks for {name}, which is not data: only containers, texts and numbers are "
                "read; give what torch.cuda.memory._dump_snapshot wrote"
            )


def _key(key: Any) -> str:
    if type(key) is not str:
        raise PickleDataError(
            f"the pickle has a dict with a key of type {type(key).__name__}; only texts are"
        )
    return key


def _plain(value: Any) -> Any:
    if value is _MARK:
        raise ValueError("a mark is no value")
    return value
