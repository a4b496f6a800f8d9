"""The operations on CPUs, in C++ (services/worker/kernels/cpu), activations of float32: recorded once, run with one native call per step.

`bind` runs the model's `forward` with stand-ins (recording.Value) for tensors. Each operation checks what it is given and appends an
instruction; what comes out is a program that a team of threads replays (native.py). The model does not know.

Rows' independence (PROTOCOL.md rule 15) holds by construction: every sum has one order, whatever the number of rows, pieces and threads,
so that a product needs no padding to be the same in every batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from libs.errors import ErrorCode, TokenloomError
from services.worker.ops.base import Forward, HeadShape, LayerCache, PackedLinear, Step, StepInputs
from services.worker.ops.integer_packing import IntegerPanels, pack_integers
from services.worker.ops.native import CpuLibrary, Program, Sampler, Team
from services.worker.ops.packing import Panels, pack
from services.worker.ops.quantized import QuantizedWeight, Weight
from services.worker.ops.recording import Instruction, Kind, Recording, Rows, Value
from services.worker.ops.weight_memory import WeightMemory
from services.worker.sampling.picking import Picker

MAX_HEAD_DIM = 256
MAX_GROUP = 32
BLOCK = 16


def supports(heads: HeadShape) -> bool:
    """Whether the kernels take these heads."""
    return (
        heads.head_dim % BLOCK == 0
        and 0 < heads.head_dim <= MAX_HEAD_DIM
        and heads.query_heads % heads.kv_heads == 0
        and heads.query_heads // heads.kv_heads <= MAX_GROUP
    )


class CpuOps:
    """See the module and Ops. Every operation but `pack_linear` is for `forward` while `bind` records it."""

    name = "cpu"

    def __init__(self, library: CpuLibrary, team: Team) -> None:
        self._library = library
        self._team = team
        self._memory = WeightMemory()
        self._recording: Recording | None = None
        self._inputs: StepInputs | None = None

    def pack_linear(self, weight: Weight, bias: torch.Tensor | None, *, gated: bool = False) -> PackedLinear:
        """See Ops."""
        if isinstance(weight, QuantizedWeight):
            return pack_integers(weight, bias, self._memory, gated=gated)
        return pack(weight, bias, self._memory, gated=gated)

    def bind(self, forward: Forward, cache: Sequence[LayerCache], max_tokens: int) -> Step:
        """See Ops: records `forward` and builds the program."""
        self._recording, self._inputs = recording, inputs = Recording(), _symbolic_inputs()
        try:
            result = forward(inputs, cache)
        except (TypeError, AttributeError) as error:  # the model did with a stand-in what only a tensor can
            raise _refused(f"the model does more than Ops offers: {error}") from error
        finally:
            self._recording = self._inputs = None
        if not isinstance(result, Value) or result not in recording.made:
            raise _refused(f"the model's result is {_name(result)}, not what an operation computed")
        return Program(self._library, self._team, recording, result, max_tokens)

    def picker(self) -> Picker:
        """See Ops. Raises MemoryError."""
        return Sampler(self._library, self._team)

    def embedding(self, token_ids: torch.Tensor, weight: torch.Tensor) -> Value:
        """See Ops."""
        self._require(self._inputs is not None and token_ids is self._inputs.token_ids, "an embedding of anything but the step's token ids")
        _check_weight(weight, (None, None))
        return self._add(Instruction(Kind.EMBEDDING, Value(Rows.TOKENS, weight.shape[1]), weight=weight))

    def linear(self, x: Value, packed: PackedLinear, residual: Value | None = None) -> Value:
        """See Ops."""
        self._require(isinstance(packed, (Panels, IntegerPanels)), "a product whose weight these operations did not pack")
        _check_value(x, packed.inputs)
        to = Value(x.rows, packed.outputs)
        if residual is not None:
            _check_value(residual, to.width)
            self._require(residual.rows is to.rows, "a sum of all tokens with sampled ones")
            # No model has one, so no test holds its bits.
            self._require(not packed.gated, "a gated product that is added to something")
        kind, layout = Kind.LINEAR, 0
        if isinstance(packed, IntegerPanels):
            x = self._add(Instruction(Kind.QUANTIZE, Value(x.rows, packed.quantized_width), source=x))
            kind, layout = Kind.INTEGER_LINEAR, packed.format
        weight, bias = packed.panels, packed.bias
        return self._add(Instruction(kind, to, source=x, residual=residual, gated=packed.gated, weight=weight, bias=bias, format=layout))

    def norm(self, x: Value, weight: torch.Tensor, epsilon: float) -> Value:
        """See Ops."""
        _check_value(x, None)
        _check_weight(weight, (x.width,))
        return self._add(Instruction(Kind.NORM, Value(x.rows, x.width), source=x, weight=weight, number=epsilon))

    def rope_and_cache(self, qkv: Value, rotations: torch.Tensor, cache: LayerCache, inputs: StepInputs, heads: HeadShape) -> Value:
        """See Ops."""
        self._check_attention(qkv, (heads.query_heads + 2 * heads.kv_heads) * heads.head_dim, cache, inputs, heads)
        _check_weight(rotations, (None, heads.head_dim))
        to = Value(Rows.TOKENS, heads.query_heads * heads.head_dim)
        return self._add(Instruction(Kind.ROPE_CACHE, to, source=qkv, weight=rotations, cache=cache, heads=heads))

    def attention(self, queries: Value, cache: LayerCache, inputs: StepInputs, heads: HeadShape, scale: float) -> Value:
        """See Ops."""
        width = heads.query_heads * heads.head_dim
        self._check_attention(queries, width, cache, inputs, heads)
        return self._add(Instruction(Kind.ATTENTION, Value(Rows.TOKENS, width), source=queries, cache=cache, heads=heads, number=scale))

    def pick(self, x: Value, sampled: torch.Tensor) -> Value:
        """See Ops."""
        self._require(self._inputs is not None and sampled is self._inputs.sampled, "a choice of anything but the step's sampled tokens")
        _check_value(x, None)
        self._require(x.rows is Rows.TOKENS, "a choice of tokens that were picked before")
        return self._add(Instruction(Kind.GATHER, Value(Rows.SAMPLED, x.width), source=x))

    def head(self, x: Value, sampled: torch.Tensor, packed: PackedLinear) -> Value:
        """See Ops."""
        self._require(self._inputs is not None and sampled is self._inputs.sampled, "a head over anything but the step's sampled tokens")
        _check_value(x, None)
        return self.linear(x if x.rows is Rows.SAMPLED else self.pick(x, sampled), packed)

    def _add(self, instruction: Instruction) -> Value:
        if self._recording is None:
            raise _refused("an operation outside of `bind`, which records them")
        self._require(self._recording.made.issuperset(instruction.reads), "an operation on a value of another recording")
        return self._recording.add(instruction)

    def _require(self, holds: bool, what: str) -> None:
        if not holds:
            raise _refused(what)

    def _check_attention(self, value: Value, width: int, cache: LayerCache, inputs: StepInputs, heads: HeadShape) -> None:
        self._require(inputs is self._inputs, "attention over anything but the step's own rows")
        self._require(supports(heads), f"attention with {heads}")
        _check_value(value, width)
        self._require(value.rows is Rows.TOKENS, "attention of sampled tokens alone")
        blocks = cache.keys.shape[0]
        wanted = (blocks, heads.kv_heads, BLOCK, heads.head_dim)
        laid_out = cache.keys.stride(0) == cache.values.stride(0) and all(
            part[0].is_contiguous() for part in (cache.keys.transpose(2, 3), cache.values)
        )
        right = cache.keys.shape == wanted == cache.values.shape and cache.keys.dtype is cache.values.dtype is torch.float32
        self._require(laid_out and right, f"a cache of shape {tuple(cache.keys.shape)}, type {cache.keys.dtype} or layout")


def _symbolic_inputs() -> StepInputs:
    """Inputs that can only be passed on: each is an object of its own, which no operation but the right one takes."""
    names = ("token_ids", "positions", "cache_slots", "query_starts", "kv_lengths", "block_tables", "sampled")
    stand_ins = {name: cast(torch.Tensor, _Input(name)) for name in names}
    return StepInputs(**stand_ins)


class _Input:
    """Stands for one of the step's inputs while a program is recorded."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name

    def __bool__(self) -> bool:
        raise TypeError(f"{self._name} is not known when a program is recorded")


def _check_value(value: Value, width: int | None) -> None:
    if not isinstance(value, Value):
        raise _refused(f"an operation on {_name(value)}, which no operation computed")
    if width is not None and value.width != width:
        raise _refused(f"an operation on {value.width} columns that takes {width}")


def _check_weight(weight: torch.Tensor, shape: tuple[int | None, ...]) -> None:
    """Refuses a weight that is not float32, contiguous and of the shape (None: any size)."""
    matches = weight.dim() == len(shape) and all(want in (None, have) for want, have in zip(shape, weight.shape, strict=True))
    if not matches or weight.dtype is not torch.float32 or not weight.is_contiguous() or weight.device.type != "cpu":
        raise _refused(f"a weight of shape {tuple(weight.shape)}, type {weight.dtype} or layout where {shape} is wanted")


def _name(value: object) -> str:
    return repr(value) if isinstance(value, (_Input, Value)) else f"a {type(value).__name__}"


def _refused(what: str) -> TokenloomError:
    text = f"the CPU executor cannot record {what}; --kernels reference runs the model without a program"
    return TokenloomError(ErrorCode.UNSUPPORTED, text)
