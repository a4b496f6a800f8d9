"""Memory for packed weights: one behind the other, large ones by themselves, in huge pages where the system has them.

A step reads all weights once. In pages of 4 KiB that asks for an address translation every 64 lines, and the hardware's reading ahead stops
at each page's end: on an AMD EPYC a decode step of one row took 21 ms, and 16 ms in pages of 2 MiB. The KV cache lies in such pages too
(kv_cache.py).
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch

HUGE_PAGE = 2 << 20
# Untouched ends of areas take addresses, but no memory.
_AREA_BYTES = 64 << 20
# A cache line, and the widest register.
_ALIGNMENT = 64


class WeightMemory:
    """See the module. What was taken lives as long as a tensor points at its area. For one thread at a time."""

    def __init__(self) -> None:
        self._area = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same numbers in this memory, contiguous, at a multiple of 64 bytes. Raises MemoryError."""
        size = tensor.numel() * tensor.element_size()
        return self._take(size).view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def _take(self, size: int) -> torch.Tensor:
        if size > _AREA_BYTES // 2:  # an area of its own: such ones, one after the other, would leave half of the addresses unused
            return huge_area(size)[:size]
        if self._used + size > self._area.numel():
            self._area, self._used = huge_area(_AREA_BYTES), 0
        place = self._area[self._used : self._used + size]
        self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
        return place


def huge_area(size: int) -> torch.Tensor:
    """At least `size` bytes of zeros from a huge page's beginning on, uint8; as ordinary pages where the system refuses others.

    Nothing of it is in memory before it is touched. Raises MemoryError.
    """
    try:
        pages = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no memory for {size >> 20} MiB") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(pages, dtype=torch.uint8)
    return whole[-whole.data_ptr() % HUGE_PAGE :]
