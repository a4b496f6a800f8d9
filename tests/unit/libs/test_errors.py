import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.errors import ErrorCode, TokenloomError

ROWS = list(ErrorCode)


def test_numbers_and_labels_name_one_error_each():
    assert len({row.spec.code for row in ROWS}) == len(ROWS)
    assert len({row.spec.label for row in ROWS}) == len(ROWS)


def test_numbers_stay_what_they_are_because_other_releases_know_them():
    known = {"INVALID_REQUEST": 100, "PROMPT_TOO_LONG": 101, "OVER_WINDOW": 200, "UNAVAILABLE": 300, "DEADLINE_EXCEEDED": 400}
    known |= {"CANCELLED": 401, "INTERNAL": 500, "PROTOCOL_VERSION": 600, "STALE_BATCH": 605}
    assert {name: ErrorCode[name].spec.code for name in known} == known


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_group_of_a_number_decides_its_http_class(row):
    group = row.spec.code // 100
    allowed = {1: range(400, 416), 2: range(429, 430), 3: range(503, 504), 4: (499, 504), 5: (400, 422, 500), 6: range(500, 501)}
    assert row.spec.http_status in allowed[group]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_no_row_travels_as_ok_or_unknown(row):
    assert row.spec.grpc_status not in (grpc.StatusCode.OK, grpc.StatusCode.UNKNOWN)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_what_a_client_may_retry_is_what_http_calls_retryable(row):
    assert row.spec.retryable == (row.spec.http_status in (429, 503))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_row_is_found_by_its_number(row):
    assert ErrorCode.from_number(row.spec.code) is row


@pytest.mark.parametrize("number", [0, 1, 99, 999, 2**31 - 1])
def test_a_number_of_a_later_release_is_internal(number):
    assert ErrorCode.from_number(number) is ErrorCode.INTERNAL


@given(
    st.sampled_from(ROWS),
    st.text(),
    st.none() | st.text(),
    st.none() | st.integers(min_value=0, max_value=2**32 - 1),
)
def test_an_error_arrives_as_it_left(code, message, param, retry_after_ms):
    sent = TokenloomError(code, message, param=param, retry_after_ms=retry_after_ms)
    arrived = TokenloomError.from_proto(sent.to_proto())
    assert (arrived.code, arrived.message, arrived.param, arrived.retry_after_ms) == (code, message, param, retry_after_ms)
    assert str(arrived) == message
