"""Log-probabilities of consecutive positions, packed as they travel: nobody between worker and client unpacks them."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from libs.packing import unpack_ids
from tokenloom.common.v1 import common_pb2

_ITEM = 4
# Bytes of an id with its log-probability.
ENTRY_BYTES = 2 * _ITEM


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One position: its token, that one's log-probability (natural; NaN: undefined, the first of a prompt) and rank (from 1; 0: undefined).

    `top_ids` and `top_logprobs` are the most likely ids in falling order, ties by the lowest id; the token itself may be among them.
    """

    token_id: int
    logprob: float
    rank: int
    top_ids: Sequence[int] = ()
    top_logprobs: Sequence[float] = ()


@dataclass(slots=True)
class PackedLogprobs:
    """See common.v1.Logprobs: `alternatives + 1` entries (uint32, float32, little-endian) per position, and one rank."""

    alternatives: int
    token_ids: bytearray = field(default_factory=bytearray)
    values: bytearray = field(default_factory=bytearray)
    ranks: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.ranks)

    @property
    def _width(self) -> int:
        return _ITEM * (self.alternatives + 1)

    @property
    def position_bytes(self) -> int:
        """Bytes of one position, without its rank."""
        return 2 * self._width

    @property
    def nbytes(self) -> int:
        """Bytes of all positions, without their ranks."""
        return len(self) * self.position_bytes

    @classmethod
    def from_proto(cls, message: common_pb2.Logprobs) -> PackedLogprobs:
        """As it arrived. Raises ValueError when its arrays disagree in length."""
        packed = cls(message.alternatives, bytearray(message.token_ids), bytearray(message.logprobs), list(message.ranks))
        if not len(packed.token_ids) == len(packed.values) == len(packed) * packed._width:
            sizes = f"{len(packed.token_ids)} and {len(packed.values)} bytes"
            raise ValueError(f"log-probabilities of {len(packed)} positions with {packed.alternatives} alternatives hold {sizes}")
        return packed

    def to_proto(self) -> common_pb2.Logprobs:
        """As it travels."""
        return common_pb2.Logprobs(
            alternatives=self.alternatives, token_ids=bytes(self.token_ids), logprobs=bytes(self.values), ranks=self.ranks
        )

    def extend(self, later: PackedLogprobs) -> None:
        """Appends the positions that follow. Raises ValueError when they list another number of alternatives."""
        if later.alternatives != self.alternatives:
            raise ValueError(f"positions with {later.alternatives} alternatives behind such with {self.alternatives}")
        self.token_ids += later.token_ids
        self.values += later.values
        self.ranks += later.ranks

    def piece(self, first: int, end: int | None = None) -> PackedLogprobs:
        """Positions `first` to `end` (default: all that follow), as a copy."""
        stop = len(self) if end is None else min(end, len(self))
        cut = slice(first * self._width, stop * self._width)
        return PackedLogprobs(self.alternatives, self.token_ids[cut], self.values[cut], self.ranks[first:stop])

    def unpack(self) -> list[TokenLogprobs]:
        """One entry per position."""
        ids, values, width = unpack_ids(bytes(self.token_ids)), _floats(self.values), self.alternatives + 1
        return [
            TokenLogprobs(ids[at], values[at], rank, ids[at + 1 : at + width], values[at + 1 : at + width])
            for at, rank in zip(range(0, len(ids), width), self.ranks, strict=True)
        ]


def _floats(data: bytes | bytearray) -> list[float]:
    unpacked = array("f")
    unpacked.frombytes(bytes(data))
    if sys.byteorder == "big":  # pragma: no cover
        unpacked.byteswap()
    return unpacked.tolist()
