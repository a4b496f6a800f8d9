"""One request through four processes: what the client sees, what the trace says, what is left behind."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.support.mesh import Mesh, sse

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(300)]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"


def body(mesh: Mesh, **fields: Any) -> dict[str, Any]:
    return {"model": mesh.model, "messages": QUESTION, "temperature": 0, "max_tokens": 32, **fields}


async def test_the_answer_is_the_model_s(mesh: Mesh) -> None:
    async with mesh.client() as client:
        answer = (await client.post("/v1/chat/completions", json=body(mesh))).json()
    assert "Paris" in answer["choices"][0]["message"]["content"]
    assert answer["choices"][0]["finish_reason"] == "stop"
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


async def test_streamed_text_is_the_whole_text(mesh: Mesh) -> None:
    async with mesh.client() as client:
        whole = (await client.post("/v1/chat/completions", json=body(mesh))).json()
        async with client.stream("POST", "/v1/chat/completions", json=body(mesh, stream=True)) as response:
            chunks = [chunk async for chunk in sse(response)]
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert text == whole["choices"][0]["message"]["content"]
    assert len(chunks) > 3


async def test_openai_s_client_works_unchanged(mesh: Mesh) -> None:
    async with openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none") as client:
        assert [model.id async for model in client.models.list()] == [mesh.model]
        stream = await client.chat.completions.create(
            model=mesh.model, messages=QUESTION, temperature=0, max_tokens=32, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "Paris" in "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert chunks[-1].usage is not None
        completion = await client.completions.create(model=mesh.model, prompt="The capital of France is", max_tokens=4, temperature=0)
        assert "Paris" in completion.choices[0].text
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="nobody", messages=QUESTION)


@pytest.mark.composes("stop strings", "streaming", "greedy")
async def test_a_stop_string_never_shows_and_is_named(mesh: Mesh) -> None:
    async with mesh.client() as client:
        free = (await client.post("/v1/chat/completions", json=body(mesh))).json()["choices"][0]["message"]["content"]
        stop = free[len(free) // 2 : len(free) // 2 + 5]
        cut = (await client.post("/v1/chat/completions", json=body(mesh, stop=[stop]))).json()["choices"][0]
        async with client.stream("POST", "/v1/chat/completions", json=body(mesh, stop=[stop], stream=True)) as response:
            chunks = [chunk async for chunk in sse(response)]
    assert cut["message"]["content"] == free[: free.index(stop)]
    assert cut["stop_reason"] == stop
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == cut["message"]["content"]


async def test_the_trace_has_every_stage_in_order_and_they_add_up(mesh: Mesh) -> None:
    headers = {"traceparent": f"00-{TRACE_ID}-b7ad6b7169203331-01", "x-request-id": "trace-me"}
    async with mesh.client() as client:
        response = await client.post("/v1/chat/completions", json=body(mesh), headers=headers)
    assert response.headers["x-request-id"] == "trace-me"
    assert TRACE_ID in response.headers["traceparent"]
    trace = read_trace(mesh, "trace-me")
    assert trace["trace_id"] == TRACE_ID
    spans = trace["spans"]
    by_id = {span["span_id"]: span for span in spans}
    (root,) = [span for span in spans if span["name"].startswith("POST ")]
    assert root["parent_id"] == "b7ad6b7169203331"
    stages = sorted((span for span in spans if span["parent_id"] == root["span_id"]), key=lambda span: span["offset_us"])
    names = [span["name"] for span in stages]
    assert [name for name in names if name != "transport"] == ["tokenize", "queue", "prefill", "decode", "stream"]
    for before, after in itertools.pairwise(stages):
        overlap = before["offset_us"] + before["duration_us"] - after["offset_us"]
        assert overlap <= 50, f"{before['name']} and {after['name']} overlap by {overlap} us"
    whole, total = root["duration_us"], sum(span["duration_us"] for span in stages)
    assert abs(whole - total) <= max(0.02 * whole, 2000), f"stages add up to {total} us of {whole} us"
    services = {span["service"] for span in spans}
    assert services == {f"tokenloom-{name}" for name in ("gateway", "tokenizer", "scheduler", "worker")}
    for name in ("worker.prefill", "worker.decode"):
        (child,) = [span for span in spans if span["name"] == name]
        assert by_id[child["parent_id"]]["name"] == name.removeprefix("worker.")
        assert child["attributes"]["tokenloom.device_time_us"] > 0


def read_trace(mesh: Mesh, request: str) -> dict[str, Any]:
    """What `tokenloom trace REQUEST --json` prints."""
    command = [sys.executable, "-m", "cli.main", "trace", request, f"--port={mesh.port}", "--json"]
    environment = {**os.environ, "TOKENLOOM_RUN_DIR": str(mesh.run_base)}
    out = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert out.returncode == 0, out.stdout + out.stderr
    return dict(json.loads(out.stdout))


@pytest.mark.composes("cancel", "streaming")
async def test_a_third_of_the_clients_leaves_midway_and_nothing_is_left_behind(mesh: Mesh) -> None:
    async def read(client: httpx.AsyncClient, number: int) -> str | None:
        wanted = body(mesh, stream=True, max_tokens=48, ignore_eos=True, messages=[{"role": "user", "content": f"Count from {number}."}])
        text, count = "", 0
        async with client.stream("POST", "/v1/chat/completions", json=wanted) as response:
            assert response.status_code == 200
            async for chunk in sse(response) if number % 3 else _lines(response):
                text += (chunk["choices"][0]["delta"].get("content") or "") if chunk["choices"] else ""
                count += 1
                if number % 3 == 0 and count == 5:
                    return None
        return text

    before = await mesh.settle()
    async with mesh.client() as client:
        texts = await asyncio.gather(*(read(client, number) for number in range(32)))
    after = await mesh.settle()
    stayed = [text for number, text in enumerate(texts) if number % 3]
    assert all(stayed)
    assert len(stayed) == 21
    assert after["tokenloom:num_requests_running"] == after["tokenloom:num_requests_waiting"] == 0
    gained = {name: after[name] - before[name] for name in after if name.endswith("_total")}
    assert gained["tokenloom:requests_admitted_total"] == 32
    assert gained["tokenloom:requests_finished_total"] + gained["tokenloom:requests_cancelled_total"] == 32
    assert gained["tokenloom:requests_cancelled_total"] >= 8
    assert after["tokenloom:cancel_to_free_seconds_count"] > before["tokenloom:cancel_to_free_seconds_count"]


async def _lines(response: httpx.Response) -> Any:
    async for line in response.aiter_lines():
        if line.startswith("data: {"):
            yield json.loads(line[6:])


@pytest.mark.composes("dispatch-ahead")
async def test_steps_are_dispatched_before_the_previous_one_has_ended(mesh: Mesh) -> None:
    before = mesh.metrics("scheduler")
    async with mesh.client() as client:
        await client.post("/v1/chat/completions", json=body(mesh, max_tokens=64, ignore_eos=True))
    after = mesh.metrics("scheduler")
    steps = after["tokenloom:dispatch_lead_seconds_count"] - before["tokenloom:dispatch_lead_seconds_count"]
    behind = after['tokenloom:dispatch_lead_seconds_bucket{le="0.0005"}'] - before['tokenloom:dispatch_lead_seconds_bucket{le="0.0005"}']
    assert steps - behind > steps / 4, "many steps should be planned and sent while the previous one runs"


TOWN = {"type": "object", "properties": {"town": {"type": "string"}}}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": TOWN}}


async def test_what_tokenize_counts_is_what_a_request_is_charged_and_detokenize_spells_it(mesh: Mesh) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"town": "Paris"}'}}
    messages = [*QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}]
    messages.append({"role": "tool", "tool_call_id": "call_1", "content": "rain"})
    chat = {"messages": messages, "tools": [WEATHER]}
    async with mesh.client() as client:
        counted = (await client.post("/tokenize", json=chat)).json()
        spelled = (await client.post("/detokenize", json={"tokens": counted["tokens"]})).json()["prompt"]
        answer = (await client.post("/v1/chat/completions", json=body(mesh, **chat, max_tokens=1))).json()
    assert counted["count"] == len(counted["tokens"]) == answer["usage"]["prompt_tokens"]
    assert counted["max_model_len"] == 8192
    system, user, assistant, result, opening = spelled.split("<|im_start|>")[1:]
    assert json.dumps(WEATHER) in system
    assert user == f"user\n{QUESTION[0]['content']}<|im_end|>\n"
    assert '<tool_call>\n{"name": "weather", "arguments": {"town": "Paris"}}\n</tool_call>' in assistant
    assert result == "user\n<tool_response>\nrain\n</tool_response><|im_end|>\n"
    assert opening == "assistant\n"


async def test_the_command_line_chats_and_completes(mesh: Mesh) -> None:
    async def run(*arguments: str, stdin: str = "") -> str:
        command = [sys.executable, "-m", "cli.main", *arguments, f"--url={mesh.url}/v1", "--temperature=0"]
        done = await asyncio.to_thread(subprocess.run, command, input=stdin, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    chat, completion = await asyncio.gather(
        run("chat", "--max-tokens=32", stdin=f"{QUESTION[0]['content']}\n/stats\n"),
        run("complete", "-", "--max-tokens=4", stdin="The capital of France is"),
    )
    assert "Paris" in chat
    assert "tokens/s" not in chat
    assert "Paris" in completion


async def test_a_mesh_in_integers_answers_and_says_so(tmp_path: Path) -> None:
    mesh = Mesh.start(tmp_path, "--quantization=int8")
    try:
        async with mesh.client() as client:
            answer = (await client.post("/v1/chat/completions", json=body(mesh))).json()
        assert "Paris" in answer["choices"][0]["message"]["content"]
        assert "/int8." in mesh.log.read_text()
    finally:
        assert mesh.stop() == 0
