"""``TensorProto`` -> ``torch.Tensor``: sizes are checked against the bytes there are before any are read.

External data is read from files beside the model only: a path that leads out of the model's folder,
through ``..`` or a link, is refused.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch

from tensoropt.capture.onnx.errors import OnnxError

_T = onnx.TensorProto
DTYPES: dict[Any, torch.dtype] = {
    _T.FLOAT: torch.float32,
    _T.DOUBLE: torch.float64,
    _T.FLOAT16: torch.float16,
    _T.BFLOAT16: torch.bfloat16,
    _T.INT8: torch.int8,
    _T.INT16: torch.int16,
    _T.INT32: torch.int32,
    _T.INT64: torch.int64,
    _T.UINT8: torch.uint8,
    _T.UINT16: torch.uint16,
    _T.UINT32: torch.uint32,
    _T.UINT64: torch.uint64,
    _T.BOOL: torch.bool,
    _T.COMPLEX64: torch.complex64,
    _T.COMPLEX128: torch.complex128,
}
_PACKED: dict[Any, torch.dtype] = {_T.INT4: torch.int8, _T.UINT4: torch.uint8}
"""Two values per byte in the file, one per byte here."""
FOUR_BITS: dict[int, tuple[int, int]] = {_T.INT4: (-8, 7), _T.UINT4: (0, 15)}
"""Element types of four bits and their ranges, which the dtypes they are held in do not have."""
_TYPED_FIELDS: dict[Any, tuple[str, int]] = {
    _T.FLOAT: ("float_data", 1),
    _T.DOUBLE: ("double_data", 1),
    _T.INT64: ("int64_data", 1),
    _T.UINT32: ("uint64_data", 1),
    _T.UINT64: ("uint64_data", 1),
    _T.COMPLEX64: ("float_data", 2),
    _T.COMPLEX128: ("double_data", 2),
}


def torch_dtype(code: int, what: str) -> torch.dtype:
    """The PyTorch dtype of an ONNX element type.

    Raises:
        OnnxError: PyTorch has none (strings, float8, four bits).
    """
    dtype = DTYPES.get(code) or _PACKED.get(code)
    if dtype is None:
        known = code in _T.DataType.values()
        name = _T.DataType.Name(code) if known else f"number {code}"  # type: ignore[arg-type]
        raise OnnxError(f"{what} has the element type {name}, which cannot be imported")
    return dtype


def dims_of(tensor: onnx.TensorProto) -> tuple[int, ...]:
    """A tensor's shape; raises :class:`OnnxError` for negative sizes."""
    dims = tuple(int(d) for d in tensor.dims)
    if any(d < 0 for d in dims):
        raise OnnxError(f"tensor '{tensor.name}' has the shape {list(dims)}; sizes cannot be negative")
    return dims


class TensorReader:
    """Reads the tensors of one file.

    Args:
        folder: of the model file; external data is read from inside it only. None for models from memory.
    """

    def __init__(self, folder: Path | None):
        self.folder = folder

    def shape_and_dtype(self, tensor: onnx.TensorProto) -> tuple[tuple[int, ...], torch.dtype]:
        """What a tensor is, checked against the size of its data without reading it."""
        what = f"tensor '{tensor.name}'"
        shape, dtype = dims_of(tensor), torch_dtype(tensor.data_type, what)
        if len(shape) > 64:
            raise OnnxError(f"{what} has {len(shape)} dims; at most 64 make sense")
        elements = math.prod(shape)
        expected = _stored_bytes(tensor.data_type, dtype, elements)
        if tensor.data_location == _T.EXTERNAL:
            path, offset, length = self._external(tensor)
            if length != expected:
                raise OnnxError(
                    f"{what} of shape {list(shape)} needs {expected} bytes, but {path.name} has {length} for "
                    f"it at offset {offset}; the data file is truncated or belongs to another model"
                )
        elif tensor.HasField("raw_data"):
            if len(tensor.raw_data) != expected:
                raise OnnxError(
                    f"{what} of shape {list(shape)} needs {expected} bytes, but the file holds "
                    f"{len(tensor.raw_data)}; it is corrupt"
                )
        else:
            field, per_element = _TYPED_FIELDS.get(tensor.data_type, ("int32_data", 1))
            count = len(getattr(tensor, field))
            # Complex numbers take two entries each; two four-bit numbers share one.
            needed = -(-elements // 2) if tensor.data_type in _PACKED else elements * per_element
            if count != needed:
                raise OnnxError(
                    f"{what} of shape {list(shape)} needs {needed} numbers, but the file holds {count}; it "
                    "is corrupt"
                )
        return shape, dtype

    def read(self, tensor: onnx.TensorProto) -> torch.Tensor:
        """The tensor's data.

        Raises:
            OnnxError: it has fewer or more bytes than its shape says, an unknown type, or lies elsewhere.
        """
        shape, dtype = self.shape_and_dtype(tensor)
        if tensor.data_location == _T.EXTERNAL:
            path, offset, length = self._external(tensor)
            with path.open("rb") as stream:
                stream.seek(offset)
                return _from_bytes(stream.read(length), tensor.data_type, dtype, shape)
        if tensor.HasField("raw_data"):
            return _from_bytes(tensor.raw_data, tensor.data_type, dtype, shape)
        array = onnx.numpy_helper.to_array(tensor)
        return _from_bytes(array.tobytes(), tensor.data_type, dtype, shape, unpacked=True)

    def _external(self, tensor: onnx.TensorProto) -> tuple[Path, int, int]:
        """(file, offset, bytes) of external data, checked."""
        what = f"the external data of tensor '{tensor.name}'"
        entries = {entry.key: entry.value for entry in tensor.external_data}
        location = entries.get("location", "")
        if self.folder is None:
            raise OnnxError(f"{what} lies in a file of its own; give the path of the model")
        if not location or "\0" in location or Path(location).is_absolute() or ".." in Path(location).parts:
            raise OnnxError(
                f"{what} is at '{location}', which is not a file inside the model's folder; it is not read"
            )
        folder = self.folder.resolve()
        try:
            # Resolved before it is compared with the folder: a link may lead out where the text of the path
            # does not.
            path = (folder / location).resolve(strict=True)
        except (OSError, RuntimeError):
            raise OnnxError(
                f"{what} should be in {folder / location}, but there is no such file; put it beside the model"
            ) from None
        if not path.is_relative_to(folder):
            raise OnnxError(
                f"{what} is at '{location}', a link that leaves the model's folder; it is not read"
            )
        if not path.is_file():
            raise OnnxError(f"{what} is at '{location}', which is not an ordinary file")
        size = path.stat().st_size
        try:
            offset = int(entries.get("offset", "0") or 0)
            length = int(entries["length"]) if entries.get("length") else size - offset
        except ValueError:
            raise OnnxError(f"{what} has an offset or length that is no number") from None
        if offset < 0 or length < 0 or offset + length > size:
            raise OnnxError(
                f"{what} is bytes {offset} to {offset + length} of {path.name}, which has {size}; the data "
                "file is truncated or belongs to another model"
            )
        return path, offset, length


def _stored_bytes(code: int, dtype: torch.dtype, elements: int) -> int:
    return -(-elements // 2) if code in _PACKED else elements * dtype.itemsize


def _from_bytes(
    data: bytes, code: int, dtype: torch.dtype, shape: tuple[int, ...], *, unpacked: bool = False
) -> torch.Tensor:
    if math.prod(shape) == 0:
        return torch.empty(shape, dtype=dtype)
    raw = np.frombuffer(data, dtype=np.uint8)
    if code in _PACKED and not unpacked:
        # The low half of a byte comes first; the last half is padding where the number is odd.
        raw = np.stack([raw & 15, raw >> 4], axis=-1).reshape(-1)[: math.prod(shape)]
        if code == _T.INT4:
            # Extends the sign from bit 3: 8 to 15 stand for -8 to -1.
            raw = ((raw.astype(np.int8) ^ 8) - 8).view(np.uint8)
    # A copy: what `frombuffer` gives is read-only memory of the file's bytes.
    owned = torch.from_numpy(raw.copy())
    return owned.view(dtype).reshape(shape) if dtype != torch.bool else owned.bool().reshape(shape)


def attribute_value(attribute: onnx.AttributeProto, reader: TensorReader) -> Any:
    """A node's attribute as plain Python; tensors as ``torch.Tensor``, graphs as they are."""
    kind = attribute.type
    if kind == onnx.AttributeProto.TENSOR:
        return reader.read(attribute.t)
    if kind == onnx.AttributeProto.STRING:
        return attribute.s.decode("utf-8", errors="replace")
    if kind == onnx.AttributeProto.STRINGS:
        return [s.decode("utf-8", errors="replace") for s in attribute.strings]
    if kind in (onnx.AttributeProto.FLOATS, onnx.AttributeProto.INTS):
        return list(onnx.helper.get_attribute_value(attribute))
    if kind in (onnx.AttributeProto.FLOAT, onnx.AttributeProto.INT, onnx.AttributeProto.GRAPH):
        return onnx.helper.get_attribute_value(attribute)
    name = onnx.AttributeProto.AttributeType.Name(kind)
    raise OnnxError(f"its attribute '{attribute.name}' has the type {name}, which cannot be imported")
