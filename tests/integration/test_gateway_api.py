"""The HTTP API between fakes: every parameter reaches the scheduler, every answer has its shape."""

from __future__ import annotations

import json

import pytest

from libs.packing import unpack_ids
from tests.support.gateway_fakes import (
    LENGTH,
    FakeScheduler,
    facts,
    ids_of,
    say,
)
from tests.support.gateway_process import Gateway, events_of, running_gateway
from tokenloom.common.v1 import common_pb2


@pytest.fixture
async def gateway(tmp_path):
    async with running_gateway(tmp_path) as running:
        yield running


async def submitted(gateway: Gateway):
    return (await gateway.scheduler.submitted.get())[1]


async def test_a_chat_is_answered_in_openais_shape(gateway):
    response = await gateway.chat("hi", model="tiny")
    assert response.status_code == 200
    body = response.json()
    assert body.pop("created") > 1_700_000_000
    assert body == {
        "id": f"chatcmpl-{response.headers['x-request-id']}",
        "object": "chat.completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {"prompt_tokens": 8, "completion_tokens": 6, "total_tokens": 14, "prompt_tokens_details": {"cached_tokens": 0}},
        "system_fingerprint": None,
    }


async def test_a_completion_is_answered_in_openais_shape(gateway):
    body = (await gateway.complete("hi")).json()
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["choices"] == [{"index": 0, "text": "hello", "logprobs": None, "finish_reason": "stop", "stop_reason": None}]


async def test_every_sampling_parameter_reaches_the_scheduler(gateway):
    await gateway.complete(
        "hi",
        max_tokens=7,
        min_tokens=2,
        temperature=0.5,
        top_p=0.25,
        top_k=12,
        min_p=0.125,
        seed=-5,
        stop=["END", "é"],
        stop_token_ids=[3, 4, 3],
        ignore_eos=True,
    )
    sampling = (await submitted(gateway)).sampling
    assert sampling == common_pb2.SamplingParams(
        max_tokens=7,
        min_tokens=2,
        temperature=0.5,
        top_p=0.25,
        top_k=12,
        min_p=0.125,
        seed=2**64 - 5,
        stop=["END", "é"],
        stop_token_ids=[3, 4],
        ignore_eos=True,
        repetition_penalty=1,
    )


async def test_silence_means_the_apis_defaults(gateway):
    await gateway.complete("hi")
    completion = (await submitted(gateway)).sampling
    assert (completion.max_tokens, completion.temperature, completion.top_p, completion.top_k, completion.min_p) == (16, 1, 1, 0, 0)
    await gateway.chat("hi")
    chat = await submitted(gateway)
    assert chat.sampling.max_tokens == 512 - len(unpack_ids(chat.prompt_ids)), "what the context leaves"


async def test_silence_means_the_models_generation_config_where_it_has_one(tmp_path):
    scheduler = FakeScheduler()
    defaults = common_pb2.GenerationDefaults(temperature=0.75, top_p=0.5, top_k=20, min_p=0.25, max_new_tokens=33, repetition_penalty=1.25)
    scheduler.model = facts(defaults=defaults)
    async with running_gateway(tmp_path, scheduler) as gateway:
        await gateway.chat("hi")
        sampling = (await submitted(gateway)).sampling
        assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (33, 0.75, 0.5, 20, 0.25)
        assert sampling.repetition_penalty == 1.25
        await gateway.chat("hi", temperature=0, top_p=1, top_k=-1, min_p=0, max_tokens=40, repetition_penalty=1)
        sampling = (await submitted(gateway)).sampling
        assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (40, 0, 1, 0, 0)
        assert sampling.repetition_penalty == 1


async def test_seeds_are_drawn_where_the_client_gives_none(gateway):
    await gateway.complete(["a", "b"])
    drawn = {(await submitted(gateway)).sampling.seed, (await submitted(gateway)).sampling.seed}
    assert len(drawn) == 2


async def test_a_salt_reaches_the_tokenizer_and_silence_is_the_common_space(gateway):
    await gateway.complete(["a", "b"], cache_salt="s")
    await gateway.chat("hi", cache_salt="s")
    await gateway.complete("a")
    salts = [call.hash_salt for call in gateway.tokenizer.calls]
    assert salts == [b"cache_salt:s"] * 3 + [b""]


async def test_a_priority_reaches_the_scheduler_where_priorities_are_served(tmp_path):
    scheduler = FakeScheduler()
    scheduler.model = facts(priority_scheduling=True)
    async with running_gateway(tmp_path, scheduler) as gateway:
        for priority in (-(2**31), -1, 0, 2**31 - 1):
            assert (await gateway.complete("a", priority=priority)).status_code == 200
            assert (await submitted(gateway)).priority == priority
        await gateway.chat("a", n=2, priority=5)
        assert [(await submitted(gateway)).priority for _ in range(2)] == [5, 5]
        await gateway.complete("a", priority=None)
        assert (await submitted(gateway)).priority == 0


async def test_null_counts_as_absent(gateway):
    names = (
        "model max_tokens temperature top_p top_k min_p seed stop stop_token_ids ignore_eos min_tokens stream stream_options timeout user"
    )
    response = await gateway.chat(
        "hi", **dict.fromkeys([*names.split(), "logprobs", "tools", "n", "best_of", "cache_salt", "priority", "response_format"])
    )
    assert response.status_code == 200, response.text


async def test_max_completion_tokens_wins_over_max_tokens(gateway):
    await gateway.chat("hi", max_tokens=5, max_completion_tokens=9)
    assert (await submitted(gateway)).sampling.max_tokens == 9


async def test_integers_are_fine_where_floats_are_meant(gateway):
    assert (await gateway.chat("hi", temperature=1, top_p=1, timeout=5)).status_code == 200


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("ab", [[97, 98]]),
        (["ab", "c"], [[97, 98], [99]]),
        ([5, 6], [[5, 6]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ],
)
async def test_prompts_come_in_four_forms(gateway, prompt, ids):
    response = await gateway.complete(prompt)
    assert [choice["index"] for choice in response.json()["choices"]] == list(range(len(ids)))
    found = [(await submitted(gateway)) for _ in ids]
    assert sorted(unpack_ids(submit.prompt_ids) for submit in found) == sorted(ids)
    assert response.json()["usage"]["prompt_tokens"] == sum(map(len, ids))


async def test_messages_are_flattened_for_the_template(gateway):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "developer", "content": parts},
        {"role": "user", "content": "hi", "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
    ]
    response = await gateway.client.post("/v1/chat/completions", json={"messages": messages})
    assert response.status_code == 200
    chat = gateway.tokenizer.calls[0].chat
    assert json.loads(chat.messages_json) == [
        {"role": "system", "content": "be brief"},
        {"role": "developer", "content": "one\ntwo"},
        {"role": "user", "content": "hi", "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
    ]
    assert chat.add_generation_prompt
    assert not chat.continue_final_message


async def test_template_options_reach_the_tokenizer(gateway):
    await gateway.chat("hi", continue_final_message=True, chat_template_kwargs={"thinking": False}, reasoning_effort="low")
    chat = gateway.tokenizer.calls[0].chat
    assert (chat.continue_final_message, chat.add_generation_prompt) == (True, False)
    assert json.loads(chat.template_kwargs_json) == {"thinking": False, "reasoning_effort": "low"}


async def test_return_token_ids_shows_what_went_in_and_came_out(gateway):
    chat = (await gateway.chat("hi", return_token_ids=True)).json()
    assert chat["prompt_token_ids"] == ids_of("user:hi\n")
    assert chat["choices"][0]["token_ids"] == [*ids_of("hello"), 256]
    completion = (await gateway.complete("hi", return_token_ids=True)).json()
    assert completion["choices"][0]["prompt_token_ids"] == ids_of("hi")
    assert completion["choices"][0]["token_ids"] == [*ids_of("hello"), 256]


@pytest.mark.parametrize(("ending", "expected"), [({"stop_string": "!"}, "!"), ({"stop_token": 7}, 7), ({}, None)])
async def test_stop_reason_says_what_matched(tmp_path, ending, expected):
    async with running_gateway(tmp_path, FakeScheduler(say("hello", **ending))) as gateway:
        assert (await gateway.chat()).json()["choices"][0]["stop_reason"] == expected


async def test_running_out_of_tokens_is_length(tmp_path):
    async with running_gateway(tmp_path, FakeScheduler(say("hello", reason=LENGTH, eos=False))) as gateway:
        body = (await gateway.chat()).json()
        assert body["choices"][0]["finish_reason"] == "length"
        assert body["usage"]["completion_tokens"] == 5


async def test_usage_is_the_endings(tmp_path):
    async with running_gateway(tmp_path, FakeScheduler(say("hello", cached_tokens=4, completion_tokens=9))) as gateway:
        usage = (await gateway.chat()).json()["usage"]
        assert usage == {
            "prompt_tokens": 8,
            "completion_tokens": 9,
            "total_tokens": 17,
            "prompt_tokens_details": {"cached_tokens": 4},
        }


async def test_request_ids_are_echoed_or_made(gateway):
    given = await gateway.client.post("/v1/completions", json={"prompt": "a"}, headers={"x-request-id": "my-id.7"})
    assert given.headers["x-request-id"] == "my-id.7"
    assert given.json()["id"] == "cmpl-my-id.7"
    assert (await submitted(gateway)).label == "my-id.7"
    hostile = await gateway.client.post("/v1/completions", json={"prompt": "a"}, headers={"x-request-id": 'a b"<>'})
    assert len(hostile.headers["x-request-id"]) == 32
    failed = await gateway.complete([], model="tiny")
    assert failed.headers["x-request-id"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/models", 200), ("GET", "/health", 200), ("GET", "/nothing", 404), ("DELETE", "/v1/completions", 405)],
)
async def test_every_response_echoes_the_request_id(gateway, method, path, status):
    response = await gateway.client.request(method, path, headers={"x-request-id": "mine"})
    assert (response.status_code, response.headers.get_list("x-request-id")) == (status, ["mine"])
    assert len((await gateway.client.request(method, path)).headers["x-request-id"]) == 32


async def test_models_are_listed_under_all_their_names(tmp_path):
    async with running_gateway(tmp_path, served_model_name=["tiny", "org/tiny"]) as gateway:
        listed = (await gateway.client.get("/v1/models")).json()
        assert [(card["id"], card["max_model_len"], card["object"]) for card in listed["data"]] == [
            ("tiny", 512, "model"),
            ("org/tiny", 512, "model"),
        ]
        assert (await gateway.client.get("/v1/models/org/tiny")).json()["id"] == "org/tiny"
        missing = await gateway.client.get("/v1/models/none")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
        assert (await gateway.chat(model="org/tiny")).json()["model"] == "org/tiny"


async def test_health_and_version_answer(gateway):
    assert (await gateway.client.get("/health")).status_code == 200
    assert (await gateway.client.get("/version")).json()["version"]


async def test_keys_protect_v1_and_nothing_else(tmp_path):
    async with running_gateway(tmp_path, api_key=["secret", "other"]) as gateway:
        refused = await gateway.client.post("/v1/chat/completions", json={}, headers={"x-request-id": "mine"})
        assert refused.headers["x-request-id"] == "mine"
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "unauthorized")
        assert refused.headers["www-authenticate"] == "Bearer"
        for header in ("Bearer wrong", "Basic secret", "secret", "Bearer", "Bearer secret extra"):
            response = await gateway.client.get("/v1/models", headers={"authorization": header})
            assert response.status_code == 401, header
        for header in ("Bearer secret", "bearer other"):
            response = await gateway.client.get("/v1/models", headers={"authorization": header})
            assert response.status_code == 200, header
        for path in ("/health", "/ready", "/metrics", "/version"):
            assert (await gateway.client.get(path)).status_code == 200


async def test_cors_is_by_flag(tmp_path, gateway):
    headers = {"origin": "https://a.example", "access-control-request-method": "POST"}
    assert (await gateway.client.options("/v1/chat/completions", headers=headers)).status_code == 405
    other = tmp_path / "cors"
    other.mkdir()
    async with running_gateway(other, allowed_origins=["https://a.example"], api_key=["k"]) as open_gateway:
        response = await open_gateway.client.options("/v1/chat/completions", headers=headers)
        assert (response.status_code, response.headers["access-control-allow-origin"]) == (200, "https://a.example")


async def test_metrics_count_what_happened(gateway):
    await gateway.chat()
    await gateway.chat("hi", temperature=-1)
    await gateway.client.get("/nowhere")
    text = (await gateway.client.get("/metrics")).text
    for line in (
        'tokenloom:request_success_total{finished_reason="stop",model_name="tiny"} 1.0',
        'tokenloom:generation_tokens_total{model_name="tiny"} 6.0',
        'tokenloom:prompt_tokens_total{model_name="tiny"} 8.0',
        'tokenloom:time_to_first_token_seconds_count{model_name="tiny"} 1.0',
        'tokenloom:inter_token_latency_seconds_count{model_name="tiny"}',
        'tokenloom:e2e_request_latency_seconds_count{model_name="tiny"} 1.0',
        'tokenloom:request_rejected_total{model_name="tiny",reason="invalid_request"} 1.0',
        'tokenloom:http_requests_total{path="/v1/chat/completions",status="200"} 1.0',
        'tokenloom:http_requests_total{path="/v1/chat/completions",status="400"} 1.0',
        'tokenloom:http_requests_total{path="other",status="404"} 1.0',
        "tokenloom:gateway_session_up 1.0",
        'tokenloom:request_stage_seconds_count{model_name="tiny",stage="transport"} 1.0',
    ):
        assert line in text, line


async def test_a_stream_and_a_whole_response_say_the_same(tmp_path):
    text = 'naïve 🙂 \u2603\n"quoted" \\ end'
    async with running_gateway(tmp_path, FakeScheduler(say(text))) as gateway:
        whole = (await gateway.chat()).json()
        events = events_of((await gateway.chat(stream=True, stream_options={"include_usage": True})).text)
        streamed = "".join(event["choices"][0]["delta"].get("content", "") for event in events[:-2])
        assert streamed == whole["choices"][0]["message"]["content"] == text
        assert events[-2]["usage"] == whole["usage"]
