"""The C++ kernels as Python sees them: loaded through ctypes, which lets go of the interpreter's lock during a call.

All tensors are float32 and contiguous (ids and positions as kernels.h says), the cache as kv_cache.allocate lays it out.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from libs.errors import ErrorCode, TokenloomError
from services.worker.ops.base import HeadShape, LayerCache, StepInputs

# Forces a variant ("avx512", "avx2", "generic"); for tests and for comparing machines.
VARIANT_ENV = "TOKENLOOM_CPU_ISA"
MAX_HEAD_DIM = 256
MAX_GROUP = 32
PANEL = 32


def _struct(name: str, pointers: str, numbers: str, real: str = "") -> type[ctypes.Structure]:
    """A mirror of a struct in kernels.h: pointers first, then int32 numbers, then perhaps a float."""
    fields: list[tuple[str, Any]] = [(item, ctypes.c_void_p) for item in pointers.split()]
    fields += [(item, ctypes.c_int32) for item in numbers.split()]
    fields += [(item, ctypes.c_float) for item in real.split()]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


_Attention = _struct(
    "Attention", "out queries keys values query_starts kv_lengths tables", "rows table_width query_heads kv_heads head_dim", "scale"
)
_Linear = _struct("Linear", "out x panels bias", "rows outputs inputs")
_AddNorm = _struct("AddNorm", "normed total x residual weight", "rows width", "epsilon")
_RopeCache = _struct("RopeCache", "queries qkv rotations positions cache_slots keys values", "tokens query_heads kv_heads head_dim")
_Activation = _struct("Activation", "out gate_up", "rows width")


@dataclass(frozen=True, slots=True)
class Panels:
    """A weight [outputs, inputs] in panels of 32 outputs, [panels, inputs, 32], and its bias, padded alike; see linear.h."""

    panels: torch.Tensor
    bias: torch.Tensor | None
    outputs: int
    inputs: int


def pack(weight: torch.Tensor, bias: torch.Tensor | None) -> Panels:
    """Copies a weight [outputs, inputs] into panels; outputs beyond the last are zero."""
    outputs, inputs = weight.shape
    missing = -outputs % PANEL
    if missing:
        weight = torch.nn.functional.pad(weight, (0, 0, 0, missing))
        bias = None if bias is None else torch.nn.functional.pad(bias, (0, missing))
    return Panels(weight.view(-1, PANEL, inputs).transpose(1, 2).contiguous(), bias, outputs, inputs)


class CpuKernels:
    """The loaded library; `variant` names the instruction set that was chosen."""

    def __init__(self, path: Path, variant: str | None = None) -> None:
        """Loads `path` and takes `variant` (default: VARIANT_ENV, else the best this CPU has). Raises TokenloomError(UNSUPPORTED)."""
        self._library = ctypes.CDLL(str(path))
        self._library.tokenloom_variant.restype = ctypes.c_void_p
        self._library.tokenloom_variant_name.restype = ctypes.c_char_p
        wanted = os.environ.get(VARIANT_ENV, "") if variant is None else variant
        self._variant = ctypes.c_void_p(self._library.tokenloom_variant(wanted.encode()))
        if not self._variant:
            raise TokenloomError(ErrorCode.UNSUPPORTED, f"this CPU or build has no kernels for {wanted}")
        self.variant = self._library.tokenloom_variant_name(self._variant).decode()

    @staticmethod
    def supports(heads: HeadShape) -> bool:
        """Whether the kernels take these heads."""
        return heads.head_dim % 16 == 0 and heads.head_dim <= MAX_HEAD_DIM and heads.query_heads // heads.kv_heads <= MAX_GROUP

    def linear(self, out: torch.Tensor, x: torch.Tensor, packed: Panels) -> None:
        """out [rows, outputs] = x [rows, inputs] times the packed weight, plus its bias."""
        args = _Linear(_at(out), _at(x), _at(packed.panels), _at(packed.bias), x.shape[0], packed.outputs, packed.inputs)
        self._library.tokenloom_linear(self._variant, ctypes.byref(args))

    def add_norm(
        self,
        normed: torch.Tensor,
        total: torch.Tensor,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        epsilon: float,
    ) -> None:
        """Ops.add_norm into `normed` and, where there is a residual, `total`."""
        args = _AddNorm(_at(normed), _at(total), _at(x), _at(residual), _at(weight), *x.shape, epsilon)
        self._library.tokenloom_add_norm(self._variant, ctypes.byref(args))

    def rope_cache(
        self, queries: torch.Tensor, qkv: torch.Tensor, rotations: torch.Tensor, cache: LayerCache, inputs: StepInputs, heads: HeadShape
    ) -> None:
        """Ops.rope_and_cache into `queries` and the cache."""
        args = _RopeCache(
            _at(queries),
            _at(qkv),
            _at(rotations),
            _at(inputs.positions),
            _at(inputs.cache_slots),
            _at(cache.keys),
            _at(cache.values),
            qkv.shape[0],
            heads.query_heads,
            heads.kv_heads,
            heads.head_dim,
        )
        self._library.tokenloom_rope_cache(self._variant, ctypes.byref(args))

    def attention(
        self, out: torch.Tensor, queries: torch.Tensor, cache: LayerCache, inputs: StepInputs, heads: HeadShape, scale: float
    ) -> None:
        """Ops.attention into `out`."""
        args = _Attention(
            _at(out),
            _at(queries),
            _at(cache.keys),
            _at(cache.values),
            _at(inputs.query_starts),
            _at(inputs.kv_lengths),
            _at(inputs.block_tables),
            *inputs.block_tables.shape,
            heads.query_heads,
            heads.kv_heads,
            heads.head_dim,
            scale,
        )
        self._library.tokenloom_attention(self._variant, ctypes.byref(args))

    def activation(self, out: torch.Tensor, gate_up: torch.Tensor) -> None:
        """Ops.gated_activation into `out`."""
        args = _Activation(_at(out), _at(gate_up), *out.shape)
        self._library.tokenloom_activation(self._variant, ctypes.byref(args))


def _at(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
