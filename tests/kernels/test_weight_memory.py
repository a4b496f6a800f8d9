"""Packed weights keep their numbers, stand close together and are aligned; the system is asked for huge pages and may refuse."""

from __future__ import annotations

import gc
import mmap

import pytest
import torch

from services.worker.ops import weight_memory
from services.worker.ops.weight_memory import HUGE_PAGE, WeightMemory


def test_tensors_keep_their_numbers_whatever_comes_behind_them():
    memory = WeightMemory()
    given = [torch.rand(3, 5), torch.arange(70, dtype=torch.uint8), torch.rand(40, 20).t(), torch.rand(0, 4), torch.rand(1000, 9)]
    taken = [memory.copy(tensor) for tensor in given]
    for before, after in zip(given, taken, strict=True):
        assert after.dtype is before.dtype
        assert after.is_contiguous()
        assert after.data_ptr() % 64 == 0
        assert torch.equal(before, after)


def test_the_first_begins_a_huge_page_and_the_others_follow_it_without_a_gap():
    memory = WeightMemory()
    first, second = memory.copy(torch.rand(100, 16)), memory.copy(torch.rand(8))
    assert first.data_ptr() % HUGE_PAGE == 0
    assert second.data_ptr() - first.data_ptr() == first.nbytes


def test_more_than_an_area_holds_goes_to_another_and_lives_as_long_as_it_is_needed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(weight_memory, "_AREA_BYTES", 4096)
    memory = WeightMemory()
    given = [torch.rand(size) for size in (1000, 500, 3000, 10)]
    taken = [memory.copy(tensor) for tensor in given]
    del memory
    gc.collect()
    assert all(map(torch.equal, given, taken))


def test_a_large_one_has_an_area_of_its_size_and_the_small_ones_go_on_where_they_were(monkeypatch: pytest.MonkeyPatch):
    """In areas of one size, tensors over half of it would waste nearly as many addresses as they use."""
    sizes = []
    new_area = weight_memory.huge_area
    monkeypatch.setattr(weight_memory, "_AREA_BYTES", 4096)
    monkeypatch.setattr(weight_memory, "huge_area", lambda size: (sizes.append(size), new_area(size))[1])
    memory = WeightMemory()
    given = [torch.rand(size) for size in (8, 600, 8)]
    first, large, second = (memory.copy(tensor) for tensor in given)
    assert sizes == [4096, 2400]
    assert second.data_ptr() - first.data_ptr() == 64
    assert all(map(torch.equal, given, (first, large, second)))


def test_the_system_is_asked_for_huge_pages_and_may_refuse(monkeypatch: pytest.MonkeyPatch):
    asked = []

    class Refusing(mmap.mmap):
        def madvise(self, *advice: int) -> None:
            asked.append(advice)
            raise OSError("no such advice")

    monkeypatch.setattr(mmap, "mmap", Refusing)
    numbers = torch.rand(50)
    assert torch.equal(WeightMemory().copy(numbers), numbers)
    assert asked == [(mmap.MADV_HUGEPAGE,)]


def test_want_of_memory_is_an_error():
    with pytest.raises(MemoryError, match="no memory for"):
        WeightMemory().copy(torch.empty(1, dtype=torch.uint8).expand(1 << 50))
