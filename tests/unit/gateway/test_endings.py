"""Every kind of ending has one meaning for the client and one label."""

from __future__ import annotations

import pytest

from libs.errors import ErrorCode, TokenloomError
from services.gateway.endings import error_of_ending, finish_reason, label_of, stop_reason
from tokenloom.common.v1 import common_pb2
from tokenloom.scheduler.v1 import scheduler_pb2


@pytest.mark.parametrize(
    ("reason", "name"),
    [
        (common_pb2.FINISH_REASON_STOP, "stop"),
        (common_pb2.FINISH_REASON_LENGTH, "length"),
        (common_pb2.FINISH_REASON_CONSTRAINT_COMPLETE, "stop"),
    ],
)
def test_what_finished_has_openais_reason_and_no_error(reason, name):
    ending = scheduler_pb2.Ending(reason=reason)
    assert (finish_reason(ending), error_of_ending(ending), label_of(ending)) == (name, None, name)


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        (common_pb2.CANCEL_REASON_CLIENT_DISCONNECTED, ErrorCode.CANCELLED),
        (common_pb2.CANCEL_REASON_SLOW_READER, ErrorCode.CANCELLED),
        (common_pb2.CANCEL_REASON_TIMEOUT, ErrorCode.DEADLINE_EXCEEDED),
        (common_pb2.CANCEL_REASON_SESSION_LOST, ErrorCode.SESSION_LOST),
        (common_pb2.CANCEL_REASON_SHUTDOWN, ErrorCode.DRAINING),
        (common_pb2.CANCEL_REASON_SIBLING_FAILED, ErrorCode.CANCELLED),
        (common_pb2.CANCEL_REASON_UNSPECIFIED, ErrorCode.CANCELLED),
    ],
)
def test_every_cancellation_is_an_error_that_says_who(reason, code):
    ending = scheduler_pb2.Ending(reason=common_pb2.FINISH_REASON_CANCELLED, cancel_reason=reason)
    assert finish_reason(ending) is None
    assert error_of_ending(ending).code is code
    assert label_of(ending) == common_pb2.CancelReason.Name(reason).removeprefix("CANCEL_REASON_").lower()


def test_a_deadline_is_a_504():
    ending = scheduler_pb2.Ending(reason=common_pb2.FINISH_REASON_DEADLINE)
    assert error_of_ending(ending).code is ErrorCode.DEADLINE_EXCEEDED
    assert label_of(ending) == "deadline"


def test_a_failure_keeps_its_error():
    error = TokenloomError(ErrorCode.NON_FINITE, "nan").to_proto()
    ending = scheduler_pb2.Ending(reason=common_pb2.FINISH_REASON_FAILED, error=error)
    assert (error_of_ending(ending).code, error_of_ending(ending).message, label_of(ending)) == (ErrorCode.NON_FINITE, "nan", "non_finite")


def test_a_failure_without_an_error_is_internal():
    assert error_of_ending(scheduler_pb2.Ending(reason=common_pb2.FINISH_REASON_FAILED)).code is ErrorCode.INTERNAL


def test_every_reason_of_the_contract_is_an_error_or_a_finish():
    for reason in common_pb2.FinishReason.values():
        ending = scheduler_pb2.Ending(reason=reason)
        assert (finish_reason(ending) is None) == (error_of_ending(ending) is not None)
        assert label_of(ending)


@pytest.mark.parametrize(("fields", "expected"), [({"stop_string": "x"}, "x"), ({"stop_token": 0}, 0), ({}, None)])
def test_stop_reason_is_what_the_contract_names(fields, expected):
    assert stop_reason(scheduler_pb2.Ending(**fields)) == expected
