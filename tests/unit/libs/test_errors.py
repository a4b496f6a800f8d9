import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.errors import MAX_MESSAGE_BYTES, MAX_PARAM_BYTES, ErrorCode, TokenloomError
from tokenloom.common.v1 import common_pb2

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


@given(
    st.text(alphabet=st.characters(exclude_categories=()), max_size=4000),
    st.text(alphabet=st.characters(exclude_categories=()), max_size=500),
)
def test_whatever_an_error_says_it_can_be_sent_and_fits_where_errors_travel(message, param):
    error = TokenloomError(ErrorCode.TEMPLATE_ERROR, message, param=param)
    arrived = TokenloomError.from_proto(common_pb2.Error.FromString(error.to_proto().SerializeToString()))
    assert (arrived.code, arrived.message, arrived.param) == (error.code, error.message, error.param)
    assert len(error.message.encode()) <= MAX_MESSAGE_BYTES
    assert len((error.param or "").encode()) <= MAX_PARAM_BYTES


def test_a_short_sentence_is_not_touched_and_a_long_one_shows_that_it_is_cut():
    assert TokenloomError(ErrorCode.INTERNAL, "é" * 1024).message == "é" * 1024
    assert TokenloomError(ErrorCode.INTERNAL, "é" * 1025).message == "é" * 1022 + "…"
