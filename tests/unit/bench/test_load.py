"""The whole client against a scripted server: loops, flags, JSON, warnings and exit code."""

import asyncio
import io
import json
import subprocess
import sys
import time

import psutil
import pytest
from rich.console import Console

from bench.load import _command, bodies, main, measure, parse
from bench.loops import closed_loop, open_loop
from bench.machine import CpuMeter, server_processes
from tests.unit.bench.scripted import DONE, serving, text, usage

SMALL = ["--model", "m", "--input-len", "4", "--output-len", "2", "--num-prompts", "6"]


async def answer_well(connection):
    if connection.head.startswith("GET /version"):
        await connection.answer(200, b'{"version": "9"}')
    else:
        await connection.stream(text("a"), text("b", "length"), usage(5, 2), DONE)


async def run(play, *flags):
    async with serving(play) as server:
        options = parse(["--url", server.url, *SMALL, *flags])
        return await asyncio.wait_for(measure(options, "command"), 20), server


async def test_a_closed_loop_keeps_exactly_its_concurrency_in_flight():
    flying, most, full = 0, 0, asyncio.Event()

    async def send(_body, record):
        nonlocal flying, most
        flying += 1
        most = max(most, flying)
        if flying == 3:
            full.set()
        await full.wait()
        await asyncio.sleep(0)
        flying -= 1
        record.ended = time.perf_counter()

    records = await asyncio.wait_for(closed_loop(send, [b""] * 10, concurrency=3), 5)
    assert (len(records), most) == (10, 3)


async def test_an_open_loop_does_not_wait_for_answers_and_counts_from_the_arrival():
    release, seen = asyncio.Event(), []

    async def send(body, record):
        seen.append(body)
        record.sent = time.perf_counter()
        if len(seen) == 3:
            release.set()
        await release.wait()

    records = await asyncio.wait_for(open_loop(send, [b"1", b"2", b"3"], [0.0, 0.01, 0.03]), 5)
    assert seen == [b"1", b"2", b"3"]
    assert [round(record.due - records[0].due, 6) for record in records] == [0.0, 0.01, 0.03]
    assert all(record.sent >= record.due - 1e-3 for record in records)


async def test_failures_are_counted_by_kind_and_kept_with_an_example():
    async def play(connection):
        kind = connection.number % 3
        if connection.head.startswith("GET"):
            await connection.answer(404, b"")
        elif kind == 0:
            await connection.answer(429, b'{"error": {"message": "over the window"}}')
        elif kind == 1:
            await connection.stream(text("a"))
        else:
            await answer_well(connection)

    result, server = await run(play, "--concurrency", "1", "--warmup", "0")
    assert len(server.requests) == 7
    assert result.statistics.failures == {"http_429": 2, "truncated": 2}
    assert (result.statistics.completed, result.statistics.output_tokens) == (2, 4)
    assert result.failure_examples["http_429"] == "over the window"
    assert result.server == ""
    assert any("http_429: over the window" in warning for warning in result.warnings())


async def test_warm_up_requests_are_sent_first_with_other_prompts_and_are_not_counted():
    result, server = await run(answer_well, "--concurrency", "2", "--warmup", "2", "--prefix-len", "3")
    sent = [json.loads(request.body)["messages"][0]["content"] for request in server.requests[1:]]
    assert (len(sent), result.statistics.completed) == (8, 6)
    assert len({prompt.split()[0:3] == sent[2].split()[0:3] for prompt in sent[2:]}) == 1
    assert all(prompt.split()[0:3] != sent[2].split()[0:3] for prompt in sent[:2])
    assert json.loads(result.server) == {"version": "9"}


async def test_an_open_loop_run_sends_every_request_and_is_written_as_json_that_says_all(tmp_path):
    result, _server = await run(answer_well, "--rate", "500", "--seed", "3", "--endpoint", "completions", "--note", "quiet")
    path = tmp_path / "new" / "result.json"
    result.write(path)
    saved = json.loads(path.read_text())
    assert saved["statistics"]["completed"] == 6
    assert (saved["workload"]["rate"], saved["workload"]["concurrency"], saved["seed"], saved["note"]) == (500.0, None, 3, "quiet")
    assert saved["machine"]["cores"] >= 1
    assert set(saved["cpu"]) == {"wall_s", "client_s", "server_s", "others_s", "steal_s", "others_cores"}
    assert set(saved["statistics"]["itl_ms"]) == {"count", "mean", "p50", "p95", "p99", "max"}


async def test_the_table_shows_the_times_and_warns_of_outputs_that_were_cut():
    result, _server = await run(answer_well, "--concurrency", "1", "--output-len", "9", "--ignore-eos")
    console = Console(record=True, width=140, file=io.StringIO())
    result.show(console)
    shown = console.export_text()
    assert all(word in shown for word in ("TTFT", "TPOT", "ITL", "p95", "output tok/s", "6 completed, 0 failed"))
    assert "warning: 6 outputs have less than 9 tokens" in shown


def test_flags_override_a_named_workload_and_a_rate_replaces_its_concurrency():
    named = parse(["--model", "m", "--workload", "d"]).workload
    assert (named.shape.prefix_len, named.concurrency, named.ignore_eos) == (512, 8, True)
    changed = parse(
        ["--model", "m", "--workload", "d", "--prefix-len", "0", "--rate", "2", "--no-ignore-eos", "--num-prompts", "3"]
    ).workload
    assert (changed.shape.prefix_len, changed.shape.input_len, changed.output_len) == (0, 32, 32)
    assert (changed.rate, changed.concurrency, changed.ignore_eos, changed.num_prompts) == (2.0, None, False, 3)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--model", "m"], "give --workload, or"),
        (SMALL, "one of --concurrency and --rate"),
        ([*SMALL, "--rate", "1", "--concurrency", "1"], "not allowed with"),
        ([*SMALL, "--rate", "-1"], "above 0"),
        ([*SMALL, "--rate", "1", "--tokenizer", "."], "--endpoint completions"),
        ([*SMALL, "--rate", "1", "--endpoint", "completions", "--tokenizer", "/nowhere"], "does not exist"),
        ([*SMALL, "--rate", "1", "--warmup", "-1"], "--warmup"),
        ([*SMALL, "--rate", "1", "--url", "localhost"], "URL"),
        ([*SMALL, "--rate", "1", "--server-pid", "999999999"], "no such process"),
    ],
)
def test_flags_that_make_no_sense_end_with_a_sentence_and_exit_code_2(flags, complaint, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(flags)
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


def test_with_a_tokenizer_completions_send_exactly_the_wished_number_of_ids(tiny_llama_dir):
    options = parse([*SMALL, "--rate", "1", "--prefix-len", "5", "--endpoint", "completions", "--tokenizer", str(tiny_llama_dir)])
    prompts = [json.loads(body)["prompt"] for body in bodies(options, 3, 0)]
    assert [len(prompt) for prompt in prompts] == [9, 9, 9]


def test_the_command_is_kept_without_the_key():
    assert _command(["--api-key", "secret", "--note", "a b"]) == "python -m bench.load --api-key ... --note 'a b'"
    assert "secret" not in _command(["--api-key=secret"])


def test_a_server_that_is_not_there_ends_with_exit_code_1(capsys):
    assert main(["--url", "http://127.0.0.1:9", *SMALL, "--concurrency", "1", "--warmup", "0"]) == 1
    assert "6 requests failed: connect" in capsys.readouterr().out


def test_cpu_time_of_this_process_is_the_clients_and_not_the_others():
    meter = CpuMeter([])
    while meter.stop().client_s < 0.1:
        sum(range(20_000))
    used = meter.stop()
    assert used.server_s is None
    assert 0.1 <= used.client_s <= used.wall_s + 0.1
    assert used.others_cores == pytest.approx(used.others_s / used.wall_s)


def test_cpu_time_of_the_servers_tree_is_the_servers():
    script = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"
    process = subprocess.Popen([sys.executable, "-c", script])
    try:
        root = psutil.Process(process.pid)
        meter = CpuMeter([root])
        deadline = time.monotonic() + 30
        while (meter.stop().server_s or 0.0) < 0.1:
            assert time.monotonic() < deadline
    finally:
        for member in (*root.children(recursive=True), root):
            member.kill()
        process.wait(10)


async def test_the_client_never_takes_itself_for_the_server():
    async with serving(answer_well) as server:
        assert server_processes(server.target.port) == []
