"""Constraints on an output as all services speak them: understood by the gateway, carried by the scheduler, compiled by the worker."""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass, field

from libs.packing import pack_ids, unpack_ids
from tokenloom.common.v1 import common_pb2


class ConstraintKind(enum.Enum):
    """What the output must be; the values are the names of common.v1.Constraint's fields."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True, slots=True)
class Constraint:
    """See common.v1.Constraint. `texts`: the alternatives of CHOICE, else the one text of the schema, expression, grammar or tag
    (empty for JSON_OBJECT). `begin_after`: ids whose first occurrence in the output the constraint waits for.
    """

    kind: ConstraintKind
    texts: tuple[str, ...] = ()
    begin_after: tuple[int, ...] = ()
    compact: bool = False
    param: str = field(default="response_format", compare=False)

    @property
    def text(self) -> str:
        """The text of a kind that has one."""
        return self.texts[0]

    @property
    def key(self) -> bytes:
        """32 bytes, equal for what compiles to the same: neither what it begins after nor where the client wrote it matters."""
        parts = [self.kind.value, str(self.compact), *self.texts]
        return hashlib.sha256(b"".join(len(part := text.encode()).to_bytes(8, "little") + part for text in parts)).digest()

    def to_proto(self) -> common_pb2.Constraint:
        """As it travels."""
        message = common_pb2.Constraint(begin_after=pack_ids(self.begin_after), compact=self.compact, param=self.param)
        match self.kind:
            case ConstraintKind.JSON_SCHEMA:
                message.json_schema = self.text.encode()
            case ConstraintKind.JSON_OBJECT:
                message.json_object = True
            case ConstraintKind.REGEX:
                message.regex = self.text
            case ConstraintKind.CHOICE:
                message.choice.texts.extend(self.texts)
            case ConstraintKind.GRAMMAR:
                message.grammar = self.text
            case ConstraintKind.STRUCTURAL_TAG:
                message.structural_tag = self.text.encode()
        return message

    @classmethod
    def from_proto(cls, message: common_pb2.Constraint) -> Constraint:
        """As it arrived. Raises ValueError when no kind that this version knows is set, or its text is no UTF-8."""
        kind = ConstraintKind(message.WhichOneof("kind"))
        texts: tuple[str, ...]
        match kind:
            case ConstraintKind.CHOICE:
                texts = tuple(message.choice.texts)
            case ConstraintKind.JSON_OBJECT:
                texts = ()
            case ConstraintKind.REGEX:
                texts = (message.regex,)
            case ConstraintKind.GRAMMAR:
                texts = (message.grammar,)
            case ConstraintKind.JSON_SCHEMA:
                texts = (message.json_schema.decode(),)
            case ConstraintKind.STRUCTURAL_TAG:
                texts = (message.structural_tag.decode(),)
        return cls(kind, texts, tuple(unpack_ids(message.begin_after)), message.compact, message.param)
