import sqlite3

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.telemetry.trace_store import StoredEvent, StoredSpan, TraceReader, TraceStore, TraceStoreError


def span(trace=1, number=1, parent=0, start=10, end=20, **fields):
    parent_id = f"{parent:016x}" if parent else ""
    defaults = {"name": "stage", "service": "tokenloom-gateway"}
    return StoredSpan(f"{trace:032x}", f"{number:016x}", parent_id, start_ns=start, end_ns=end, **{**defaults, **fields})


@pytest.fixture
def path(tmp_path):
    return tmp_path / "traces.db"


@pytest.fixture
def store(path):
    store = TraceStore(path, max_traces=3)
    yield store
    store.close()


@pytest.fixture
def reader(store, path):
    reader = TraceReader(path)
    yield reader
    reader.close()


JSON_VALUES = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False) | st.text()
ATTRIBUTES = st.dictionaries(st.text(), JSON_VALUES | st.lists(st.text()), max_size=4)


@given(
    ATTRIBUTES,
    st.lists(st.builds(StoredEvent, name=st.text(), unix_ns=st.integers(0, 2**63 - 1), attributes=ATTRIBUTES), max_size=3),
    st.none() | st.text(),
)
def test_a_span_survives_its_json(attributes, events, error):
    stored = span(attributes=attributes, events=tuple(events), error=error, instance="gateway-0")
    assert StoredSpan.from_json(stored.to_json()) == stored


def test_spans_come_back_by_start_whatever_the_order_of_arrival(store, reader):
    spans = [span(number=2, start=30), span(number=1, start=10), span(number=3, start=20)]
    store.add(spans[:1])
    store.add(spans[1:])
    assert reader.spans(spans[0].trace_id) == [spans[1], spans[2], spans[0]]


def test_a_span_that_is_exported_twice_is_stored_once(store, reader):
    store.add([span(), span()])
    store.add([span()])
    assert len(reader.spans(span().trace_id)) == 1


@pytest.mark.parametrize("attribute", ["tokenloom.request_id", "tokenloom.x_request_id", "gen_ai.response.id"])
def test_a_trace_is_found_by_every_name_of_its_request(store, reader, attribute):
    store.add([span(attributes={attribute: "chatcmpl-7"}), span(number=2, parent=1)])
    assert reader.find("chatcmpl-7") == [span().trace_id]


def test_a_trace_is_found_by_its_own_id_in_any_spelling(store, reader):
    store.add([span(trace=0xABC)])
    plain = f"{0xABC:032x}"
    assert reader.find(plain) == reader.find(plain.upper()) == [plain]
    assert reader.find("f" * 32) == []


def test_an_id_that_a_client_used_twice_finds_the_newest_trace_first(store, reader):
    for trace in (1, 2):
        store.add([span(trace=trace, attributes={"tokenloom.x_request_id": "again"})])
    assert reader.find("again") == [f"{2:032x}", f"{1:032x}"]


def test_beyond_the_bound_the_oldest_traces_go_with_all_that_names_them(store, reader):
    for trace in range(1, 6):
        store.add([span(trace=trace, attributes={"tokenloom.request_id": f"r{trace}"})])
    assert [bool(reader.find(f"r{trace}")) for trace in range(1, 6)] == [False, False, True, True, True]
    assert reader.spans(f"{1:032x}") == []
    assert reader.latest(10) == [f"{trace:032x}" for trace in (5, 4, 3)]


def test_the_bound_on_bytes_keeps_at_least_the_newest_trace(path):
    store = TraceStore(path, max_bytes=100)
    for trace in (1, 2):
        store.add([span(trace=trace, attributes={"long": "x" * 1000})])
    store.close()
    reader = TraceReader(path)
    assert reader.latest(10) == [f"{2:032x}"]
    reader.close()


def test_traces_outlive_the_process_that_wrote_them(path):
    first = TraceStore(path)
    first.add([span()])
    first.close()
    second = TraceStore(path)
    second.add([span(trace=2)])
    second.close()
    reader = TraceReader(path)
    assert len(reader.latest(10)) == 2
    reader.close()


def test_a_failed_write_leaves_the_store_as_it_was(store, reader, path):
    store.add([span()])
    other = sqlite3.connect(path)
    other.execute("CREATE TRIGGER full BEFORE INSERT ON spans BEGIN SELECT RAISE(FAIL, 'disk full'); END")
    with pytest.raises(TraceStoreError, match="disk full"):
        store.add([span(trace=2)])
    other.execute("DROP TRIGGER full")
    other.close()
    assert reader.latest(10) == [span().trace_id]
    store.add([span(trace=3)])
    assert len(reader.latest(10)) == 2


def test_a_file_that_is_no_store_is_said_to_be_none(path):
    path.write_bytes(b"something else" * 1000)
    with pytest.raises(TraceStoreError):
        TraceStore(path)


def test_reading_a_store_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(TraceStoreError, match="missing"):
        TraceReader(tmp_path / "missing.db")
