"""What an ending means to the client: a finish reason, or an error."""

from __future__ import annotations

from libs.errors import ErrorCode, TokenloomError
from services.gateway.tickets import CancelReason, FinishReason
from tokenloom.scheduler.v1 import scheduler_pb2

_FINISHED = {
    FinishReason.FINISH_REASON_STOP: "stop",
    FinishReason.FINISH_REASON_LENGTH: "length",
    FinishReason.FINISH_REASON_CONSTRAINT_COMPLETE: "stop",
}
_CANCELLED = {
    CancelReason.CANCEL_REASON_CLIENT_DISCONNECTED: (ErrorCode.CANCELLED, "The client closed its connection"),
    CancelReason.CANCEL_REASON_SLOW_READER: (ErrorCode.CANCELLED, "The client read too slowly"),
    CancelReason.CANCEL_REASON_TIMEOUT: (ErrorCode.DEADLINE_EXCEEDED, "The request's timeout passed"),
    CancelReason.CANCEL_REASON_SESSION_LOST: (ErrorCode.SESSION_LOST, "The connection to the scheduler was lost"),
    CancelReason.CANCEL_REASON_SHUTDOWN: (ErrorCode.DRAINING, "The server is shutting down"),
    CancelReason.CANCEL_REASON_SIBLING_FAILED: (ErrorCode.CANCELLED, "Another part of the request failed"),
}


def finish_reason(ending: scheduler_pb2.Ending) -> str | None:
    """OpenAI's name of an ending; None when it is an error."""
    return _FINISHED.get(ending.reason)


def stop_reason(ending: scheduler_pb2.Ending) -> str | int | None:
    """vLLM's `stop_reason`: the stop string or stop token that matched; None for the end of sequence and other endings."""
    kind = ending.WhichOneof("stop_reason")
    if kind == "stop_string":
        return ending.stop_string
    return ending.stop_token if kind == "stop_token" else None


def error_of_cancel(reason: CancelReason.ValueType) -> TokenloomError:
    """The error that a cancellation is to the client."""
    code, message = _CANCELLED.get(reason, (ErrorCode.CANCELLED, "The request was cancelled"))
    return TokenloomError(code, message)


def error_of_ending(ending: scheduler_pb2.Ending) -> TokenloomError | None:
    """The error that an ending is to the client; None when it finished."""
    if ending.reason in _FINISHED:
        return None
    if ending.HasField("error"):
        return TokenloomError.from_proto(ending.error)
    if ending.reason == FinishReason.FINISH_REASON_DEADLINE:
        return error_of_cancel(CancelReason.CANCEL_REASON_TIMEOUT)
    if ending.reason == FinishReason.FINISH_REASON_CANCELLED:
        return error_of_cancel(ending.cancel_reason)
    return TokenloomError(ErrorCode.INTERNAL, "The request could not be finished")


def label_of(ending: scheduler_pb2.Ending) -> str:
    """The metric label of an ending: a finish reason, a cancel reason ("client_disconnected"), "deadline", or an error's label."""
    if ending.reason in _FINISHED:
        return _FINISHED[ending.reason]
    if ending.reason == FinishReason.FINISH_REASON_CANCELLED:
        return CancelReason.Name(ending.cancel_reason).removeprefix("CANCEL_REASON_").lower()
    if ending.reason == FinishReason.FINISH_REASON_DEADLINE:
        return "deadline"
    return ErrorCode.from_number(ending.error.code).spec.label
