"""The one error table: what can go wrong, and what each protocol calls it.

Every error that crosses a process or reaches a client is one row of `ErrorCode`. The rest derives from it: the gRPC status
of unary calls, the HTTP status and OpenAI `type` at the gateway, the `reason` label of metrics, whether the same call may
be tried again (`retryable`), and whether the request itself survives by moving to another process (`migratable`).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import grpc

from tokenloom.common.v1 import common_pb2


@dataclass(frozen=True, slots=True)
class ErrorSpec:
    """One row of the table; `code` is stable and what travels (common.v1.Error.code)."""

    code: int
    grpc_status: grpc.StatusCode
    http_status: int
    label: str
    retryable: bool = False
    migratable: bool = False


_S = grpc.StatusCode


class ErrorCode(enum.Enum):
    """All errors, grouped by hundreds: 1 the request, 2 limits, 3 availability, 4 ends asked for, 5 execution, 6 protocol."""

    INVALID_REQUEST = ErrorSpec(100, _S.INVALID_ARGUMENT, 400, "invalid_request")
    PROMPT_TOO_LONG = ErrorSpec(101, _S.INVALID_ARGUMENT, 400, "prompt_too_long")
    EMPTY_PROMPT = ErrorSpec(102, _S.INVALID_ARGUMENT, 400, "empty_prompt")
    UNSUPPORTED = ErrorSpec(103, _S.UNIMPLEMENTED, 400, "unsupported")
    MALFORMED_JSON = ErrorSpec(104, _S.INVALID_ARGUMENT, 400, "malformed_json")
    MODEL_NOT_FOUND = ErrorSpec(105, _S.NOT_FOUND, 404, "model_not_found")
    UNAUTHORIZED = ErrorSpec(106, _S.UNAUTHENTICATED, 401, "unauthorized")
    BODY_TOO_LARGE = ErrorSpec(107, _S.INVALID_ARGUMENT, 413, "body_too_large")
    TEMPLATE_ERROR = ErrorSpec(108, _S.INVALID_ARGUMENT, 400, "template_error")
    NOT_FOUND = ErrorSpec(109, _S.NOT_FOUND, 404, "not_found")
    METHOD_NOT_ALLOWED = ErrorSpec(110, _S.UNIMPLEMENTED, 405, "method_not_allowed")
    UNSUPPORTED_MEDIA_TYPE = ErrorSpec(111, _S.INVALID_ARGUMENT, 415, "unsupported_media_type")
    INVALID_CONSTRAINT = ErrorSpec(112, _S.INVALID_ARGUMENT, 400, "invalid_constraint")

    OVER_WINDOW = ErrorSpec(200, _S.RESOURCE_EXHAUSTED, 429, "over_window", retryable=True)
    QUEUE_FULL = ErrorSpec(201, _S.RESOURCE_EXHAUSTED, 429, "queue_full", retryable=True)
    TOKENIZER_BUSY = ErrorSpec(202, _S.RESOURCE_EXHAUSTED, 429, "tokenizer_busy", retryable=True)
    CONSTRAINT_BUSY = ErrorSpec(204, _S.RESOURCE_EXHAUSTED, 429, "constraint_busy", retryable=True)
    RATE_LIMITED = ErrorSpec(203, _S.RESOURCE_EXHAUSTED, 429, "rate_limit_exceeded", retryable=True)

    UNAVAILABLE = ErrorSpec(300, _S.UNAVAILABLE, 503, "unavailable", retryable=True, migratable=True)
    DRAINING = ErrorSpec(301, _S.UNAVAILABLE, 503, "draining", retryable=True)
    NO_WORKER = ErrorSpec(302, _S.UNAVAILABLE, 503, "no_worker", retryable=True)
    TOKENIZER_UNAVAILABLE = ErrorSpec(303, _S.UNAVAILABLE, 503, "tokenizer_unavailable", retryable=True)
    SCHEDULER_UNAVAILABLE = ErrorSpec(304, _S.UNAVAILABLE, 503, "scheduler_unavailable", retryable=True, migratable=True)
    SESSION_LOST = ErrorSpec(305, _S.UNAVAILABLE, 503, "session_lost", retryable=True, migratable=True)
    STORE_UNAVAILABLE = ErrorSpec(306, _S.UNAVAILABLE, 503, "store_unavailable", retryable=True)

    DEADLINE_EXCEEDED = ErrorSpec(400, _S.DEADLINE_EXCEEDED, 504, "deadline_exceeded")
    CANCELLED = ErrorSpec(401, _S.CANCELLED, 499, "cancelled")

    INTERNAL = ErrorSpec(500, _S.INTERNAL, 500, "internal")
    POISON_REQUEST = ErrorSpec(501, _S.INTERNAL, 500, "poison_request")
    NON_FINITE = ErrorSpec(502, _S.INTERNAL, 500, "non_finite")
    DEAD_END = ErrorSpec(503, _S.FAILED_PRECONDITION, 422, "constraint_dead_end")
    CANNOT_FIT = ErrorSpec(504, _S.INVALID_ARGUMENT, 400, "cannot_fit")
    OUT_OF_MEMORY = ErrorSpec(506, _S.RESOURCE_EXHAUSTED, 500, "out_of_memory", migratable=True)
    STEP_FAILED = ErrorSpec(505, _S.INTERNAL, 500, "step_failed", migratable=True)

    PROTOCOL_VERSION = ErrorSpec(600, _S.FAILED_PRECONDITION, 500, "protocol_version")
    STALE_FENCING_TOKEN = ErrorSpec(601, _S.FAILED_PRECONDITION, 500, "stale_fencing_token")
    FINGERPRINT_MISMATCH = ErrorSpec(602, _S.FAILED_PRECONDITION, 500, "fingerprint_mismatch")
    WRONG_SHARD = ErrorSpec(603, _S.FAILED_PRECONDITION, 500, "wrong_shard")
    PROTOCOL_VIOLATION = ErrorSpec(604, _S.FAILED_PRECONDITION, 500, "protocol_violation")
    STALE_BATCH = ErrorSpec(605, _S.ABORTED, 500, "stale_batch", migratable=True)

    @property
    def spec(self) -> ErrorSpec:
        """The row itself."""
        return self.value

    @classmethod
    def from_number(cls, code: int) -> ErrorCode:
        """The error of a number from the wire; one this version does not know is INTERNAL."""
        return _BY_NUMBER.get(code, cls.INTERNAL)


_BY_NUMBER = {member.value.code: member for member in ErrorCode}


# Bytes of UTF-8 that an error's sentence and its parameter's name may have: it travels in gRPC's trailers, of which 8 KiB are safe.
MAX_MESSAGE_BYTES = 2048
MAX_PARAM_BYTES = 256


def _presentable(text: str, limit: int) -> str:
    """The text without halves of characters (a template, or a client's JSON, may make them), cut to `limit` bytes."""
    data = text.encode("utf-8", "replace")
    return data.decode() if len(data) <= limit else data[: limit - 3].decode("utf-8", "ignore") + "…"


class TokenloomError(Exception):
    """An error of the table on its way to a client or another service.

    `param` names the request parameter at fault in the API's spelling; `retry_after_ms` is what a client should wait. What quotes a client
    may be of any length: the sentence is cut at MAX_MESSAGE_BYTES, the name at MAX_PARAM_BYTES.
    """

    def __init__(self, code: ErrorCode, message: str, *, param: str | None = None, retry_after_ms: int | None = None) -> None:
        self.message = _presentable(message, MAX_MESSAGE_BYTES)
        super().__init__(self.message)
        self.code = code
        self.param = None if param is None else _presentable(param, MAX_PARAM_BYTES)
        self.retry_after_ms = retry_after_ms

    def to_proto(self) -> common_pb2.Error:
        """The error as it travels."""
        return common_pb2.Error(code=self.code.spec.code, message=self.message, param=self.param, retry_after_ms=self.retry_after_ms)

    @classmethod
    def from_proto(cls, error: common_pb2.Error) -> TokenloomError:
        """The error as it arrived."""
        return cls(
            ErrorCode.from_number(error.code),
            error.message,
            param=error.param if error.HasField("param") else None,
            retry_after_ms=error.retry_after_ms if error.HasField("retry_after_ms") else None,
        )
