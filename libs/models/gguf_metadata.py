"""The key-value part of a GGUF file as typed look-ups, and the names and shapes of its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, overload

import numpy as np
from gguf import GGUFReader

from libs.errors import ErrorCode, TokenloomError
from libs.models.gguf_index import read_index

ValueT = TypeVar("ValueT")
_MISSING = object()


class GGUFMetadata:
    """One GGUF file's metadata. Tensor data stays on disk (memory-mapped) until asked for."""

    def __init__(self, path: Path) -> None:
        """Raises TokenloomError(INVALID_REQUEST) when the file cannot be read as GGUF."""
        try:
            read_index(path)  # says what a file that is cut short lacks, where the reader says what its arrays cannot do
            reader = GGUFReader(str(path))
        except Exception as error:  # the reader trusts the file: one that is cut off fails with whatever comes first
            raise TokenloomError(ErrorCode.INVALID_REQUEST, f"{path} cannot be read as GGUF: {error}") from error
        self.path = path
        self._fields: Mapping[str, Any] = reader.fields
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}

    @overload
    def get(self, key: str, kind: type[ValueT]) -> ValueT: ...
    @overload
    def get(self, key: str, kind: type[ValueT], default: ValueT | None) -> ValueT | None: ...

    def get(self, key: str, kind: type[ValueT], default: Any = _MISSING) -> ValueT | None:
        """The value of `key`. Raises TokenloomError(INVALID_REQUEST) when it is not of `kind`, or absent and without default."""
        field = self._fields.get(key)
        if field is None:
            if default is _MISSING:
                raise TokenloomError(ErrorCode.INVALID_REQUEST, f"{self.path.name} has no metadata key {key}")
            return default  # type: ignore[no-any-return]
        try:
            value = field.contents()
        except UnicodeDecodeError as error:
            raise TokenloomError(ErrorCode.INVALID_REQUEST, f"{self.path.name}: metadata key {key} is not UTF-8: {error}") from error
        if kind is float and isinstance(value, int | float):
            # Stored as float32: the shortest decimal that reads back as the same float32 is what the author wrote (1e-05).
            value = float(str(np.float32(value)))
        if not isinstance(value, kind):
            raise TokenloomError(ErrorCode.INVALID_REQUEST, f"{self.path.name}: metadata key {key} is no {kind.__name__}")
        return value

    def unsupported(self, what: str) -> TokenloomError:
        """The error that refuses this file because of `what` it holds."""
        return TokenloomError(ErrorCode.UNSUPPORTED, f"{self.path.name}: {what}")

    def has_tensor(self, name: str) -> bool:
        """Whether the file holds a tensor of this name."""
        return name in self._tensors

    def tensor_shape(self, name: str) -> tuple[int, ...]:
        """Logical shape, slowest dimension first. Raises TokenloomError(INVALID_REQUEST) when there is no such tensor."""
        if name not in self._tensors:
            raise TokenloomError(ErrorCode.INVALID_REQUEST, f"{self.path.name} has no tensor {name}")
        return tuple(int(size) for size in reversed(self._tensors[name].shape))

    def float_tensor(self, name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
        """The data of an unquantised float32 tensor."""
        return np.asarray(self._tensors[name].data, dtype=np.float32)
