"""The C++ kernels as Python sees them: loaded through ctypes, which lets go of the interpreter's lock during a call."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch

from libs.errors import ErrorCode, TokenloomError
from services.worker.ops.base import HeadShape, LayerCache, StepInputs

# Forces a variant ("avx512", "avx2", "generic"); for tests and for comparing machines.
VARIANT_ENV = "TOKENLOOM_CPU_ISA"
MAX_HEAD_DIM = 256
MAX_GROUP = 32


class _Attention(ctypes.Structure):
    """Mirrors tokenloom::Attention in kernels.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("out", "queries", "keys", "values", "query_starts", "kv_lengths", "tables")),
        *((name, ctypes.c_int32) for name in ("rows", "table_width", "query_heads", "kv_heads", "head_dim")),
        ("scale", ctypes.c_float),
    )


class CpuKernels:
    """The loaded library; `variant` names the instruction set that was chosen."""

    def __init__(self, path: Path, variant: str | None = None) -> None:
        """Loads `path` and takes `variant` (default: VARIANT_ENV, else the best this CPU has). Raises TokenloomError(UNSUPPORTED)."""
        self._library = ctypes.CDLL(str(path))
        self._library.tokenloom_select.restype = ctypes.c_char_p
        self._library.tokenloom_attention.restype = None
        wanted = os.environ.get(VARIANT_ENV, "") if variant is None else variant
        chosen = self._library.tokenloom_select(wanted.encode())
        if chosen is None:
            raise TokenloomError(ErrorCode.UNSUPPORTED, f"this CPU or build has no kernels for {wanted}")
        self.variant = chosen.decode()

    @staticmethod
    def supports(heads: HeadShape) -> bool:
        """Whether the kernels take these heads."""
        return heads.head_dim % 16 == 0 and heads.head_dim <= MAX_HEAD_DIM and heads.query_heads // heads.kv_heads <= MAX_GROUP

    def attention(
        self, out: torch.Tensor, queries: torch.Tensor, cache: LayerCache, inputs: StepInputs, heads: HeadShape, scale: float
    ) -> None:
        """Ops.attention into `out`; all tensors float32 and contiguous, the cache laid out as kv_cache.allocate does it."""
        args = _Attention(
            out.data_ptr(),
            queries.data_ptr(),
            cache.keys.data_ptr(),
            cache.values.data_ptr(),
            inputs.query_starts.data_ptr(),
            inputs.kv_lengths.data_ptr(),
            inputs.block_tables.data_ptr(),
            inputs.kv_lengths.shape[0],
            inputs.block_tables.shape[1],
            heads.query_heads,
            heads.kv_heads,
            heads.head_dim,
            scale,
        )
        self._library.tokenloom_attention(ctypes.byref(args))
