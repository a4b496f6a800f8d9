"""What controls the output reaches tokenizer and scheduler as the client asked for it."""

from __future__ import annotations

import json

import pytest
import pytest_asyncio

from libs.constraints import Constraint, ConstraintKind
from libs.packing import pack_ids, unpack_ids
from libs.sampling import SamplingParams
from libs.text.table import TextRule, TextTable, TokenClass
from services.gateway.api import decode
from tests.support.gateway_fakes import FINGERPRINT, FakeScheduler, FakeTokenizer, byte_table, facts, ids_of, say
from tests.support.gateway_process import Gateway, running_gateway
from tokenloom.scheduler.v1 import scheduler_pb2
from tokenloom.tokenizer.v1 import tokenizer_pb2

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}, "required": ["b"]}
TAG = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}
TOOL = {"type": "function", "function": {"name": "look", "description": "looks", "parameters": SCHEMA}}
THINK_END = 257

together = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory):
    async with running_gateway(tmp_path_factory.mktemp("control")) as running:
        yield running


async def submitted(gateway: Gateway) -> scheduler_pb2.Submit:
    return (await gateway.scheduler.submitted.get())[1]


async def sampling_of(gateway: Gateway, *, chat: bool = True, **fields) -> SamplingParams:
    response = await (gateway.chat if chat else gateway.complete)("hi", **fields)
    assert response.status_code == 200, response.text
    return SamplingParams.from_proto((await submitted(gateway)).sampling)


async def constraint_of(gateway: Gateway, **fields) -> Constraint | None:
    response = await gateway.chat("hi", **fields)
    assert response.status_code == 200, response.text
    submit = await submitted(gateway)
    return Constraint.from_proto(submit.constraint) if submit.HasField("constraint") else None


@pytest.mark.composes("penalties", "token bias")
@together
async def test_what_steers_the_distribution_reaches_the_scheduler(gateway):
    sampling = await sampling_of(
        gateway,
        repetition_penalty=1.25,
        presence_penalty=-2,
        frequency_penalty=0.5,
        logit_bias={"5": -100, "256": 0.25, "7": 0},
        allowed_token_ids=[9, 3, 9],
        include_stop_str_in_output=True,
        skip_special_tokens=False,
    )
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.25, -2, 0.5)
    assert sampling.logit_bias == ((5, -100), (256, 0.25))
    assert sampling.allowed_token_ids == (9, 3)
    assert (sampling.include_stop_in_output, sampling.keep_special_tokens) == (True, True)


@together
async def test_silence_and_neutral_values_are_the_same(gateway):
    silent = await sampling_of(gateway, seed=1)
    neutral = await sampling_of(
        gateway,
        seed=1,
        repetition_penalty=1,
        presence_penalty=0,
        frequency_penalty=0,
        logit_bias={},
        bad_words=[],
        include_stop_str_in_output=False,
        skip_special_tokens=True,
        logprobs=False,
        top_logprobs=0,
        vllm_xargs={},
        response_format={"type": "text"},
        tool_choice="none",
        truncate_prompt_tokens=None,
    )
    assert silent == neutral == SamplingParams(max_tokens=silent.max_tokens, seed=1)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (None, None)),
        ({"logprobs": True}, (0, None)),
        ({"logprobs": True, "top_logprobs": 3}, (3, None)),
        ({"prompt_logprobs": 2}, (None, 2)),
        ({"logprobs": False, "prompt_logprobs": 0}, (None, 0)),
    ],
)
@together
async def test_a_chat_asks_for_as_many_alternatives_as_it_shows(gateway, fields, expected):
    sampling = await sampling_of(gateway, **fields)
    assert (sampling.logprobs, sampling.prompt_logprobs) == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"logprobs": 0}, (0, None)),
        ({"logprobs": 4}, (4, None)),
        ({"echo": True}, (None, None)),
        ({"logprobs": 4, "echo": True}, (4, 4)),
        ({"logprobs": 1, "echo": True, "prompt_logprobs": 3}, (1, 3)),
        ({"n": 1, "best_of": 2}, (0, None)),
        ({"n": 1, "best_of": 2, "logprobs": 3}, (3, None)),
    ],
)
@together
async def test_a_completion_asks_for_what_it_shows_echoes_or_compares(gateway, fields, expected):
    sampling = await sampling_of(gateway, chat=False, **fields)
    assert (sampling.logprobs, sampling.prompt_logprobs) == expected
    for _ in range(1, fields.get("best_of", 1)):
        await submitted(gateway)


@together
async def test_nothing_but_the_prompt_takes_one_token(gateway):
    sampling = await sampling_of(gateway, chat=False, echo=True, max_tokens=0)
    assert sampling.max_tokens == 1


@together
async def test_bad_words_are_spelled_by_the_tokenizer_once(tmp_path_factory):
    class Speller(FakeTokenizer):
        async def Encode(self, request, context):
            response = await super().Encode(request, context)
            response.bad_words.extend(pack_ids(ids_of(word)) for word in request.bad_words)
            return response

    async with running_gateway(tmp_path_factory.mktemp("words"), tokenizer=Speller()) as running:
        response = await running.complete(["a", "b"], bad_words=["no", "way", "no"])
        assert response.status_code == 200
        assert sorted(list(call.bad_words) for call in running.tokenizer.calls) == [[], ["no", "way"]]
        for _ in range(2):
            sampling = SamplingParams.from_proto((await submitted(running)).sampling)
            assert sampling.bad_words == (tuple(ids_of("no")), tuple(ids_of("way")))


@pytest.mark.parametrize(
    ("fields", "keep_last"),
    [
        ({}, 0),
        ({"truncate_prompt_tokens": 7}, 7),
        ({"truncate_prompt_tokens": -1, "max_tokens": 12}, 500),
        ({"truncate_prompt_tokens": -1}, 496),
    ],
)
@together
async def test_truncation_leaves_the_last_tokens_of_a_prompt(gateway, fields, keep_last):
    await sampling_of(gateway, chat=False, **fields)
    assert gateway.tokenizer.calls[-1].keep_last == keep_last


@together
async def test_special_tokens_and_documents_reach_the_tokenizer(gateway):
    await sampling_of(gateway, chat=False, add_special_tokens=False)
    assert gateway.tokenizer.calls[-1].special_tokens == tokenizer_pb2.SPECIAL_TOKENS_NONE
    await sampling_of(gateway, add_special_tokens=True, documents=[{"title": "t", "text": "x"}], reasoning_effort="none")
    call = gateway.tokenizer.calls[-1]
    assert call.special_tokens == tokenizer_pb2.SPECIAL_TOKENS_ADD
    variables = json.loads(call.chat.template_kwargs_json)
    assert variables == {"documents": [{"title": "t", "text": "x"}], "reasoning_effort": "none", "enable_thinking": False}


@together
async def test_a_trusted_template_reaches_the_tokenizer(tmp_path_factory):
    async with running_gateway(tmp_path_factory.mktemp("trust"), trust_request_chat_template=True) as running:
        await sampling_of(running, chat_template="{{ messages[0].content }}")
        assert running.tokenizer.calls[-1].chat.template == "{{ messages[0].content }}"
        refused = await running.chat("hi", chat_template="")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "chat_template")


@together
async def test_arguments_for_the_operators_processors_travel_where_there_are_any(tmp_path_factory):
    scheduler = FakeScheduler()
    scheduler.model = facts(logits_processors=["dry"])
    async with running_gateway(tmp_path_factory.mktemp("xargs"), scheduler) as running:
        sampling = await sampling_of(running, vllm_xargs={"dry_base": 1.5, "breakers": ["a", "b"]})
        assert json.loads(sampling.extra_args_json) == {"dry_base": 1.5, "breakers": ["a", "b"]}


OPEN = json.dumps(SCHEMA, separators=(",", ":"))
# As vLLM's default backend has it: an object that lists properties has no others.
COMPACT = OPEN[:-1] + ',"additionalProperties":false}'
K = ConstraintKind
CONSTRAINTS = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, Constraint(K.JSON_OBJECT)),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
        Constraint(K.JSON_SCHEMA, (COMPACT,), param="response_format.json_schema.schema"),
    ),
    ({"structured_outputs": {"json": SCHEMA}}, Constraint(K.JSON_SCHEMA, (COMPACT,), param="structured_outputs.json")),
    (
        {"structured_outputs": {"json": json.dumps(SCHEMA, indent=3)}},
        Constraint(K.JSON_SCHEMA, (COMPACT,), param="structured_outputs.json"),
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": False}}},
        Constraint(K.JSON_SCHEMA, (OPEN,), param="response_format.json_schema.schema"),
    ),
    (
        {"structured_outputs": {"json": SCHEMA, "disable_additional_properties": False}},
        Constraint(K.JSON_SCHEMA, (OPEN,), param="structured_outputs.json"),
    ),
    ({"structured_outputs": {"json": True}}, Constraint(K.JSON_SCHEMA, ("true",), param="structured_outputs.json")),
    (
        {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}},
        Constraint(K.JSON_OBJECT, compact=True, param="structured_outputs.json_object"),
    ),
    ({"structured_outputs": {"regex": "a+"}}, Constraint(K.REGEX, ("a+",), param="structured_outputs.regex")),
    ({"structured_outputs": {"choice": ["a", "b", "a"]}}, Constraint(K.CHOICE, ("a", "b"), param="structured_outputs.choice")),
    ({"structured_outputs": {"grammar": 'root ::= "a"'}}, Constraint(K.GRAMMAR, ('root ::= "a"',), param="structured_outputs.grammar")),
    ({"guided_json": SCHEMA}, Constraint(K.JSON_SCHEMA, (COMPACT,), param="guided_json")),
    ({"guided_regex": "a+"}, Constraint(K.REGEX, ("a+",), param="guided_regex")),
    ({"guided_choice": ["a"]}, Constraint(K.CHOICE, ("a",), param="guided_choice")),
    ({"guided_grammar": 'root ::= "a"'}, Constraint(K.GRAMMAR, ('root ::= "a"',), param="guided_grammar")),
    ({"guided_regex": "a+", "guided_decoding_backend": "guidance:no-fallback"}, Constraint(K.REGEX, ("a+",), param="guided_regex")),
    (
        {"guided_json": SCHEMA, "guided_decoding_backend": "auto:disable-any-whitespace"},
        Constraint(K.JSON_SCHEMA, (COMPACT,), compact=True, param="guided_json"),
    ),
]


@pytest.mark.parametrize(("fields", "expected"), CONSTRAINTS)
@together
async def test_every_shape_of_a_constraint_becomes_one(gateway, fields, expected):
    found = await constraint_of(gateway, **fields)
    assert found == expected
    assert found is None or found.param == expected.param


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "structural_tag", **TAG}},
        {"structured_outputs": {"structural_tag": json.dumps({"type": "structural_tag", **TAG})}},
        {"structural_tag": json.dumps({"type": "structural_tag", **TAG})},
    ],
)
@together
async def test_structural_tags_come_in_three_shapes(gateway, fields):
    found = await constraint_of(gateway, **fields)
    assert found.kind is ConstraintKind.STRUCTURAL_TAG
    assert json.loads(found.text) == {"type": "structural_tag", **TAG}


@together
async def test_an_old_name_warns_once_with_the_new_one(gateway, monkeypatch):
    warned = []
    monkeypatch.setattr(decode._log, "warning", lambda _event, **fields: warned.append(fields))
    decode._warn_renamed.cache_clear()
    for _ in range(2):
        await constraint_of(gateway, guided_choice=["a"])
    assert warned == [{"old": "guided_choice", "new": "structured_outputs.choice"}]


@pytest.mark.refuses("structured output", reason="where the workers compile no constraints")
@together
async def test_constraints_are_refused_where_nothing_compiles_them(tmp_path_factory):
    scheduler = FakeScheduler()
    scheduler.model = facts(constraint_backend="")
    async with running_gateway(tmp_path_factory.mktemp("none"), scheduler) as running:
        for fields, param in (({"response_format": {"type": "json_object"}}, "response_format"), ({"guided_regex": "a"}, "guided_regex")):
            error = (await running.chat("hi", **fields)).json()["error"]
            assert (error["code"], error["param"]) == ("unsupported", param)


@together
async def test_a_choice_of_tools_becomes_a_constraint_and_the_template_is_told(gateway):
    assert await constraint_of(gateway, tools=[TOOL]) is None
    assert json.loads(gateway.tokenizer.calls[-1].chat.tools_json) == [TOOL]
    for choice in ("required", {"type": "function", "function": {"name": "look"}}):
        constraint = await constraint_of(gateway, tools=[TOOL], tool_choice=choice, max_tokens=4)
        assert constraint.kind is ConstraintKind.JSON_SCHEMA
    assert await constraint_of(gateway, tools=[TOOL], tool_choice="none") is None


@together
async def test_a_call_that_must_be_and_a_format_contradict_each_other(gateway):
    response = await gateway.chat("hi", tools=[TOOL], tool_choice="required", response_format={"type": "json_object"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "response_format")


@pytest.mark.composes("tools", "structured output")
@together
async def test_an_output_that_is_held_to_json_is_content_and_no_call(tmp_path_factory):
    call = '<tool_call>{"name": "look", "arguments": {"b": 1}}</tool_call>'
    async with running_gateway(tmp_path_factory.mktemp("calls"), FakeScheduler(say(call))) as running:
        message = (await running.chat("hi", tools=[TOOL])).json()["choices"][0]["message"]
        assert message["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"b": 1}'}
        message = (await running.chat("hi", tools=[TOOL], response_format={"type": "json_object"})).json()["choices"][0]["message"]
        assert (message["content"], "tool_calls" in message) == (call, False)


def thinking_table() -> TextTable:
    plain = byte_table()
    tokens, classes = (*plain.tokens, b"</think>"), plain.classes + bytes([TokenClass.ADDED])
    return TextTable(FINGERPRINT, tokens, classes, TextRule.BYTE_LEVEL, verified=True)


def thinking_tokenizer() -> FakeTokenizer:
    tokenizer = FakeTokenizer()
    tokenizer.table = thinking_table()
    tokenizer.spell = lambda text: [THINK_END if part == "\0" else ord(part) for part in text.replace("</think>", "\0")]
    return tokenizer


@pytest.mark.composes("structured output", "reasoning")
@together
async def test_a_constraint_begins_behind_the_reasoning_unless_the_prompt_has_closed_it(tmp_path_factory):
    tokenizer = thinking_tokenizer()
    scheduler = FakeScheduler()
    scheduler.model = facts(vocab_size=258)
    async with running_gateway(tmp_path_factory.mktemp("think"), scheduler, tokenizer, reasoning_parser="qwen3") as running:
        for content, begins in (("hi", (THINK_END,)), ("hi</think>\n", ()), ("</think> an earlier answer", (THINK_END,))):
            assert (await running.chat(content, guided_regex="a+")).status_code == 200
            submit = await submitted(running)
            assert Constraint.from_proto(submit.constraint).begin_after == begins
            assert (THINK_END in unpack_ids(submit.prompt_ids)) == ("</think>" in content)


@together
async def test_text_is_no_reasoning_where_the_prompt_has_closed_it(tmp_path_factory):
    """deepseek_r1 takes the output to begin within the reasoning, unless it cannot."""
    async with running_gateway(
        tmp_path_factory.mktemp("closed"), FakeScheduler(say("so</think>done")), reasoning_parser="deepseek_r1"
    ) as running:
        for content, continued, expected in (
            ("hi", False, ("so", "done")),
            ("</think>\n\n", False, (None, "so</think>done")),
            ("<think>a", True, ("so", "done")),
            ("<think>a</think>b", True, (None, "so</think>done")),
        ):
            message = (await running.chat(content, continue_final_message=continued)).json()["choices"][0]["message"]
            assert (message.get("reasoning_content"), message["content"]) == expected, content


@together
async def test_text_is_reasoning_where_the_prompt_has_opened_it(tmp_path_factory):
    """As Qwen3's thinking models have it. In qwen3 other text is reasoning only where it says so itself."""
    async with running_gateway(
        tmp_path_factory.mktemp("opened"), FakeScheduler(say("so</think>done")), reasoning_parser="qwen3"
    ) as running:
        for content, continued, expected in (
            ("hi<think>\n", False, ("so", "done")),
            ("hi", False, (None, "so</think>done")),
            ("hi<think>\n</think>\n", False, (None, "so</think>done")),
            ("<think>a", True, ("so", "done")),
            ("a", True, (None, "so</think>done")),
        ):
            message = (await running.chat(content, continue_final_message=continued)).json()["choices"][0]["message"]
            assert (message.get("reasoning_content"), message["content"]) == expected, content


@together
async def test_what_a_constraint_waits_for_is_reasoning_however_it_begins(tmp_path_factory):
    """Else the gate and the reader would disagree: free text as content, and the constrained behind it."""
    tokenizer = thinking_tokenizer()
    scheduler = FakeScheduler(say("so</think>aaa"))
    scheduler.model = facts(vocab_size=258)
    async with running_gateway(tmp_path_factory.mktemp("gate"), scheduler, tokenizer, reasoning_parser="qwen3") as running:
        message = (await running.chat("hi", guided_regex="a+")).json()["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("so", "aaa")


@pytest.mark.refuses("structured output", reason="where a reasoning parser's end is no token of the model")
@together
async def test_a_constraint_that_could_never_begin_is_refused(tmp_path_factory):
    async with running_gateway(tmp_path_factory.mktemp("mute"), reasoning_parser="qwen3") as running:
        error = (await running.chat("hi", guided_regex="a+")).json()["error"]
        assert (error["code"], error["param"]) == ("unsupported", "guided_regex")
        await running.until_idle()
