"""Where the tensors of a GGUF file lie, read in milliseconds.

The gguf package's reader makes several array views for every string of the vocabulary (2 s for 49,152 tokens) and trusts the file; a worker
needs no metadata, so it is stepped over here, and every end is checked. Layout: magic, version, tensor count, pair count, pairs, tensor
infos, padding, data.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT_KEY = "general.alignment"
_SCALAR_BYTES = {
    GGUFValueType.UINT8: 1,
    GGUFValueType.INT8: 1,
    GGUFValueType.BOOL: 1,
    GGUFValueType.UINT16: 2,
    GGUFValueType.INT16: 2,
    GGUFValueType.UINT32: 4,
    GGUFValueType.INT32: 4,
    GGUFValueType.FLOAT32: 4,
    GGUFValueType.UINT64: 8,
    GGUFValueType.INT64: 8,
    GGUFValueType.FLOAT64: 8,
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as it lies in the file: `data` is uint8 [rows..., bytes of a row]."""

    name: str
    kind: GGMLQuantizationType
    data: npt.NDArray[np.uint8]


def read_index(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a little-endian GGUF by name, mapped, not read. Raises ValueError when the file is none or is cut short."""
    with file.open("rb") as stream:
        content = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        return _Cursor(content).tensors()
    except (struct.error, IndexError, KeyError, OverflowError, UnicodeDecodeError) as error:
        raise ValueError(f"not a complete GGUF: its header is cut short or damaged ({error})") from error


class _Cursor:
    """A position in the file."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self._at = 0

    def tensors(self) -> dict[str, StoredTensor]:
        magic = self._content[:4]
        self._at = 4
        version = self._number("<I")
        if magic != _MAGIC or version not in _VERSIONS:
            raise ValueError(f"not a GGUF of version {' or '.join(map(str, _VERSIONS))} (magic {magic!r}, version {version})")
        tensors, pairs = self._number("<Q"), self._number("<Q")
        alignment = 32
        for _ in range(pairs):
            key, kind = self._string(), GGUFValueType(self._number("<I"))
            if key == _ALIGNMENT_KEY and kind is GGUFValueType.UINT32:
                alignment = self._number("<I")
            else:
                self._skip(kind)
        infos = [self._info() for _ in range(tensors)]
        start = -(-self._at // alignment) * alignment
        return {name: self._tensor(name, shape, kind, start + offset) for name, shape, kind, offset in infos}

    def _number(self, layout: str) -> int:
        (value,) = struct.unpack_from(layout, self._content, self._at)
        self._at += struct.calcsize(layout)
        return int(value)

    def _string(self) -> str:
        length = self._number("<Q")
        self._at += length
        return self._content[self._at - length : self._at].decode()

    def _skip(self, kind: GGUFValueType) -> None:
        if kind is GGUFValueType.STRING:
            self._at += 8 + struct.unpack_from("<Q", self._content, self._at)[0]
        elif kind is GGUFValueType.ARRAY:
            item, count = GGUFValueType(self._number("<I")), self._number("<Q")
            if item in _SCALAR_BYTES:
                self._at += count * _SCALAR_BYTES[item]
            else:
                for _ in range(count):
                    self._skip(item)
        else:
            self._at += _SCALAR_BYTES[kind]

    def _info(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name = self._string()
        dimensions = [self._number("<Q") for _ in range(self._number("<I"))]
        return name, tuple(reversed(dimensions)), GGMLQuantizationType(self._number("<I")), self._number("<Q")

    def _tensor(self, name: str, shape: tuple[int, ...], kind: GGMLQuantizationType, offset: int) -> StoredTensor:
        per_block, block_bytes = GGML_QUANT_SIZES[kind]
        row_bytes = shape[-1] // per_block * block_bytes
        rows = int(np.prod(shape[:-1], dtype=np.int64))
        if offset + rows * row_bytes > len(self._content):
            raise ValueError(f"{name} ends beyond the end of the file, which is cut short")
        data = np.frombuffer(self._content, np.uint8, rows * row_bytes, offset)
        return StoredTensor(name, kind, data.reshape(*shape[:-1], row_bytes))
