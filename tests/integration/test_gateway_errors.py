"""Every fault gets its own answer in OpenAI's shape, and none is a 500 that a client could cause."""

from __future__ import annotations

import asyncio

import pytest
import pytest_asyncio

from libs.errors import ErrorCode, TokenloomError
from libs.packing import unpack_ids
from tests.support.gateway_fakes import (
    CANCELLED,
    DEADLINE,
    FAILED,
    FakeScheduler,
    FakeTokenizer,
    ids_of,
    refuse,
    say,
    silence,
)
from tests.support.gateway_process import running_gateway, until
from tokenloom.common.v1 import common_pb2


@pytest.fixture
async def gateway(tmp_path):
    async with running_gateway(tmp_path) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory):
    """One gateway for all cases that must leave no trace."""
    async with running_gateway(tmp_path_factory.mktemp("shared")) as running:
        yield running


together = pytest.mark.asyncio(loop_scope="module")


BAD_CHATS = [
    ({}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "robot", "content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 10**400}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 101}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"seed": 2**63}, "seed"),
    ({"seed": 2**200}, "seed"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 9, "max_tokens": 5}, "min_tokens"),
    ({"min_tokens": 505}, "min_tokens"),
    ({"stop": ""}, "stop"),
    ({"stop": ["ok", ""]}, "stop[1]"),
    ({"stop": ["x"] * 65}, "stop"),
    ({"stop": "x" * 1025}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stop_token_ids": [257]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [0] * 1025}, "stop_token_ids"),
    ({"timeout": 0}, "timeout"),
    ({"timeout": -3}, "timeout"),
    ({"timeout": 1e9}, "timeout"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"user": 5}, "user"),
    ({"n": 0}, "n"),
    ({"n": -1}, "n"),
    ({"n": 257}, "n"),
    ({"n": 1.5}, "n"),
    ({"n": True}, "n"),
    ({"n": 2, "temperature": 0}, "n"),
    ({"n": 2, "best_of": 1}, "best_of"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": -1}, "repetition_penalty"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5"),
    ({"logit_bias": {"05": 1}}, "logit_bias"),
    ({"logit_bias": {"five": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"257": 1}}, "logit_bias"),
    ({"logit_bias": {"5": "much"}}, "logit_bias"),
    ({"logit_bias": [5]}, "logit_bias"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [257]}, "allowed_token_ids"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids[0]"),
    ({"bad_words": [""]}, "bad_words[0]"),
    ({"bad_words": ["ok", "x" * 1025]}, "bad_words[1]"),
    ({"bad_words": ["x"] * 513}, "bad_words"),
    ({"bad_words": "x"}, "bad_words"),
    ({"logprobs": 3}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"top_logprobs": -1, "logprobs": True}, "top_logprobs"),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": -2}, "prompt_logprobs"),
    ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": 513}, "truncate_prompt_tokens"),
    ({"chat_template": "{{ messages }}"}, "chat_template"),
    ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
    ({"vllm_xargs": {"a": {}}}, "vllm_xargs.a"),
    ({"vllm_xargs": {"a": True}}, "vllm_xargs.a"),
    ({"vllm_xargs": {"a": 1}}, "vllm_xargs"),
    ({"messages": [{"role": "user", "content": "hi", "tool_calls": [{"function": {"name": "f"}}]}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": ""}}]}]}, "messages[0].tool_calls[0].function.name"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, "messages[0].tool_calls[0].function.name"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "response_format.json_schema.name"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "structural_tag"}}, "response_format"),
    ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": "3"}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": "[" * 3000}}, "structured_outputs.json"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice[1]"),
    ({"structured_outputs": {"choice": ["a"] * 4097}}, "structured_outputs.choice"),
    ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": "x" * (256 * 1024 + 1)}}, "structured_outputs.regex"),
    ({"structured_outputs": {"grammar": " "}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"json_object": True, "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
    ({"structured_outputs": {"regex": "a", "disable_any_whitespace": True}}, "structured_outputs.disable_any_whitespace"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
    ({"guided_json": "nonsense"}, "guided_json"),
    ({"guided_regex": "a", "guided_decoding_backend": "outlines"}, "guided_decoding_backend"),
    ({"guided_regex": "a", "guided_decoding_backend": "llguidance:odd"}, "guided_decoding_backend"),
    ({"n": 2, "best_of": 3}, "best_of"),  # in chats
    ({"priority": 1}, "priority"),
    ({"priority": -1}, "priority"),
    ({"priority": 2**31}, "priority"),
    ({"priority": 0.5}, "priority"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": 5}, "cache_salt"),
    ({"cache_salt": "é" * 513}, "cache_salt"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_CHATS)
@together
async def test_a_wrong_chat_is_a_400_that_names_the_parameter(shared, fields, param):
    body = fields if "messages" in fields or not fields else {"messages": [{"role": "user", "content": "hi"}], **fields}
    response = await shared.client.post("/v1/chat/completions", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert error["message"]
    assert shared.scheduler.submitted.empty()


BAD_COMPLETIONS = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"logprobs": True}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": 21}, "logprobs"),
    ({"n": 3, "best_of": 2}, "best_of"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"best_of": 2, "temperature": 0}, "best_of"),
    ({"best_of": 257}, "best_of"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"add_special_tokens": 1}, "add_special_tokens"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_COMPLETIONS)
@together
async def test_a_wrong_completion_is_a_400_that_names_the_parameter(shared, fields, param):
    response = await shared.complete("hi", **fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
    assert shared.scheduler.submitted.empty()


BAD_PROMPTS = [
    (None, "prompt"),
    ([], "prompt"),
    ([[]], "prompt[0]"),
    ([1, "a"], "prompt[1]"),
    (["a", 1], "prompt[1]"),
    ([[1], "a"], "prompt[1]"),
    ([True], "prompt[0]"),
    ([-1], "prompt[0]"),
    ([2**32], "prompt[0]"),
    ([1.5], "prompt[0]"),
    ({"text": "a"}, "prompt"),
    (["a"] * 257, "prompt"),
    ("", "prompt"),
    (["a", ""], "prompt[1]"),
    (["a", "x" * 600], "prompt[1]"),
    ([[1], [1] * 600], "prompt[1]"),
]


@pytest.mark.parametrize(("prompt", "param"), BAD_PROMPTS)
@together
async def test_a_wrong_prompt_is_a_400_that_names_it(shared, prompt, param):
    response = await shared.complete(prompt)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
    await shared.until_idle()


NOT_BUILT = [
    ("echo", True),
    ("suffix", "x"),
    ("functions", [{"name": "f"}]),
    ("function_call", {"name": "f"}),
    ("guided_whitespace_pattern", " "),
    ("spaces_between_special_tokens", False),
    ("truncation_side", "right"),
    ("logprob_token_ids", [1]),
    ("thinking_token_budget", 5),
    ("modalities", ["text", "audio"]),
    ("audio", {"voice": "x"}),
    ("use_beam_search", True),
    ("lora_request", {}),
]


@pytest.mark.refuses("beam search", reason="not built yet")
@pytest.mark.refuses("images and audio", reason="not built yet")
@pytest.mark.refuses("LoRA", reason="not built yet")
@pytest.mark.parametrize(("name", "value"), NOT_BUILT)
@together
async def test_what_is_not_built_is_a_400_that_says_so(shared, name, value):
    response = await shared.chat("hi", **{name: value})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, name, "unsupported")
    assert "not supported" in error["message"]


async def test_what_asks_for_nothing_is_accepted(gateway):
    """The fields that `vllm bench serve` and common clients always send."""
    response = await gateway.complete(
        "hi",
        model="tiny",
        temperature=0,
        repetition_penalty=1.0,
        presence_penalty=0,
        max_tokens=4,
        logprobs=None,
        best_of=1,
        n=1,
        ignore_eos=True,
        echo=False,
        suffix="",
        logit_bias={},
        add_special_tokens=True,
    )
    assert response.status_code == 200, response.text
    response = await gateway.chat("hi", tools=[], tool_choice="auto", response_format={"type": "text"}, store=True, metadata={"a": "b"})
    assert response.status_code == 200, response.text


async def test_unknown_fields_are_ignored_with_a_warning_that_names_them(gateway, caplog, monkeypatch):
    warned = []
    monkeypatch.setattr("services.gateway.api.decode._log.warning", lambda _event, **fields: warned.append(fields))
    assert (await gateway.chat("hi", frobnicate=1, wibble=None)).status_code == 200
    assert warned == [{"fields": ["frobnicate", "wibble"], "count": 2}]


async def test_an_unknown_model_is_a_404(gateway):
    response = await gateway.chat("hi", model="other")
    assert (response.status_code, response.json()["error"]["code"], response.json()["error"]["param"]) == (404, "model_not_found", "model")


async def test_a_prompt_over_the_context_is_a_400_with_both_numbers(gateway):
    response = await gateway.complete("x" * 600)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "prompt_too_long", "prompt")
    assert "600" in error["message"]
    assert "512" in error["message"]


async def test_prompt_and_max_tokens_over_the_context_are_a_400_with_all_numbers(gateway):
    error = (await gateway.complete("x" * 500, max_tokens=20)).json()["error"]
    assert (error["code"], error["param"]) == ("prompt_too_long", "max_tokens")
    assert all(number in error["message"] for number in ("512", "520", "500", "20"))
    assert (await gateway.complete("x" * 500, max_tokens=12)).status_code == 200
    await gateway.until_idle()


async def test_a_prompt_that_fills_the_context_leaves_no_room(gateway):
    error = (await gateway.chat("x" * (512 - len("user:\n")))).json()["error"]
    assert (error["code"], error["param"]) == ("prompt_too_long", "messages")
    error = (await gateway.complete(["a", "x" * 512])).json()["error"]
    assert (error["code"], error["param"]) == ("prompt_too_long", "prompt[1]")


async def test_the_limit_of_output_is_named_as_the_client_named_it(gateway):
    error = (await gateway.chat(max_completion_tokens=600)).json()["error"]
    assert (error["code"], error["param"]) == ("prompt_too_long", "max_completion_tokens")
    assert "lower max_completion_tokens" in error["message"]


async def test_what_the_template_refuses_is_a_400_on_messages(tmp_path):
    tokenizer = FakeTokenizer()
    tokenizer.failure = TokenloomError(ErrorCode.TEMPLATE_ERROR, "roles must alternate")
    async with running_gateway(tmp_path, tokenizer=tokenizer) as gateway:
        response = await gateway.chat()
        assert response.status_code == 400
        assert response.json()["error"] == {
            "message": "roles must alternate",
            "type": "invalid_request_error",
            "param": "messages",
            "code": "template_error",
        }


@pytest.mark.refuses("stop strings", reason="where the tokens' bytes disagree with the tokenizer's own decode")
async def test_stop_strings_are_refused_where_the_tokens_text_is_not_certain(tmp_path):
    async with running_gateway(tmp_path, tokenizer=FakeTokenizer(verified=False)) as gateway:
        response = await gateway.chat(stop="x")
        assert (response.status_code, response.json()["error"]["param"]) == (400, "stop")
        assert (await gateway.chat()).status_code == 200


@pytest.mark.parametrize(
    ("code", "status", "retry_after"),
    [
        (ErrorCode.QUEUE_FULL, 429, "3"),
        (ErrorCode.NO_WORKER, 503, "3"),
        (ErrorCode.CANNOT_FIT, 400, None),
        (ErrorCode.NON_FINITE, 500, None),
        (ErrorCode.DEAD_END, 422, None),
    ],
)
async def test_what_the_scheduler_refuses_keeps_its_code(tmp_path, code, status, retry_after):
    error = TokenloomError(code, "because", retry_after_ms=2500 if retry_after else None)
    async with running_gateway(tmp_path, FakeScheduler(refuse(error))) as gateway:
        for stream in (False, True):
            response = await gateway.chat(stream=stream)
            assert (response.status_code, response.json()["error"]["message"]) == (status, "because")
            assert response.json()["error"]["code"] == code.spec.label
            assert response.headers.get("retry-after") == retry_after
        await gateway.until_idle()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": [{"role": "user", "content": "hi"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}, "max_tokens"),
        ({"messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 4, "stream": True}, "max_completion_tokens"),
        ({"prompt": ["a", "b"], "n": 2}, "max_tokens"),
    ],
)
async def test_what_can_never_fit_is_a_400_that_names_what_could_be_smaller(tmp_path, body, param):
    error = TokenloomError(ErrorCode.CANNOT_FIT, "prompt and max_tokens need 40 tokens of KV cache; a worker holds 32")
    async with running_gateway(tmp_path, FakeScheduler(refuse(error))) as gateway:
        response = await gateway.client.post("/v1/chat/completions" if "messages" in body else "/v1/completions", json=body)
        found = response.json()["error"]
        assert (response.status_code, found["code"], found["param"]) == (400, "cannot_fit", param)
        assert (found["type"], "32" in found["message"]) == ("invalid_request_error", True)
        assert "retry-after" not in response.headers
        await gateway.until_idle()


async def test_a_parameter_that_the_scheduler_names_is_kept(tmp_path):
    error = TokenloomError(ErrorCode.CANNOT_FIT, "too much", param="prompt")
    async with running_gateway(tmp_path, FakeScheduler(refuse(error))) as gateway:
        assert (await gateway.chat(max_tokens=3)).json()["error"]["param"] == "prompt"


@pytest.mark.composes("bounded queue", "prompt list")
async def test_over_the_window_is_a_429_before_any_tokenization(gateway):
    gateway.scheduler.behaviour = silence
    gateway.scheduler.set_window(max_outstanding=1, max_outstanding_tokens=10_000, ready=True)
    await until(lambda: gateway.mesh.session.window.max_outstanding == 1)
    alone = asyncio.create_task(gateway.complete(["a", "b"]))
    submits = [await gateway.scheduler.submitted.get() for _ in "ab"]
    response = await gateway.complete("c")
    assert (response.status_code, response.json()["error"]["code"], response.headers["retry-after"]) == (429, "over_window", "1")
    assert len(gateway.tokenizer.calls) == 2
    for session, submit in submits:
        session.emit(submit.id, [], ending=session.ending(submit.id))
    assert (await alone).status_code == 200


async def test_a_scheduler_that_is_not_ready_is_a_503_with_its_reason(gateway):
    gateway.scheduler.set_window(ready=False, not_ready_reason="no worker is attached")
    await until(lambda: not gateway.mesh.session.window.ready)
    response = await gateway.chat()
    assert (response.status_code, response.json()["error"]["code"]) == (503, "no_worker")
    assert "no worker is attached" in response.json()["error"]["message"]
    assert response.headers["retry-after"] == "1"


@pytest.mark.parametrize(
    ("reason", "cancel_reason", "status", "code"),
    [
        (DEADLINE, 0, 504, "deadline_exceeded"),
        (CANCELLED, common_pb2.CANCEL_REASON_TIMEOUT, 504, "deadline_exceeded"),
    ],
)
async def test_a_deadline_before_the_first_byte_is_a_504(tmp_path, reason, cancel_reason, status, code):
    async with running_gateway(tmp_path, FakeScheduler(say("", reason=reason, cancel_reason=cancel_reason))) as gateway:
        response = await gateway.chat(stream=False)
        assert (response.status_code, response.json()["error"]["code"]) == (status, code)


@pytest.mark.composes("prompt list", "cancel")
async def test_one_failing_prompt_fails_the_request_and_cancels_its_siblings(tmp_path):
    async def behaviour(session, submit):
        if unpack_ids(submit.prompt_ids) == ids_of("bad"):
            error = TokenloomError(ErrorCode.NON_FINITE, "not finite").to_proto()
            session.emit(submit.id, [], ending=session.ending(submit.id, FAILED, error=error))

    async with running_gateway(tmp_path, FakeScheduler(behaviour)) as gateway:
        response = await gateway.complete(["good", "bad"])
        assert (response.status_code, response.json()["error"]["code"]) == (500, "non_finite")
        cancel = await gateway.scheduler.cancels.get()
        assert cancel.reason == common_pb2.CANCEL_REASON_SIBLING_FAILED
        await gateway.until_idle()


async def test_a_fault_of_the_gateway_is_a_500_without_a_traceback(gateway, monkeypatch):
    def broken(*_):
        raise RuntimeError("secret detail")

    monkeypatch.setattr("services.gateway.generate.Generation.submit", broken)
    response = await gateway.chat()
    assert (response.status_code, response.json()["error"]["code"]) == (500, "internal")
    assert "secret" not in response.text
    assert "Traceback" not in response.text
    await gateway.until_idle()
