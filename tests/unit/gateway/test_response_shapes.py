"""What responses look like: log-probabilities in OpenAI's and vLLM's shapes, echo, best_of, special tokens, messages with calls."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.logprobs import TokenLogprobs
from libs.text.decoding import decode_text
from libs.text.table import TokenClass
from services.gateway.api.chat_writer import ChatWriter
from services.gateway.api.completion_writer import CompletionWriter
from services.gateway.api.logprobs import MIN_LOGPROB, TokenNames, chat_logprobs, mean_logprob
from services.gateway.api.messages import MessageReader, count_until, new_mistral_call_id
from services.gateway.parsers.base import CallArguments, CallBegins, Content, Reasoning
from services.gateway.wanted import Shown
from tests.support.responses import EOS, TABLE, VOCAB, Told, response_of, streamed, told, whole
from tests.unit.libs.text.tables import TABLES

HELLO, WOR, LD, EURO, STOP_IT = range(257, 262)


def completion(says: list[Told], shown: Shown, **request):
    response = response_of(shown, **request)
    return whole(response, CompletionWriter(response.form()), says)


def chat(says: list[Told], shown: Shown, **request):
    response = response_of(shown, **request)
    return whole(response, ChatWriter(response.form(), MessageReader), says)


def test_a_chats_token_has_its_text_its_bytes_and_as_many_alternatives_as_asked():
    (choice,) = chat([told([HELLO, WOR], logprobs=2)], Shown(logprobs=2))["choices"]
    first, second = choice["logprobs"]["content"]
    assert (choice["logprobs"]["refusal"], first["token"], first["logprob"], first["bytes"]) == (None, "hello", -0.25, list(b"hello"))
    assert [(top["token"], top["logprob"], top["bytes"]) for top in first["top_logprobs"]] == [
        ("hello", -0.25, list(b"hello")),
        (" wor", -0.5, list(b" wor")),
    ]
    assert [top["token"] for top in second["top_logprobs"]] == ["ld", "\u20ac!"]


def test_a_token_that_is_part_of_a_character_has_a_name_of_its_own_and_the_bytes_that_join_to_it():
    smile = "\U0001f642".encode()
    (choice,) = chat([told(list(smile), logprobs=0)], Shown(logprobs=0))["choices"]
    tokens = choice["logprobs"]["content"]
    assert [token["token"] for token in tokens] == [f"\\x{byte:02x}" for byte in smile]
    assert bytes(byte for token in tokens for byte in token["bytes"]).decode() == choice["message"]["content"] == "\U0001f642"
    (choice,) = completion([told(list(smile), logprobs=0)], Shown(logprobs=0))["choices"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 0, 0]


@pytest.mark.parametrize("keep_special", [False, True])
def test_the_end_of_sequence_is_listed_as_it_is_counted_and_adds_no_bytes_where_it_is_skipped(keep_special):
    answer = chat(
        [told([HELLO, EOS], keep_special=keep_special, logprobs=0)],
        Shown(logprobs=0, keep_special_tokens=keep_special, return_token_ids=True),
    )
    (choice,) = answer["choices"]
    last = choice["logprobs"]["content"][-1]
    assert (last["token"], last["bytes"]) == ("<eos>", list(b"<eos>") if keep_special else [])
    assert choice["message"]["content"] == "hello"
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"]) == answer["usage"]["completion_tokens"] == 2


@settings(deadline=None)
@given(st.sampled_from(TABLES), st.lists(st.integers(0, 30), max_size=12))
def test_bytes_join_to_the_text_where_decoders_drop_the_first_space_too(table, ids):
    spelled = [token_id for token_id in ids if table.token_class(token_id) is not TokenClass.BYTE or table.token_bytes(token_id) != b" "]
    names, text = TokenNames(table), decode_text(table, spelled)
    listed = chat_logprobs(names, names.output(), [TokenLogprobs(token_id, -1.0, 1) for token_id in spelled], 0)
    if "\ufffd" not in text:  # what a text shows in place of invalid bytes
        assert b"".join(bytes(token.bytes) for token in listed.content).decode() == text


def test_tokens_that_a_stop_string_cuts_from_the_text_are_listed():
    (choice,) = completion([told([HELLO, STOP_IT, LD], stop=("STOP",), logprobs=0)], Shown(logprobs=0), stop=("STOP",))["choices"]
    assert (choice["text"], choice["stop_reason"]) == ("hello", "STOP")
    assert (choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]) == (["hello", "STOP it"], [0, 5])


def test_a_stop_string_that_stays_in_the_output_ends_the_text():
    (choice,) = completion([told([HELLO, STOP_IT], stop=("STOP",), include_stop=True)], Shown())["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("helloSTOP", "stop")


def test_a_completions_columns_name_the_token_itself_beside_its_alternatives():
    said = told([HELLO, ord("a")], logprobs=1)
    said.logprobs[1] = TokenLogprobs(ord("a"), -9.5, 40, [HELLO], [-0.25])
    (choice,) = completion([said], Shown(logprobs=1))["choices"]
    assert choice["logprobs"] == {
        "text_offset": [0, 5],
        "token_logprobs": [-0.25, -9.5],
        "tokens": ["hello", "a"],
        "top_logprobs": [{"hello": -0.25}, {"a": -9.5, "hello": -0.25}],
    }


def test_infinitely_unlikely_tokens_have_a_number_that_json_knows():
    said = told([HELLO], logprobs=4)
    said.logprobs[0] = TokenLogprobs(HELLO, -math.inf, 9, [1, 2, 3, 4], [-0.25, -math.inf, -math.inf, -math.inf])
    (choice,) = completion([said], Shown(logprobs=4))["choices"]
    assert (choice["logprobs"]["token_logprobs"], min(choice["logprobs"]["top_logprobs"][0].values())) == ([MIN_LOGPROB], MIN_LOGPROB)
    (choice,) = chat([said], Shown(logprobs=4))["choices"]
    assert choice["logprobs"]["content"][0]["logprob"] == MIN_LOGPROB == choice["logprobs"]["content"][0]["top_logprobs"][-1]["logprob"]


def test_tokens_are_named_by_their_ids_where_that_is_asked_for():
    (choice,) = chat([told([HELLO], logprobs=1)], Shown(logprobs=1, tokens_as_ids=True))["choices"]
    (token,) = choice["logprobs"]["content"]
    assert (token["token"], token["bytes"], token["top_logprobs"][0]["token"]) == ("token_id:257", list(b"hello"), "token_id:257")
    (choice,) = completion([told([HELLO], logprobs=1)], Shown(logprobs=1, tokens_as_ids=True))["choices"]
    assert (choice["logprobs"]["tokens"], list(choice["logprobs"]["top_logprobs"][0])) == (["token_id:257"], ["token_id:257"])


def test_without_being_asked_for_there_are_none():
    assert chat([told([HELLO])], Shown())["choices"][0]["logprobs"] is None
    assert completion([told([HELLO])], Shown())["choices"][0]["logprobs"] is None


@pytest.mark.composes("logprobs", "n", "prompt list")
def test_prompt_logprobs_are_vllms_of_every_choice_null_first():
    answer = completion([told([HELLO])] * 4, Shown(prompt_logprobs=2), prompts=("ab", "c"), n=2)
    first, second, third, fourth = [choice["prompt_logprobs"] for choice in answer["choices"]]
    assert first == second
    assert first == [
        None,
        {
            "98": {"logprob": -0.25 * (VOCAB - 98), "rank": VOCAB - 98, "decoded_token": "b"},
            "99": {"logprob": -0.25, "rank": 1, "decoded_token": "c"},
            "100": {"logprob": -0.5, "rank": 2, "decoded_token": "d"},
        },
    ]
    assert third == fourth == [None]
    assert chat([told([HELLO])], Shown(prompt_logprobs=0))["prompt_logprobs"][0] is None
    assert "prompt_logprobs" not in chat([told([HELLO])], Shown())


@pytest.mark.composes("logprobs", "n", "prompt list")
def test_an_echoed_prompt_stands_before_every_choice_with_its_tokens():
    answer = completion([told([HELLO], logprobs=0)] * 4, Shown(logprobs=0, echo=True), prompts=("ab", "\u20ac"), n=2)
    assert [choice["text"] for choice in answer["choices"]] == ["abhello"] * 2 + ["\u20achello"] * 2
    for choice in answer["choices"][:2]:
        assert choice["logprobs"]["tokens"] == ["a", "b", "hello"]
        assert (choice["logprobs"]["text_offset"], choice["logprobs"]["token_logprobs"][0]) == ([0, 1, 2], None)
        assert choice["logprobs"]["top_logprobs"][0] is None
        assert "prompt_logprobs" not in choice
    assert answer["choices"][3]["logprobs"]["text_offset"] == [0, 0, 0, 1]


def test_an_echo_alone_shows_nothing_of_the_token_that_had_to_be_generated():
    shown = Shown(logprobs=1, echo=True, echo_only=True, return_token_ids=True)
    answer = completion([told([HELLO, EOS], logprobs=1)], shown, prompts=("ab",))
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"], choice["token_ids"]) == ("ab", "length", None, [])
    assert choice["logprobs"]["tokens"] == ["a", "b"]
    assert (answer["usage"]["completion_tokens"], answer["usage"]["total_tokens"]) == (0, answer["usage"]["prompt_tokens"])


def test_echo_and_prompt_logprobs_each_list_as_many_alternatives_as_they_were_asked_for():
    answer = completion([told([HELLO], logprobs=1)], Shown(logprobs=1, prompt_logprobs=3, echo=True), prompts=("ab",))
    (choice,) = answer["choices"]
    assert len(choice["logprobs"]["top_logprobs"][1]) == 2
    assert len(choice["prompt_logprobs"][1]) == 4


def test_a_stream_that_echoes_begins_each_choice_with_its_prompt():
    response = response_of(Shown(echo=True), n=2)
    chunks = streamed(response, CompletionWriter(response.form()), [told([HELLO, WOR])] * 2, [(0, 1), (1, 1)])
    parts = [chunk["choices"][0] for chunk in chunks[:-1]]
    assert [(part["index"], part["text"]) for part in parts] == [(0, "abchello"), (1, "abchello"), (0, " wor"), (1, " wor")]


def test_what_a_tokenizer_put_before_a_text_is_listed_but_not_echoed():
    response = response_of(Shown(logprobs=0, echo=True), prompts=("ab",))
    (choice,) = response.choices
    with_begin = response_of(Shown(logprobs=0, echo=True), prompts=("\u0000ab",))
    with_begin.wanted.prompts[0].request.text = "ab"
    (found,) = whole(with_begin, CompletionWriter(with_begin.form()), [told([HELLO], logprobs=0)])["choices"]
    assert choice.prompt_ids != with_begin.choices[0].prompt_ids
    assert (found["text"], found["logprobs"]["text_offset"], len(found["logprobs"]["tokens"])) == ("abhello", [0, 0, 1, 2], 4)


def test_of_best_of_the_likeliest_per_token_are_shown_and_all_are_counted():
    likely = {0: -3.0, 1: -1.0, 2: -2.0}
    says = []
    for number in (0, 1, 2, 2, 0, 1):
        said = told([HELLO] * (number + 1), logprobs=0)
        said.logprobs = [TokenLogprobs(HELLO, likely[number], 1)] * (number + 1)
        says.append(said)
    answer = completion(says, Shown(), prompts=("a", "b"), n=2, best_of=3)
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [
        (0, "hello" * 2),
        (1, "hello" * 3),
        (2, "hello" * 2),
        (3, "hello" * 3),
    ]
    assert all(choice["logprobs"] is None for choice in answer["choices"]), "asked for in order to choose, not to be shown"
    assert answer["usage"]["completion_tokens"] == 12


def test_the_mean_of_nothing_and_of_the_impossible_are_numbers():
    assert mean_logprob([]) == 0
    assert mean_logprob([TokenLogprobs(1, -math.inf, 5), TokenLogprobs(2, -1.0, 1)]) == (MIN_LOGPROB - 1) / 2


def test_ids_beyond_the_vocabulary_have_empty_names():
    names = TokenNames(TABLE)
    assert (names.name(5000), names.data(5000)) == ("", [])


class Scripted:
    """Gives these parts at the end."""

    def __init__(self, *parts):
        self.parts = parts

    def push(self, _text):
        return []

    def finish(self):
        return list(self.parts)


CALL = (CallBegins(0, "f"), CallArguments(0, "{"), CallArguments(0, "}"))


@pytest.mark.parametrize(
    ("parts", "content", "finish"),
    [
        ((), "", "stop"),
        ((Content("a"), Content("b")), "ab", "stop"),
        (CALL, None, "tool_calls"),
        ((Content("first"), *CALL), "first", "tool_calls"),
        ((Reasoning("hm"),), None, "stop"),
    ],
)
def test_a_message_has_null_content_where_there_are_only_calls_or_reasoning(parts, content, finish):
    response = response_of(Shown())
    answer = whole(response, ChatWriter(response.form(), lambda: MessageReader(Scripted(*parts))), [told([HELLO, EOS])])
    (choice,) = answer["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (content, finish)
    assert ("tool_calls" in choice["message"]) == (finish == "tool_calls")
    if finish == "tool_calls":
        (call,) = choice["message"]["tool_calls"]
        assert (call["type"], call["function"]) == ("function", {"name": "f", "arguments": "{}"})
        assert re.fullmatch("chatcmpl-tool-[0-9a-f]{32}", call["id"])


def test_a_call_that_was_cut_off_ends_by_length():
    response = response_of(Shown())
    answer = whole(response, ChatWriter(response.form(), lambda: MessageReader(Scripted(*CALL))), [told([HELLO])])
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("arguments", ["{", '{"a": "', "{}}", "[]"])
def test_calls_of_which_one_is_no_json_end_by_the_endings_own_reason(arguments):
    parts = (*CALL, CallBegins(1, "g"), CallArguments(1, arguments))
    response = response_of(Shown())
    answer = whole(response, ChatWriter(response.form(), lambda: MessageReader(Scripted(*parts))), [told([HELLO, EOS])])
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["message"]["tool_calls"][1]["function"]["arguments"] == arguments


def test_reasoning_has_both_its_names_and_can_be_left_out():
    for shown in (True, False):
        response = response_of(Shown())
        reader = MessageReader(Scripted(Reasoning("hm"), Content("yes")), show_reasoning=shown)
        (choice,) = whole(response, ChatWriter(response.form(), lambda reader=reader: reader), [told([HELLO])])["choices"]
        assert (choice["message"].get("reasoning"), choice["message"]["content"]) == ("hm" if shown else None, "yes")
        assert choice["message"].get("reasoning_content") == choice["message"].get("reasoning")


def test_mistrals_call_ids_are_nine_letters_and_digits():
    assert re.fullmatch("[A-Za-z0-9]{9}", new_mistral_call_id())


@pytest.mark.parametrize(("tokens", "count"), [([*b"hm", *b"</think>yes"], 10), ([*b"hm</thin"], 8), ([HELLO, *b"</think>"], 9)])
def test_reasoning_tokens_are_those_up_to_its_end(tokens, count):
    assert count_until(TABLE, tokens, "</think>") == count
    response = response_of(Shown())
    writer = ChatWriter(response.form(), lambda: MessageReader(Scripted(Reasoning("hm"))), "</think>")
    assert whole(response, writer, [told(tokens)])["usage"]["completion_tokens_details"] == {"reasoning_tokens": count}


def test_without_reasoning_no_token_is_one_of_it():
    for end, details in (("</think>", {"reasoning_tokens": 0}), (None, None)):
        response = response_of(Shown())
        usage = whole(response, ChatWriter(response.form(), MessageReader, end), [told([HELLO])])["usage"]
        assert usage.get("completion_tokens_details") == details
