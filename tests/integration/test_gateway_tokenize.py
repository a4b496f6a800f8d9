"""/tokenize and /detokenize over HTTP: vLLM's shapes, errors in OpenAI's, and no worker needed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from libs.errors import ErrorCode, TokenloomError
from tests.support.gateway_fakes import FakeScheduler, FakeTokenizer, ids_of
from tests.support.gateway_process import running_gateway, until
from tokenloom.tokenizer.v1 import tokenizer_pb2

MESSAGES = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture
async def gateway(tmp_path: Path):
    async with running_gateway(tmp_path) as gateway:
        yield gateway


async def test_a_prompt_is_counted_and_its_ids_are_listed(gateway):
    answer = await gateway.client.post("/tokenize", json={"prompt": "héy", "model": "tiny"})
    assert answer.json() == {"count": 4, "max_model_len": 512, "tokens": ids_of("héy"), "token_strs": None}
    assert gateway.tokenizer.calls[-1].special_tokens == tokenizer_pb2.SPECIAL_TOKENS_UNSPECIFIED
    assert not gateway.tokenizer.calls[-1].want_tokens
    assert gateway.tokenizer.calls[-1].max_tokens == 0, "what is too long to run can still be counted"


@pytest.mark.parametrize("body", [{"prompt": "ab"}, {"messages": MESSAGES}])
async def test_token_strings_come_when_they_are_asked_for(gateway, body):
    answer = (await gateway.client.post("/tokenize", json={**body, "return_token_strs": True})).json()
    assert answer["token_strs"] == [chr(token_id) for token_id in answer["tokens"]]


@pytest.mark.parametrize("body", [{"prompt": "ab"}, {"messages": MESSAGES}])
@pytest.mark.parametrize(("given", "sent"), [(True, tokenizer_pb2.SPECIAL_TOKENS_ADD), (False, tokenizer_pb2.SPECIAL_TOKENS_NONE)])
async def test_special_tokens_are_as_the_client_wants_them(gateway, body, given, sent):
    assert (await gateway.client.post("/tokenize", json={**body, "add_special_tokens": given})).status_code == 200
    assert gateway.tokenizer.calls[-1].special_tokens == sent


async def test_a_chat_is_rendered_as_a_chat_request_would_be(gateway):
    body = {"messages": MESSAGES, "tools": [TOOL], "add_generation_prompt": False, "chat_template_kwargs": {"thinking": True}}
    answer = (await gateway.client.post("/tokenize", json=body)).json()
    assert bytes(answer["tokens"]) == b"user:hi\n"
    chat = gateway.tokenizer.calls[-1].chat
    assert (chat.add_generation_prompt, chat.continue_final_message) == (False, False)
    assert b'"name":"f"' in chat.tools_json
    assert chat.template_kwargs_json == b'{"thinking":true}'
    await gateway.client.post("/tokenize", json={"messages": MESSAGES})
    assert gateway.tokenizer.calls[-1].chat.add_generation_prompt
    await gateway.client.post("/tokenize", json={"messages": MESSAGES, "continue_final_message": True})
    assert gateway.tokenizer.calls[-1].chat.continue_final_message


async def test_an_empty_prompt_counts_no_tokens(gateway):
    answer = await gateway.client.post("/tokenize", json={"prompt": "", "return_token_strs": True})
    assert (answer.status_code, answer.json()) == (200, {"count": 0, "max_model_len": 512, "tokens": [], "token_strs": []})


async def test_ids_become_the_text_that_they_spell(gateway):
    answer = await gateway.client.post("/detokenize", json={"tokens": ids_of("héy"), "model": "tiny"})
    assert (answer.status_code, answer.json()) == (200, {"prompt": "héy"})
    assert (await gateway.client.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("route", "body", "status", "code", "param"),
    [
        ("/tokenize", {}, 400, "invalid_request", "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, 400, "invalid_request", "prompt"),
        ("/tokenize", {"prompt": ["a"]}, 400, "invalid_request", "prompt"),
        ("/tokenize", {"prompt": "a", "tools": [TOOL]}, 400, "invalid_request", "tools"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, 400, "invalid_request", "add_special_tokens"),
        ("/tokenize", {"messages": []}, 400, "empty_prompt", "messages"),
        ("/tokenize", {"messages": [{"role": "x"}]}, 400, "invalid_request", "messages[0].role"),
        ("/tokenize", {"messages": MESSAGES, "chat_template": "x"}, 400, "unsupported", "chat_template"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model_not_found", "model"),
        ("/detokenize", {}, 400, "invalid_request", "tokens"),
        ("/detokenize", {"tokens": "a"}, 400, "invalid_request", "tokens"),
        ("/detokenize", {"tokens": [1, -1]}, 400, "invalid_request", "tokens[1]"),
        ("/detokenize", {"tokens": [2**32]}, 400, "invalid_request", "tokens[0]"),
        ("/detokenize", {"tokens": [300]}, 400, "invalid_request", "tokens"),
        ("/detokenize", {"tokens": [1], "model": "other"}, 404, "model_not_found", "model"),
    ],
)
async def test_what_is_wrong_is_refused_by_its_name(gateway, route, body, status, code, param):
    answer = await gateway.client.post(route, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (status, code, param)
    assert answer.headers["x-request-id"]


async def test_bodies_methods_and_types_are_checked_as_at_the_other_endpoints(gateway):
    assert (await gateway.client.post("/tokenize", content=b"{", headers={"content-type": "application/json"})).status_code == 400
    assert (await gateway.client.post("/tokenize", content=b"{}")).status_code == 415
    assert (await gateway.client.get("/tokenize")).status_code == 405
    assert (await gateway.client.post("/v1/tokenize", json={"prompt": "a"})).status_code == 404


async def test_a_large_body_is_refused(tmp_path):
    async with running_gateway(tmp_path, max_body_bytes=1024) as gateway:
        assert (await gateway.client.post("/tokenize", json={"prompt": "x" * 2000})).status_code == 413


async def test_it_works_while_there_is_no_worker(tmp_path):
    scheduler = FakeScheduler()
    scheduler.accepts_sessions = False
    async with running_gateway(tmp_path, scheduler, wait_ready=False) as gateway:
        answer = (await gateway.client.post("/tokenize", json={"prompt": "ab"})).json()
        assert (answer["count"], answer["max_model_len"]) == (2, None)
        assert (await gateway.client.post("/detokenize", json={"tokens": answer["tokens"]})).json() == {"prompt": "ab"}


async def test_a_tokenizer_s_refusal_reaches_the_client(gateway):
    gateway.tokenizer.failure = TokenloomError(ErrorCode.TOKENIZER_BUSY, "full", retry_after_ms=2000)
    answer = await gateway.client.post("/tokenize", json={"prompt": "a"})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "2")
    assert await gateway.metric("tokenloom:request_rejected_total", model_name="tiny", reason="tokenizer_busy") == 1


async def test_with_keys_both_need_one(tmp_path):
    async with running_gateway(tmp_path, api_key=["secret"]) as gateway:
        for route, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [97]})):
            assert (await gateway.client.post(route, json=body)).status_code == 401
            assert (await gateway.client.post(route, json=body, headers={"authorization": "Bearer secret"})).status_code == 200


async def test_requests_are_counted_traced_and_logged_like_others(gateway):
    await gateway.client.post("/tokenize", json={"prompt": "a"}, headers={"x-request-id": "mine"})
    await until(lambda: not gateway.mesh.open)
    assert await gateway.metric("tokenloom:http_requests_total", path="/tokenize", status="200") == 1
    await until(lambda: not gateway.mesh.open)
    await asyncio.to_thread(gateway.mesh.tracer.shutdown)
    roots = [span for span in gateway.spans.finished if span.name == "POST /tokenize"]
    assert len(roots) == 1
    assert roots[0].attributes["tokenloom.x_request_id"] == "mine"
    stages = [span for span in gateway.spans.finished if span.parent is not None and span.parent.span_id == roots[0].context.span_id]
    assert [span.name for span in stages] == ["tokenize"]


async def test_a_client_that_leaves_takes_its_prompt_along(tmp_path):
    tokenizer = FakeTokenizer()
    tokenizer.gate.clear()
    async with running_gateway(tmp_path, tokenizer=tokenizer) as gateway:
        call = asyncio.create_task(gateway.client.post("/tokenize", json={"prompt": "a"}))
        await tokenizer.entered.wait()
        assert len(gateway.mesh.open) == 1
        call.cancel()
        await until(lambda: tokenizer.cancelled == 1)
        await until(lambda: not gateway.mesh.open)


async def test_a_gateway_that_leaves_refuses_new_prompts_and_ends_the_open_ones(tmp_path):
    tokenizer = FakeTokenizer()
    tokenizer.gate.clear()
    async with running_gateway(tmp_path, tokenizer=tokenizer, drain_timeout=0.1) as gateway:
        call = asyncio.create_task(gateway.client.post("/tokenize", json={"prompt": "a"}))
        await tokenizer.entered.wait()
        await gateway.mesh.drain()
        assert (await call).status_code == 503
        assert (await gateway.client.post("/tokenize", json={"prompt": "a"})).status_code == 503
