"""Pickles read as data: containers, texts and numbers, and nothing that is looked up or called.

Python's own unpickler runs what a pickle tells it to run: a file from elsewhere could do anything. It also
allocates memory for sizes that a file merely claims. This reader knows only the opcodes of plain data (those
of protocols 2 to 5; :mod:`pickletools` describes them), refuses every other one by its name, and reads no
more than is there. Keys of dicts are texts: no choice of keys makes a dict slow.
"""

from __future__ import annotations

import pickletools
import struct
from typing import Any

from tensoropt.errors import TensorOptError

MOST_OPCODES = 200_000_000
"""More instructions than a snapshot of a million events with their stacks has."""
_MOST_INTEGER_BYTES = 16
NAMES = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}
_CODES = {opcode.name: ord(opcode.code) for opcode in pickletools.opcodes}


class PickleDataError(TensorOptError):
    """A pickle that is damaged, or that holds more than plain data."""


def read_pickle(content: bytes, *, most_opcodes: int = MOST_OPCODES) -> Any:
    """Return the contents of a pickle of plain data.

    Raises:
        PickleDataError: the pickle contains anything but containers, texts and numbers, is damaged, or has
            more than ``most_opcodes`` instructions.
    """
    reader = _Reader(content)
    try:
        return reader.read(most_opcodes)
    except (IndexError, KeyError, ValueError, TypeError, struct.error) as error:
        if reader.at >= len(content):
            raise PickleDataError("the pickle breaks off; save it again") from error
        raise PickleDataError(
            f"the pickle is damaged at byte {reader.at} ({type(error).__name__}); save it again"
        ) from error


_BINGET, _LONG_BINGET, _BINPUT, _LONG_BINPUT, _MEMOIZE, _MARK = (
    _CODES[name] for name in ("BINGET", "LONG_BINGET", "BINPUT", "LONG_BINPUT", "MEMOIZE", "MARK")
)
_BININT, _BININT1, _BININT2, _SHORT_TEXT, _STOP = (
    _CODES[name] for name in ("BININT", "BININT1", "BININT2", "SHORT_BINUNICODE", "STOP")
)
_EMPTY_DICT, _EMPTY_LIST, _SETITEMS, _APPENDS, _APPEND = (
    _CODES[name] for name in ("EMPTY_DICT", "EMPTY_LIST", "SETITEMS", "APPENDS", "APPEND")
)
_CONSTANTS = {_CODES["NONE"]: None, _CODES["NEWTRUE"]: True, _CODES["NEWFALSE"]: False}
_TUPLES = {_CODES["TUPLE1"]: 1, _CODES["TUPLE2"]: 2, _CODES["TUPLE3"]: 3}
_SIZED = {
    _CODES[name]: (size, kind)
    for name, size, kind in (
        ("BINUNICODE", 4, "text"), ("BINUNICODE8", 8, "text"),
        ("SHORT_BINBYTES", 1, "bytes"), ("BINBYTES", 4, "bytes"), ("BINBYTES8", 8, "bytes"),
        ("LONG1", 1, "integer"), ("LONG4", 4, "integer"),
    )
}  # fmt: skip
"""Code -> (bytes of the length, what follows it)."""
_SKIPPED = {_CODES["PROTO"]: 1, _CODES["FRAME"]: 8}


class _Reader:
    """A stack and a memo, as the format defines them, and the position of reading, for errors."""

    def __init__(self, content: bytes):
        self.content, self.at = content, 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def read(self, most: int) -> Any:
        """Execute all instructions. The usual kinds are handled here, as there are millions of them; a number
        that breaks off is noticed when the next instruction is looked for."""
        content, stack, marks, memo = self.content, self.stack, self.marks, self.memo
        position = 0
        for _ in range(most):
            self.at = position
            code = content[position]
            position += 1
            if code == _BINGET:
                stack.append(memo[content[position]])
                position += 1
            elif code == _LONG_BINGET:
                stack.append(memo[int.from_bytes(content[position : position + 4], "little")])
                position += 4
            elif code == _BININT1:
                stack.append(content[position])
                position += 1
            elif code == _BININT2:
                stack.append(content[position] | content[position + 1] << 8)
                position += 2
            elif code == _BININT:
                stack.append(int.from_bytes(content[position : position + 4], "little", signed=True))
                position += 4
            elif code == _MEMOIZE:
                memo[len(memo)] = stack[-1]
            elif code == _MARK:
                marks.append(len(stack))
            elif code == _EMPTY_DICT:
                stack.append({})
            elif code == _EMPTY_LIST:
                stack.append([])
            elif code == _SETITEMS:
                values = self._since_mark()
                _container(stack, dict).update(zip(_keys(values[::2]), values[1::2], strict=True))
            elif code == _SHORT_TEXT:
                end = position + 1 + content[position]
                stack.append(content[position + 1 : end].decode("utf-8", "surrogatepass"))
                position = end
            elif code == _APPENDS:
                values = self._since_mark()
                _container(stack, list).extend(values)
            elif code == _APPEND:
                value = stack.pop()
                _container(stack, list).append(value)
            elif code == _STOP:
                (value,) = stack
                if marks:
                    raise ValueError("it ends amid a list")
                return value
            else:
                position = self._rare(code, position)
        raise PickleDataError(
            f"the pickle has more than {most} instructions; record fewer events, or shorter stacks"
        )

    def _rare(self, code: int, position: int) -> int:
        """Execute any other instruction; return where the next one begins."""
        content, stack = self.content, self.stack
        if code in _CONSTANTS:
            stack.append(_CONSTANTS[code])
        elif code in _SIZED:
            return self._sized(*_SIZED[code], position)
        elif code == _CODES["BINFLOAT"]:
            stack.append(struct.unpack_from(">d", content, position)[0])
            return position + 8
        elif code in _TUPLES or code == _CODES["TUPLE"]:
            values = (
                self._since_mark() if code not in _TUPLES else [stack.pop() for _ in range(_TUPLES[code])]
            )
            stack.append(tuple(values) if code not in _TUPLES else tuple(values[::-1]))
        elif code == _CODES["EMPTY_TUPLE"]:
            stack.append(())
        elif code == _CODES["SETITEM"]:
            value, key = stack.pop(), stack.pop()
            _container(stack, dict).update(zip(_keys([key]), [value], strict=True))
        elif code in (_BINPUT, _LONG_BINPUT):
            size = 1 if code == _BINPUT else 4
            self.memo[int.from_bytes(content[position : position + size], "little")] = stack[-1]
            return position + size
        elif code in _SKIPPED:
            return position + _SKIPPED[code]
        else:
            name = NAMES.get(code, f"0x{code:02x}")
            raise PickleDataError(
                f"the pickle asks for {name}, which is not data: only containers, texts and numbers are "
                "read; give what torch.cuda.memory._dump_snapshot wrote"
            )
        return position

    def _sized(self, size: int, kind: str, position: int) -> int:
        """Read data that follows its length; no more is allocated than is there."""
        begin = position + size
        end = begin + int.from_bytes(self.content[position:begin], "little")
        if kind == "integer" and end - begin > _MOST_INTEGER_BYTES:
            raise PickleDataError(
                f"the pickle has an integer of {end - begin} bytes; at most {_MOST_INTEGER_BYTES} are read"
            )
        if end > len(self.content):
            self.at = len(self.content)
            raise IndexError(end)
        data = self.content[begin:end]
        if kind == "text":
            self.stack.append(data.decode("utf-8", "surrogatepass"))
        else:
            integer = kind == "integer"
            self.stack.append(int.from_bytes(data, "little", signed=True) if integer else data)
        return end

    def _since_mark(self) -> list[Any]:
        place = self.marks.pop()
        if place > len(self.stack):
            raise IndexError("what was before a mark is gone")
        values = self.stack[place:]
        del self.stack[place:]
        return values


def _container(stack: list[Any], kind: type) -> Any:
    if type(stack[-1]) is not kind:
        raise TypeError(kind)
    return stack[-1]


def _keys(keys: list[Any]) -> list[Any]:
    for key in keys:
        if type(key) is not str:
            raise PickleDataError(
                f"the pickle has a dict with a key of type {type(key).__name__}; only texts are read; give "
                "what torch.cuda.memory._dump_snapshot wrote"
            )
    return keys
