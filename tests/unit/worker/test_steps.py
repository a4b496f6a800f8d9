"""Which failures of a step a smaller step may mend."""

from __future__ import annotations

import pytest
import torch

from services.worker.steps import is_out_of_memory


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"),
            True,
        ),
        (RuntimeError("shape mismatch"), False),
        (ValueError("no"), False),
    ],
)
def test_want_of_memory_is_told_from_other_failures(error: BaseException, expected: bool):
    assert is_out_of_memory(error) is expected


def test_torch_s_own_failure_to_allocate_is_recognised():
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
