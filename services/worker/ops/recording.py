"""A model's operations as data: what a recording of its `forward` consists of, before it knows any memory or machine.

Value         a row of `width` floats for each token of the step (or for each sampled one)
Instruction   one operation: what it reads and writes, its weights, its constants
Recording     the instructions in order, and which value is the result
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import torch

from services.worker.ops.base import HeadShape, LayerCache


class Rows(enum.IntEnum):
    """What a value has one row for."""

    TOKENS = 0
    SAMPLED = 1


class Kind(enum.IntEnum):
    """Operations that a program consists of; the numbers are those of kernels/cpu/program.h."""

    EMBEDDING = 0
    GATHER = 1
    LINEAR = 2
    NORM = 3
    ROPE_CACHE = 4
    ATTENTION = 5
    QUANTIZE = 6
    INTEGER_LINEAR = 7


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """A stand-in for a tensor of float32 [rows, width] that exists only while a program runs. Equal to itself alone.

    What QUANTIZE writes counts as floats too: it takes the memory of `width` of them.
    """

    rows: Rows
    width: int

    def __bool__(self) -> bool:
        raise TypeError("a value of a program is not known when it is recorded")


@dataclass(frozen=True, slots=True, eq=False)
class Instruction:
    """One operation. `source` is what it reads (an embedding reads the step's token ids alone), `to` what it writes.

    residual         what is added to a product; None without
    gated            a product of gates and what they gate, half as wide as its weight
    weight, bias     packed panels and bias of a product, table of an embedding, weight of a norm, rotations; None without
    cache, heads     of attention and of the rotation that precedes it; None elsewhere
    format           of a product of integers: its weight's layout, a number of kernels.h's IntegerFormat
    number           epsilon of a norm, scale of attention
    """

    kind: Kind
    to: Value
    source: Value | None = None
    residual: Value | None = None
    gated: bool = False
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    cache: LayerCache | None = None
    heads: HeadShape | None = None
    format: int = 0
    number: float = 0.0

    @property
    def reads(self) -> tuple[Value, ...]:
        """Values it needs."""
        return tuple(value for value in (self.source, self.residual) if value is not None)

    @property
    def writes(self) -> tuple[Value, ...]:
        """Values it makes."""
        return (self.to,)


@dataclass(slots=True)
class Recording:
    """Instructions in the order in which they run, and all values that they make."""

    instructions: list[Instruction] = field(default_factory=list)
    made: set[Value] = field(default_factory=set)

    def add(self, instruction: Instruction) -> Value:
        """Appends an instruction whose reads are all `made`; returns what it writes."""
        self.instructions.append(instruction)
        self.made.update(instruction.writes)
        return instruction.to
