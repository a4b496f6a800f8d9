"""The C++ library as Python sees it: teams of threads, and programs that they run. ctypes lets go of the interpreter's lock during a call.

Whoever holds an address owns what lies there: a Program keeps its team, its library and every tensor that its instructions point at.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from libs.errors import ErrorCode, TokenloomError
from services.worker.ops.base import MOST_AGAIN, StepInputs
from services.worker.ops.places import Plan, plan_places
from services.worker.ops.recording import Instruction, Kind, Recording, Rows, Value
from services.worker.sampling.picking import Bools, Picked, PickRows

# Forces a variant ("avx512vnni", "avx512", "avx2", "generic"); for tests and for comparing machines.
VARIANT_ENV = "TOKENLOOM_CPU_ISA"
_NO_PLACE = -1
_DONE, _NO_MEMORY = 0, 1


class _Instruction(ctypes.Structure):
    """Mirrors Instruction of program.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("weight", "bias", "keys", "values")),
        ("block_stride", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("kind", "sampled", "source", "residual", "to", "gated", "inputs", "outputs", "bound")),
        *((name, ctypes.c_int32) for name in ("blocks", "query_heads", "kv_heads", "head_dim", "format")),
        ("number", ctypes.c_float),
    ]


class _Place(ctypes.Structure):
    """Mirrors Place of program.h."""

    _fields_ = [("width", ctypes.c_int32), ("sampled", ctypes.c_int32)]


class _StepInputs(ctypes.Structure):
    """Mirrors StepInputs of program.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("token_ids", "positions", "cache_slots", "query_starts", "kv_lengths", "tables")),
        *((name, ctypes.c_void_p) for name in ("picked", "out")),
        *((name, ctypes.c_int32) for name in ("tokens", "rows", "sampled_tokens", "table_width")),
    ]


class _Pick(ctypes.Structure):
    """Mirrors Pick of kernels.h."""

    _fields_ = [
        ("logits", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("vocabulary", ctypes.c_int32),
        ("rows", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in ("temperature", "top_p", "min_p", "uniforms", "top_k", "sound", "tokens", "finite")),
    ]


class CpuLibrary:
    """The loaded library; `variant` names the instruction set that was chosen."""

    def __init__(self, path: Path, variant: str | None = None) -> None:
        """Loads `path` and takes `variant` (default: VARIANT_ENV, else the best this CPU has). Raises TokenloomError(UNSUPPORTED)."""
        self.calls = ctypes.CDLL(str(path))
        for name in ("tokenloom_variant", "tokenloom_team_create", "tokenloom_program_create", "tokenloom_sampler_create"):
            getattr(self.calls, name).restype = ctypes.c_void_p
        self.calls.tokenloom_variant_name.restype = ctypes.c_char_p
        wanted = os.environ.get(VARIANT_ENV, "") if variant is None else variant
        self.handle = ctypes.c_void_p(self.calls.tokenloom_variant(wanted.encode()))
        if not self.handle:
            raise TokenloomError(ErrorCode.UNSUPPORTED, f"this CPU or build has no kernels for {wanted}")
        self.variant: str = self.calls.tokenloom_variant_name(self.handle).decode()


class Team:
    """`size` threads that compute a step together, the caller's among them; the others sleep between steps.

    They end with the object. At the end of the process they are left alone: they hold nothing that must be put in order.
    """

    def __init__(self, library: CpuLibrary, size: int, cores: Sequence[int] = ()) -> None:
        """Starts the threads. `cores`: CPU numbers, one a member, that they keep to; empty: they go where the system puts them.

        Raises TokenloomError(CANNOT_FIT) when the system gives no more threads.
        """
        self.size = size
        self._calls, self._cores = library.calls, tuple(cores)
        numbers = (ctypes.c_int32 * size)(*cores) if cores else None
        self.handle = ctypes.c_void_p(library.calls.tokenloom_team_create(size, numbers))
        if not self.handle:
            raise TokenloomError(ErrorCode.CANNOT_FIT, f"the system gives no {size} threads: lower --threads")
        weakref.finalize(self, library.calls.tokenloom_team_destroy, self.handle).atexit = False

    def settle(self) -> None:
        """The calling thread will run the steps, as member 0: it keeps to that member's core, if members have cores of their own."""
        if self._cores:
            self._calls.tokenloom_settle(self._cores[0])


class Program:
    """A recorded model: a function from a step's inputs to its result, float32 [rows, width]. For one thread at a time."""

    def __init__(self, library: CpuLibrary, team: Team, recording: Recording, result: Value, max_tokens: int) -> None:
        """Lays the values out and hands all over to the library. Raises MemoryError."""
        plan = plan_places(recording.instructions, result)
        self._has_run, self._repeats = False, _ends_with_picked_tokens(recording.instructions)
        # What the instructions' addresses point at, and what must not end before the program does.
        self._owned = (library, team, tuple(recording.instructions))
        self._team = team
        self._calls = library.calls
        self._max_tokens = max_tokens
        self._result = result
        self._out = torch.empty(0, result.width)
        instructions = (_Instruction * len(recording.instructions))(*(_mirror(item, plan) for item in recording.instructions))
        places = (_Place * len(plan.places))(*(_Place(place.width, place.rows) for place in plan.places))
        self._handle = ctypes.c_void_p(
            library.calls.tokenloom_program_create(library.handle, team.handle, instructions, len(instructions), places, len(places))
        )
        if not self._handle:
            raise MemoryError("no memory for a program")
        # With the team as an argument, so that it ends after the program.
        weakref.finalize(self, _destroy, library, team, self._handle).atexit = False

    def __call__(self, inputs: StepInputs) -> torch.Tensor:
        """Runs one step; the result is valid until the next. Raises MemoryError, and ValueError for inputs that cannot be."""
        tokens, rows, picked = inputs.token_ids.shape[0], inputs.kv_lengths.shape[0], inputs.sampled.shape[0]
        if tokens > self._max_tokens:
            raise ValueError(f"a step of {tokens} tokens; the program takes {self._max_tokens}")
        out = self._output(picked if self._result.rows is Rows.SAMPLED else tokens)
        step = _StepInputs(
            _at(inputs.token_ids, torch.int64, (tokens,)),
            _at(inputs.positions, torch.int64, (tokens,)),
            _at(inputs.cache_slots, torch.int64, (tokens,)),
            _at(inputs.query_starts, torch.int32, (rows + 1,)),
            _at(inputs.kv_lengths, torch.int32, (rows,)),
            _at(inputs.block_tables, torch.int32, (rows, inputs.block_tables.shape[1])),
            _at(inputs.sampled, torch.int64, (picked,)),
            out.data_ptr(),
            tokens,
            rows,
            picked,
            inputs.block_tables.shape[1],
        )
        fault = ctypes.c_char_p()
        self._has_run = False
        outcome = self._calls.tokenloom_program_run(self._handle, ctypes.byref(step), ctypes.byref(fault))
        if outcome == _NO_MEMORY:
            raise MemoryError(f"no memory for the activations of {tokens} tokens")
        if outcome != _DONE:
            raise ValueError(f"the step's inputs cannot be: {(fault.value or b'').decode()}")
        self._has_run = True
        return out

    def settle(self) -> None:
        """See Step."""
        self._team.settle()

    def again(self, picked: torch.Tensor) -> torch.Tensor:
        """The result for other tokens of the step that ran last (int64 [S]; see Step): what follows their picking runs once more.

        Raises ValueError for tokens that were not in it, for too many, and where the result is not one row for each picked token;
        MemoryError.
        """
        if not self._has_run or not self._repeats:
            raise ValueError("no step has run, or its last operations are not those of picked tokens alone")
        count = picked.shape[0]
        if count > MOST_AGAIN:
            raise ValueError(f"{count} tokens are picked again; {MOST_AGAIN} are taken at once")
        out, fault = self._output(count), ctypes.c_char_p()
        at = ctypes.c_void_p(_at(picked, torch.int64, (count,)))
        outcome = self._calls.tokenloom_program_again(self._handle, at, count, ctypes.c_void_p(out.data_ptr()), ctypes.byref(fault))
        if outcome == _NO_MEMORY:
            raise MemoryError(f"no memory for {count} tokens picked again")
        if outcome != _DONE:
            raise ValueError(f"these tokens cannot be picked: {(fault.value or b'').decode()}")
        return out

    def start_timing(self) -> None:
        """Notes, from now on, how long each kind of instruction takes the calling thread, waiting for the others included."""
        self._calls.tokenloom_program_start_timing(self._handle)

    def timing(self) -> dict[Kind, int]:
        """Nanoseconds by kind since `start_timing`."""
        nanoseconds = (ctypes.c_int64 * len(Kind))()
        self._calls.tokenloom_program_timing(self._handle, nanoseconds)
        return dict(zip(Kind, nanoseconds, strict=True))

    def _output(self, rows: int) -> torch.Tensor:
        """Memory for `rows` rows of the result: the same in each step, for fresh pages cost more than a small step's head."""
        if rows > self._out.shape[0]:
            self._out = torch.empty(rows, self._result.width)
        return self._out[:rows]


def _ends_with_picked_tokens(instructions: Sequence[Instruction]) -> bool:
    """Whether picked tokens, once there are some, are all that is computed: then what they are picked from stays where it is."""
    rows = [item.to.rows for item in instructions]
    picked = rows.index(Rows.SAMPLED) if Rows.SAMPLED in rows else len(rows)
    return picked < len(rows) and all(kind is Rows.SAMPLED for kind in rows[picked:])


def _destroy(library: CpuLibrary, team: Team, handle: ctypes.c_void_p) -> None:
    library.calls.tokenloom_program_destroy(handle)


def _mirror(item: Instruction, plan: Plan) -> _Instruction:
    def place(value: Value | None) -> int:
        return _NO_PLACE if value is None else plan.place_of[value]

    def address(tensor: torch.Tensor | None) -> int | None:
        return None if tensor is None else tensor.data_ptr()

    cache, heads = item.cache, item.heads
    return _Instruction(
        address(item.weight),
        address(item.bias),
        address(None if cache is None else cache.keys),
        address(None if cache is None else cache.values),
        0 if cache is None else cache.keys.stride(0),
        item.kind,
        item.to.rows,
        place(item.source),
        place(item.residual),
        place(item.to),
        item.gated,
        0 if item.source is None else item.source.width,
        item.to.width,
        0 if item.weight is None else item.weight.shape[0],
        0 if cache is None else cache.keys.shape[0],
        0 if heads is None else heads.query_heads,
        0 if heads is None else heads.kv_heads,
        0 if heads is None else heads.head_dim,
        item.format,
        item.number,
    )


def _at(tensor: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> int:
    """The tensor's address. Raises ValueError when it is not what the library reads there."""
    if tensor.dtype is not dtype or tensor.shape != tuple(shape) or not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(f"an input of type {tensor.dtype} and shape {tuple(tensor.shape)} where {dtype} {tuple(shape)} is wanted")
    return tensor.data_ptr()


class Sampler:
    """Takes a token from each row of a step's logits, the rows shared out among a team: see sampling.picking.Picker. For one thread."""

    def __init__(self, library: CpuLibrary, team: Team) -> None:
        """Raises MemoryError."""
        self._owned, self._calls = (library, team), library.calls
        self._handle = ctypes.c_void_p(library.calls.tokenloom_sampler_create(library.handle, team.handle))
        if not self._handle:
            raise MemoryError("no memory for a sampler")
        weakref.finalize(self, _destroy_sampler, library, team, self._handle).atexit = False

    def __call__(self, logits: torch.Tensor, rows: PickRows, sound: Bools | None = None) -> Picked:
        """See Picker. Raises MemoryError."""
        count, vocabulary = logits.shape
        if logits.dtype is not torch.float32 or (count and logits.stride(1) != 1):
            raise ValueError(f"logits of type {logits.dtype} or layout {logits.stride()}")
        picked = Picked(np.empty(count, np.int64), np.empty(count, np.bool_))
        addresses = (
            *(_of(column, np.float64, count) for column in (rows.temperature, rows.top_p, rows.min_p, rows.uniforms)),
            _of(rows.top_k, np.int64, count),
            None if sound is None else _of(sound, np.bool_, count),
            _of(picked.tokens, np.int64, count),
            _of(picked.finite, np.bool_, count),
        )
        pick = _Pick(logits.data_ptr(), logits.stride(0), vocabulary, count, *addresses)
        if self._calls.tokenloom_sampler_run(self._handle, ctypes.byref(pick)) == _NO_MEMORY:
            raise MemoryError(f"no memory to draw from {vocabulary} ids")
        return picked


def _of(column: npt.NDArray[Any], dtype: type[np.generic], count: int) -> int:
    """The address of a column of `count` entries. Raises ValueError for another type, length or layout."""
    if column.dtype != dtype or column.shape != (count,) or not column.flags.c_contiguous:
        raise ValueError(f"a column of type {column.dtype} and shape {column.shape} where {count} of {np.dtype(dtype)} are wanted")
    return int(column.ctypes.data)


def _destroy_sampler(library: CpuLibrary, team: Team, handle: ctypes.c_void_p) -> None:
    """`team` is an argument so that it is there until the sampler is gone."""
    library.calls.tokenloom_sampler_destroy(handle)
