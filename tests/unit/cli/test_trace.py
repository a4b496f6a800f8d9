import io
import json
import time

import pytest
from rich.console import Console
from typer.testing import CliRunner

from cli import trace as trace_command
from cli.main import app
from cli.waterfall import duration, render
from libs.telemetry.trace_store import StoredEvent, StoredSpan, TraceReader, TraceStore

MS = 1_000_000


BASE = 1_700_000_000 * 10**9


def span(number, parent, name, service, start_ms, end_ms, base=BASE, **fields):
    ids = "a" * 32, f"{number:016x}", f"{parent:016x}" if parent else ""
    return StoredSpan(*ids, name, f"tokenloom-{service}", base + start_ms * MS, base + end_ms * MS, **fields)


def request(base=BASE):
    event = StoredEvent("preempted", base + 30 * MS, {"tokenloom.reason": "no_blocks"})
    return [
        span(1, 0, "POST /v1/chat/completions", "gateway", 0, 100, attributes={"gen_ai.response.id": "chatcmpl-1"}, base=base),
        span(2, 1, "tokenize", "gateway", 0, 10, base=base),
        span(3, 1, "decode", "scheduler", 20, 100, events=(event,), error="no worker", base=base),
    ]


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("TOKENLOOM_RUN_DIR", str(tmp_path))
    (tmp_path / "8000").mkdir()
    store = TraceStore(tmp_path / "8000" / "traces.db")
    yield store
    store.close()


def run(*args):
    return CliRunner().invoke(app, ["trace", *args])


def test_below_a_span_stands_what_tells_why_it_took_so_long():
    encode = "tokenloom.tokenizer.v1.TokenizerService/Encode"
    spans = [
        span(1, 0, "POST /v1/chat/completions", "gateway", 0, 100),
        span(
            2,
            1,
            encode,
            "gateway",
            0,
            1,
            attributes={"rpc.method": encode, "rpc.response.status_code": "UNAVAILABLE", "tokenloom.attempt": 0},
        ),
        span(3, 1, encode, "gateway", 1, 3, attributes={"rpc.method": encode, "rpc.response.status_code": "OK", "tokenloom.attempt": 1}),
        span(
            4, 1, "prefill", "scheduler", 3, 50, attributes={"tokenloom.cached_tokens": 272, "tokenloom.chunks": 2, "tokenloom.attempt": 0}
        ),
        span(5, 1, "decode", "scheduler", 50, 99, attributes={"tokenloom.preemptions": 0, "tokenloom.finish_reason": "stop"}),
    ]
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(render(spans, 140))
    lines = [" ".join(line.split()) for line in console.export_text().splitlines()]
    after = {lines[number]: lines[number + 1] for number in range(len(lines) - 1)}
    told = [after[line] for line in lines if line.startswith(("TokenizerService/Encode", "prefill", "decode"))]
    assert told == ["UNAVAILABLE", "attempt=1", "cached_tokens=272 chunks=2", "finish_reason=stop"]


def test_the_waterfall_shows_spans_gaps_shares_events_and_errors(store):
    store.add(request())
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(render(request(), 140))
    lines = [" ".join(line.split()) for line in console.export_text().splitlines()]
    assert lines[0] == f"trace {'a' * 32} 100.00 ms"
    assert lines[1] == "chatcmpl-1"
    assert any(line.startswith("POST /v1/chat/completions gateway 0 µs 100.00 ms 100.0% █") for line in lines)
    assert any(line.startswith("tokenize gateway 0 µs 10.00 ms 10.0%") for line in lines)
    assert any(line.startswith("(gap) 10.00 ms 10.00 ms 10.0%") for line in lines)
    assert any(line.startswith("error: no worker") for line in lines)
    assert any(line.startswith("· preempted 30.00 ms reason=no_blocks") for line in lines)


def choices():
    ids = ["a1:7", "a1:8"]
    return [
        span(1, 0, "POST /v1/completions", "gateway", 0, 100, attributes={"tokenloom.request_id": ids, "gen_ai.response.id": "cmpl-1"}),
        span(2, 1, "transport", "gateway", 0, 10, attributes={"tokenloom.choice": 1}),
        span(3, 1, "decode", "scheduler", 20, 100, attributes={"tokenloom.request_id": "a1:8"}),
        span(4, 3, "worker.decode", "worker", 20, 99, attributes={"tokenloom.request_id": "a1:8"}),
        span(5, 1, "decode", "scheduler", 20, 90, attributes={"tokenloom.request_id": "a1:7"}),
    ]


def test_where_a_request_has_several_choices_every_stage_says_whose_it_is():
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(render(choices(), 100))
    lines = [line.rstrip() for line in console.export_text().splitlines()]
    assert lines[1].split() == ["a1:7", "a1:8", "cmpl-1"]
    titles = [line[: lines[2].index("service")].strip() for line in lines[3:]]
    stages = [title for title in titles if title != "(gap)"]
    assert stages == ["POST /v1/completions", "transport [1]", "decode [1]", "worker.decode [1]", "decode [0]"]


def test_a_trace_is_found_by_the_internal_id_of_any_choice(store):
    store.add(choices())
    assert json.loads(run("a1:8", "--json").stdout)["request_ids"] == ["a1:7", "a1:8", "cmpl-1"]


def test_in_a_narrow_terminal_details_stand_below_over_the_whole_width():
    console = Console(width=80, record=True, file=io.StringIO())
    waiting = StoredEvent("waiting", BASE, {"tokenloom.reason": "parent_prompt_is_being_computed", "tokenloom.wait_us": 123456})
    console.print(render([span(1, 0, "queue", "scheduler", 0, 100, events=(waiting,))], 80))
    event, details = console.export_text().splitlines()[3:]
    assert event.split()[:2] == ["·", "waiting"]
    assert details.split() == ["reason=parent_prompt_is_being_computed", "wait_us=123456"]


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_no_time_is_cut_off_however_narrow_the_terminal(width):
    console = Console(width=width, record=True, file=io.StringIO())
    long = span(4, 3, "worker.decode_" + "x" * 60, "scheduler", 20, 100, events=(StoredEvent("slow", BASE, {"why": "y" * 300}),))
    console.print(render([*request(), long], width))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= width
    assert sum("100.00 ms" in line and "100.0%" in line for line in lines) == 1
    assert sum("80.00 ms" in line and "80.0%" in line and "scheduler" in line for line in lines) == 2


def test_json_has_times_in_microseconds_from_the_start_and_the_gaps(store):
    store.add(request())
    result = run("chatcmpl-1", "--json")
    assert result.exit_code == 0
    shown = json.loads(result.stdout)
    assert (shown["trace_id"], shown["duration_us"], shown["request_ids"]) == ("a" * 32, 100_000, ["chatcmpl-1"])
    assert [(one["name"], one["depth"], one["offset_us"], one["duration_us"]) for one in shown["spans"]] == [
        ("POST /v1/chat/completions", 0, 0, 100_000),
        ("tokenize", 1, 0, 10_000),
        ("decode", 1, 20_000, 80_000),
    ]
    assert shown["gaps"] == [{"parent_id": f"{1:016x}", "offset_us": 10_000, "duration_us": 10_000}]
    assert shown["spans"][2]["events"] == [{"name": "preempted", "offset_us": 30_000, "attributes": {"tokenloom.reason": "no_blocks"}}]


def test_the_command_prints_the_waterfall(store):
    store.add(request())
    result = run("a" * 32)
    assert result.exit_code == 0
    assert "tokenize" in result.stdout


def test_a_request_that_is_not_known_is_said_to_be_so_after_a_bounded_wait(store, monkeypatch):
    monkeypatch.setattr(trace_command, "WAIT_SECONDS", 0.05)
    result = run("chatcmpl-unknown")
    assert result.exit_code == 1
    assert "no trace of 'chatcmpl-unknown' on port 8000" in result.stderr


def test_a_port_on_which_no_mesh_ever_served_is_said_to_be_so(store):
    result = run("chatcmpl-1", "--port", "9")
    assert result.exit_code == 1
    assert "no mesh has served on port 9 here" in result.stderr


def test_a_store_that_is_broken_is_an_error_and_no_traceback(tmp_path, monkeypatch):
    monkeypatch.setenv("TOKENLOOM_RUN_DIR", str(tmp_path))
    (tmp_path / "8000").mkdir()
    (tmp_path / "8000" / "traces.db").write_bytes(b"something else" * 100)
    result = run("chatcmpl-1")
    assert result.exit_code == 1
    assert result.stderr.startswith("tokenloom trace: ")


def test_spans_that_are_still_on_their_way_are_waited_for(store, tmp_path, monkeypatch):
    first, *rest = request(time.time_ns())
    store.add([first])
    naps = []

    def nap(seconds):
        naps.append(seconds)
        store.add(rest)

    monkeypatch.setattr(trace_command.time, "sleep", nap)
    monkeypatch.setattr(trace_command, "is_settled", lambda spans, now: len(spans) == 3)
    reader = TraceReader(tmp_path / "8000" / "traces.db")
    assert len(trace_command.wait_for_trace(reader, "chatcmpl-1", 5)) == 3
    reader.close()
    assert len(naps) == 1


def test_a_trace_is_settled_a_while_after_its_last_span():
    spans = request()
    end = max(one.end_ns for one in spans)
    assert not trace_command.is_settled(spans, end + 1_000 * MS)
    assert trace_command.is_settled(spans, end + 2_000 * MS)
    assert not trace_command.is_settled([], end)


@pytest.mark.parametrize(
    ("nanoseconds", "text"),
    [(0, "0 µs"), (999, "1 µs"), (999_499, "999 µs"), (1_000_000, "1.00 ms"), (999_000_000, "999.00 ms"), (61_500_000_000, "61.50 s")],
)
def test_durations_are_told_in_the_unit_that_reads_best(nanoseconds, text):
    assert duration(nanoseconds) == text
