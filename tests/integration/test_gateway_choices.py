"""Several choices of one prompt: one submit each, the prompt encoded and counted once, and all of them live and die together."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest

from libs.errors import ErrorCode, TokenloomError
from libs.packing import unpack_ids
from tests.support.gateway_fakes import EOS, FAILED, LENGTH, FakeScheduler, facts, ids_of, say, silence
from tests.support.gateway_process import Gateway, events_of, running_gateway, until
from tests.support.raw_http import RawClient
from tokenloom.common.v1 import common_pb2

SIBLING_FAILED = common_pb2.CANCEL_REASON_SIBLING_FAILED
DISCONNECTED = common_pb2.CANCEL_REASON_CLIENT_DISCONNECTED


async def says_its_place(session, submit):
    """Answers with the prompt and the number of the choice, so that nothing can be taken for something else."""
    text = bytes(unpack_ids(submit.prompt_ids)).decode() + str(submit.sampling.choice_index)
    cached = {"cached_tokens": 16 * (1 + submit.sampling.choice_index)}
    await say(text, **cached)(session, submit)


@pytest.fixture
async def gateway(tmp_path):
    async with running_gateway(tmp_path, FakeScheduler(says_its_place)) as running:
        yield running


@pytest.fixture
async def quiet(tmp_path):
    """A gateway whose scheduler says only what the test says."""
    async with running_gateway(tmp_path, FakeScheduler(silence)) as running:
        yield running


async def submitted(gateway: Gateway, count: int):
    """The next `count` submits, and the session that carried the last."""
    pairs = [await gateway.scheduler.submitted.get() for _ in range(count)]
    return pairs[-1][0], [submit for _, submit in pairs]


@pytest.mark.composes("n", "seed")
async def test_every_choice_is_a_submit_and_the_later_ones_name_the_first(gateway):
    response = await gateway.complete("ab", n=3, seed=5)
    assert response.status_code == 200, response.text
    _, submits = await submitted(gateway, 3)
    first = submits[0].id
    assert [submit.parent_id for submit in submits] == [0, first, first]
    assert [submit.sampling.choice_index for submit in submits] == [0, 1, 2]
    assert {submit.sampling.seed for submit in submits} == {5}
    assert [submit.choices for submit in submits] == [1, 1, 1]
    assert {bytes(submit.prompt_ids) for submit in submits} == {submits[0].prompt_ids}
    assert len(gateway.tokenizer.calls) == 1, "the prompt is encoded once"


async def test_a_drawn_seed_is_shared_by_the_choices_of_a_prompt_and_not_by_prompts(gateway):
    await gateway.complete(["a", "b"], n=2)
    _, submits = await submitted(gateway, 4)
    seeds = {submit.prompt_ids: set() for submit in submits}
    for submit in submits:
        seeds[submit.prompt_ids].add(submit.sampling.seed)
    assert [len(drawn) for drawn in seeds.values()] == [1, 1]
    assert len(set.union(*seeds.values())) == 2


async def test_choices_of_a_chat_come_under_their_index(gateway):
    body = (await gateway.chat("hi", n=3)).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert [choice["message"]["content"] for choice in body["choices"]] == [f"user:hi\n{number}" for number in range(3)]
    assert len({choice["finish_reason"] for choice in body["choices"]}) == 1


@pytest.mark.composes("n", "prompt list")
async def test_every_prompt_of_a_list_gets_its_choices(gateway):
    body = (await gateway.complete(["a", "bb", "ccc"], n=2, return_token_ids=True)).json()
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    assert [choice["text"] for choice in body["choices"]] == ["a0", "a1", "bb0", "bb1", "ccc0", "ccc1"]
    assert [len(choice["prompt_token_ids"]) for choice in body["choices"]] == [1, 1, 2, 2, 3, 3]
    _, submits = await submitted(gateway, 6)
    parents = {submit.id: submit for submit in submits if not submit.parent_id}
    assert len(parents) == 3
    for submit in submits:
        if submit.parent_id:
            assert parents[submit.parent_id].prompt_ids == submit.prompt_ids


@pytest.mark.composes("n", "prompt list")
async def test_usage_counts_each_prompt_once_and_every_output(gateway):
    usage = (await gateway.complete(["a", "bb"], n=3)).json()["usage"]
    outputs = 3 * 3 + 3 * 4
    assert usage == {
        "prompt_tokens": 3,
        "completion_tokens": outputs,
        "total_tokens": 3 + outputs,
        # The first choice of each prompt: what its siblings find in the cache is its own work.
        "prompt_tokens_details": {"cached_tokens": 32},
    }


@pytest.mark.composes("n", "streaming")
@pytest.mark.parametrize("api", ["chat", "completion"])
async def test_a_stream_says_of_each_choice_what_the_whole_response_says(gateway, api):
    ask = gateway.chat if api == "chat" else gateway.complete
    whole = (await ask("hi", n=3)).json()
    events = events_of((await ask("hi", n=3, stream=True, stream_options={"include_usage": True})).text)
    assert events[-1] == "[DONE]"
    assert (events[-2]["choices"], events[-2]["usage"]) == ([], whole["usage"])
    texts, reasons = ["", "", ""], {}
    for event in events[:-2]:
        assert event["usage"] is None
        (choice,) = event["choices"]
        assert choice["index"] not in reasons, "nothing of a choice comes after its finish_reason"
        texts[choice["index"]] += choice["delta"].get("content", "") if api == "chat" else choice["text"]
        if choice["finish_reason"]:
            reasons[choice["index"]] = choice["finish_reason"]
    assert texts == [choice["message"]["content"] if api == "chat" else choice["text"] for choice in whole["choices"]]
    assert reasons == {0: "stop", 1: "stop", 2: "stop"}


async def test_a_chat_stream_opens_every_choice_with_its_role(gateway):
    events = events_of((await gateway.chat("hi", n=2, stream=True, return_token_ids=True)).text)
    opening = [event["choices"][0] for event in events[:2]]
    assert [(choice["index"], choice["delta"]) for choice in opening] == [
        (0, {"role": "assistant", "content": ""}),
        (1, {"role": "assistant", "content": ""}),
    ]
    assert events[0]["prompt_token_ids"] == ids_of("user:hi\n")
    assert all("prompt_token_ids" not in event for event in events[1:-1])


async def test_usage_in_every_chunk_counts_what_was_delivered_of_all_choices(quiet):
    options = {"include_usage": True, "continuous_usage_stats": True}
    task = asyncio.create_task(quiet.complete("abc", n=2, stream=True, stream_options=options))
    session, (first, second) = await submitted(quiet, 2)
    session.emit(first.id, ids_of("x"))
    session.emit(second.id, [*ids_of("yy"), EOS])
    session.emit(second.id, [], ending=session.ending(second.id, cached_tokens=48))
    session.emit(first.id, [EOS])
    session.emit(first.id, [], ending=session.ending(first.id, cached_tokens=32))
    usages = [event["usage"] for event in events_of((await task).text)[:-1]]
    assert {usage["prompt_tokens"] for usage in usages} == {3}
    assert [usage["completion_tokens"] for usage in usages] == sorted(usage["completion_tokens"] for usage in usages)
    assert (usages[-1]["completion_tokens"], usages[-1]["prompt_tokens_details"]) == (5, {"cached_tokens": 32})
    assert all("prompt_tokens_details" not in usage for usage in usages[:-2]), "not known yet, which is not 0"


async def test_choices_end_each_for_its_own_reason(quiet):
    task = asyncio.create_task(quiet.complete("a", n=2))
    session, (first, second) = await submitted(quiet, 2)
    session.emit(second.id, ids_of("long"))
    session.emit(second.id, [], ending=session.ending(second.id, LENGTH))
    session.emit(first.id, [*ids_of("short"), EOS], ending=session.ending(first.id, stop_token=EOS))
    choices = (await task).json()["choices"]
    assert [(choice["finish_reason"], choice["stop_reason"]) for choice in choices] == [("stop", EOS), ("length", None)]


async def test_choices_and_prompts_together_are_bounded(tmp_path):
    async with running_gateway(tmp_path, FakeScheduler(says_its_place), max_prompts=6) as gateway:
        assert (await gateway.complete(["a", "b", "c"], n=2)).status_code == 200
        for prompt, n in ((["a", "b", "c"], 3), ("a", 7)):
            response = await gateway.complete(prompt, n=n)
            assert (response.status_code, response.json()["error"]["param"]) == (400, "n")
            assert "6" in response.json()["error"]["message"]
        assert (await gateway.complete(["a"] * 7, n=7)).json()["error"]["param"] == "prompt"


@pytest.mark.composes("n", "prompt list", "bounded queue")
async def test_more_sequences_than_may_ever_be_live_are_a_400_and_not_worth_another_try(tmp_path):
    scheduler = FakeScheduler(says_its_place)
    scheduler.model = facts(max_live_sequences=4)
    async with running_gateway(tmp_path, scheduler) as gateway:
        for prompt, n, param in (("a", 5, "n"), (["a", "b", "c"], 2, "n"), (list("abcde"), 1, "prompt")):
            response = await gateway.complete(prompt, n=n)
            error = response.json()["error"]
            assert (response.status_code, error["code"], error["param"]) == (400, "cannot_fit", param)
            assert "4" in error["message"]
            assert "retry-after" not in response.headers
        assert scheduler.submitted.empty()
        assert (await gateway.complete(["a", "b"], n=2)).status_code == 200
        await gateway.until_idle()


@pytest.mark.composes("n", "prompt list", "bounded queue")
async def test_choices_of_more_tokens_than_may_ever_be_live_are_a_400_but_one_alone_runs(tmp_path):
    scheduler = FakeScheduler(says_its_place)
    scheduler.model = facts(max_live_tokens=20)
    async with running_gateway(tmp_path, scheduler) as gateway:
        for prompt, n, param in (("abcde", 3, "n"), (["abcde", "ab", "a"], 1, "prompt")):
            response = await gateway.complete(prompt, n=n, max_tokens=5)
            error = response.json()["error"]
            assert (response.status_code, error["code"], error["param"]) == (400, "cannot_fit", param)
        assert scheduler.submitted.empty()
        assert (await gateway.complete("abcde", n=2, max_tokens=5)).status_code == 200, "exactly as many"
        assert (await gateway.complete("abcde", max_tokens=30)).status_code == 200
        await gateway.until_idle()


async def test_best_of_is_fine_where_it_equals_n(gateway):
    assert (await gateway.complete("a", n=2, best_of=2)).status_code == 200


@pytest.mark.refuses("greedy", "n", reason="all choices would be equal")
async def test_greedy_choices_are_refused_also_where_the_model_asks_for_greedy(tmp_path):
    scheduler = FakeScheduler(says_its_place)
    scheduler.model = facts(defaults=common_pb2.GenerationDefaults(temperature=0))
    async with running_gateway(tmp_path, scheduler) as gateway:
        response = await gateway.complete("a", n=2)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "n")
        assert "greedy" in response.json()["error"]["message"]
        assert (await gateway.complete("a", n=2, temperature=0.5)).status_code == 200
        assert (await gateway.complete("a", n=1)).status_code == 200


@pytest.mark.composes("n", "bounded queue")
async def test_n_choices_cost_n_of_the_window(quiet):
    quiet.scheduler.set_window(max_outstanding=4, max_outstanding_tokens=10_000, ready=True)
    await until(lambda: quiet.mesh.session.window.max_outstanding == 4)
    task = asyncio.create_task(quiet.complete("abc", n=3, max_tokens=7))
    session, submits = await submitted(quiet, 3)
    assert (quiet.mesh.admission.sequences, quiet.mesh.admission.tokens) == (3, 3 * (3 + 7))
    response = await quiet.complete("a", n=2)
    assert (response.status_code, response.json()["error"]["code"]) == (429, "over_window")
    session.emit(submits[1].id, [EOS], ending=session.ending(submits[1].id))
    await until(lambda: quiet.mesh.admission.sequences == 2)
    for submit in (submits[0], submits[2]):
        session.emit(submit.id, [EOS], ending=session.ending(submit.id))
    assert (await task).status_code == 200
    await quiet.until_idle()


@pytest.mark.composes("n", "cancel", "streaming")
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_cancels_every_choice(quiet, stream):
    async with RawClient(quiet.port) as client:
        await client.post("/v1/completions", {"prompt": "a", "n": 3, "stream": stream})
        _, submits = await submitted(quiet, 3)
    cancels = [await quiet.scheduler.cancels.get() for _ in range(3)]
    assert {cancel.id for cancel in cancels} == {submit.id for submit in submits}
    assert {cancel.reason for cancel in cancels} == {DISCONNECTED}
    await quiet.until_idle()
    assert await quiet.metric("tokenloom:request_cancelled_total", model_name="tiny", reason="client_disconnected") == 3


@pytest.mark.parametrize("failing", [0, 1])
async def test_a_choice_that_fails_cancels_its_siblings_and_fails_the_request(quiet, failing):
    task = asyncio.create_task(quiet.complete("a", n=2))
    session, submits = await submitted(quiet, 2)
    error = TokenloomError(ErrorCode.NON_FINITE, "not finite").to_proto()
    session.emit(submits[failing].id, [], ending=session.ending(submits[failing].id, FAILED, error=error))
    assert ((await task).status_code, (await task).json()["error"]["code"]) == (500, "non_finite")
    cancel = await quiet.scheduler.cancels.get()
    assert (cancel.id, cancel.reason) == (submits[1 - failing].id, SIBLING_FAILED)
    await quiet.until_idle()


@pytest.mark.composes("n", "bounded queue", "streaming")
async def test_a_choice_that_fails_in_the_middle_of_a_stream_ends_it_with_an_event(quiet):
    async with RawClient(quiet.port) as client:
        await client.post("/v1/completions", {"prompt": "a", "n": 2, "stream": True})
        session, (first, second) = await submitted(quiet, 2)
        session.emit(first.id, ids_of("partial"))
        await client.read_until(b"partial")
        error = TokenloomError(ErrorCode.QUEUE_FULL, "full", retry_after_ms=2000).to_proto()
        session.emit(second.id, [], ending=session.ending(second.id, FAILED, error=error, was_accepted=False))
        text = (await client.read_until(b"data: [DONE]\n\n")).decode()
    event = text[text.index('data: {"error"') :].splitlines()[0].removeprefix("data: ")
    assert (json.loads(event)["error"]["code"], json.loads(event)["error"]["type"]) == ("queue_full", "rate_limit_error")
    assert (await quiet.scheduler.cancels.get()).id == first.id
    await quiet.until_idle()


@pytest.mark.composes("n", "bounded queue")
async def test_a_choice_without_room_in_the_queue_is_a_429_for_all(quiet):
    task = asyncio.create_task(quiet.complete("a", n=2))
    session, (_, second) = await submitted(quiet, 2)
    error = TokenloomError(ErrorCode.QUEUE_FULL, "1024 requests are live, the limit", retry_after_ms=1500).to_proto()
    session.emit(second.id, [], ending=session.ending(second.id, FAILED, error=error, was_accepted=False))
    response = await task
    assert (response.status_code, response.json()["error"]["code"], response.headers["retry-after"]) == (429, "queue_full", "2")
    await quiet.until_idle()


@pytest.mark.composes("n", "session loss", "streaming")
async def test_after_a_lost_session_every_choice_goes_on_where_it_was(quiet):
    task = asyncio.create_task(quiet.complete("a", n=3, stream=True, max_tokens=50))
    session, submits = await submitted(quiet, 3)
    delivered = ["one", "", "three"]
    for submit, text in zip(submits, delivered, strict=True):
        session.emit(submit.id, ids_of(text))
    await until(lambda: all(len(choice.ticket.output) == len(text) for choice, text in zip(_choices(quiet), delivered, strict=True)))
    session.close()
    session, again = await submitted(quiet, 3)
    assert [submit.attempt for submit in again] == [1, 1, 1]
    assert [bytes(unpack_ids(submit.output_ids)).decode() for submit in again] == delivered
    assert [submit.parent_id for submit in again] == [0, submits[0].id, submits[0].id], "the prompt is shared again"
    assert [submit.sampling for submit in again] == [submit.sampling for submit in submits]
    for submit, rest in zip(again, (" more", "two", ""), strict=True):
        session.emit(submit.id, [*ids_of(rest), EOS])
        session.emit(submit.id, [], ending=session.ending(submit.id))
    texts = ["", "", ""]
    for event in events_of((await task).text)[:-1]:
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert texts == ["one more", "two", "three"]
    await quiet.until_idle()


def _choices(gateway: Gateway):
    (generation,) = gateway.mesh.open
    return generation.choices


@pytest.mark.composes("n", "session loss")
async def test_an_ended_choice_is_not_submitted_again_after_a_lost_session(quiet):
    task = asyncio.create_task(quiet.complete("a", n=2))
    session, (first, second) = await submitted(quiet, 2)
    session.emit(first.id, [*ids_of("done"), EOS])
    session.emit(first.id, [], ending=session.ending(first.id))
    await until(lambda: len(quiet.mesh.book) == 1)
    session.close()
    session, (again,) = await submitted(quiet, 1)
    assert (again.id, again.attempt, again.parent_id) == (second.id, 1, first.id)
    session.emit(again.id, [*ids_of("too"), EOS], ending=None)
    session.emit(again.id, [], ending=session.ending(again.id))
    assert [choice["text"] for choice in (await task).json()["choices"]] == ["done", "too"]
    assert quiet.scheduler.submitted.empty()


async def test_metrics_count_each_prompt_once_and_every_choice(gateway):
    await gateway.complete("abcd", n=3)
    await gateway.until_idle()
    assert await gateway.metric("tokenloom:prompt_tokens_total", model_name="tiny") == 4
    assert await gateway.metric("tokenloom:request_prompt_tokens_count", model_name="tiny") == 1
    assert await gateway.metric("tokenloom:request_generation_tokens_count", model_name="tiny") == 3
    assert await gateway.metric("tokenloom:request_success_total", model_name="tiny", finished_reason="stop") == 3


async def test_the_trace_counts_as_usage_does(gateway):
    usage = (await gateway.complete("abcd", n=3)).json()["usage"]
    await gateway.until_idle()
    await until(lambda: any(span.name.startswith("POST") for span in gateway.spans.finished))
    (root,) = [span for span in gateway.spans.finished if span.name.startswith("POST")]
    assert root.attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"] == 4
    assert root.attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    assert root.attributes["gen_ai.usage.cache_read.input_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]


async def test_openais_client_reads_n_choices(gateway):
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        whole = await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}], n=2)
        assert [choice.message.content for choice in whole.choices] == ["user:hi\n0", "user:hi\n1"]
        completion = await client.completions.create(model="tiny", prompt=["a", "b"], n=2, max_tokens=8)
        assert [choice.text for choice in completion.choices] == ["a0", "a1", "b0", "b1"]
