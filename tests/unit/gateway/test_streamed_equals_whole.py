"""However tokens are cut into deltas, the chunks of a stream join to the response that is not streamed, field by field."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.api.chat_writer import ChatWriter
from services.gateway.api.completion_writer import CompletionWriter
from services.gateway.api.messages import MessageReader
from services.gateway.api.writers import Form, Writer
from services.gateway.parsers.base import CallArguments, CallBegins, Content, MessageParser, Part, Reasoning
from services.gateway.parsers.factory import new_parser
from services.gateway.wanted import Shown, ToolUse
from tests.support.joining import flat_choice, joined_choices
from tests.support.responses import TABLE, VOCAB, Response, Told, response_of, streamed, told, whole

_LETTERS = [*b"ab ?#$ST", *"\u20ac\U0001f642\ufffd".encode(), 0xFF, *range(256, VOCAB)]
_CALLS = '<tool_call>\n{"name": "f", "arguments": {"a": [1, "}"]}}\n</tool_call> and <tool_call>{"name": "g", "arguments": {}}</tool_call>'
_JSON_CALLS = '[{"name": "f", "parameters": {"a": "ST"}}, {"name": "f", "parameters": {}}]'
# Parsers, each with a text that is for it.
_TEXTS = {
    "": "just text",
    "letters": "a?hm?b#{}$c",
    "hermes": _CALLS,
    "llama3_json": '{"name": "f", "parameters": {"a": 1e5}}; {"name": "g", "parameters": {}}',
    "mistral": '[TOOL_CALLS] [{"name": "f", "arguments": {"a": {}}}, {"name": "g", "arguments": {"b": null}}]',
    "pythonic": "[f(a=1, b=['x', True]), g(c={'d': None})]",
    "required": _JSON_CALLS,
    "named": '{"a": {"b": "\U0001f642"}}',
    "qwen3": f"<think>so \u20ac</think>\n\n{_CALLS}",
}
_letters = st.lists(st.sampled_from(_LETTERS), max_size=30)
_tokens = _letters.filter(bool)


@st.composite
def _chats(draw: st.DrawFn) -> tuple[str, list[list[int]]]:
    """A parser and outputs: what is for it, whole or cut off, perhaps with something around it; or anything."""
    parser, around = draw(st.sampled_from(sorted(_TEXTS))), st.lists(st.sampled_from(_LETTERS), max_size=2)
    text = list(_TEXTS[parser].encode())
    made = st.tuples(around, st.one_of(st.just(len(text)), st.integers(1, len(text))), around)
    meant = made.map(lambda parts: [*parts[0], *text[: parts[1]], *parts[2]])
    return parser, draw(st.lists(st.one_of(meant, _tokens), min_size=1, max_size=3))


_turns = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6)), max_size=30)
_stops = st.sampled_from([(), ("ST",), ("wor", "ab"), ("\u20ac",), ("a", "\U0001f642 ")])


class LetterParser:
    """Reasoning between two "?", the arguments of a call between "#" and "$", content around them."""

    def __init__(self) -> None:
        self._mode, self._calls = "content", 0

    def push(self, text: str) -> list[Part]:
        return [part for letter in text for part in self._step(letter)]

    def finish(self) -> list[Part]:
        return [Content(f"<{self._mode}>")]

    def _step(self, letter: str) -> list[Part]:
        if letter == "?":
            self._mode = "content" if self._mode == "reasoning" else "reasoning"
            return []
        if letter == "#" and self._mode != "call":
            self._mode, self._calls = "call", self._calls + 1
            return [CallBegins(self._calls - 1, f"f{self._calls}")]
        if letter == "$" and self._mode == "call":
            self._mode = "content"
            return []
        if self._mode == "call":
            return [CallArguments(self._calls - 1, letter)]
        return [Reasoning(letter) if self._mode == "reasoning" else Content(letter)]


def _writer(api: str, form: Form, parsed: str = "") -> Writer:
    if api == "completion":
        return CompletionWriter(form)
    return ChatWriter(form, lambda: MessageReader(_parser(parsed)))


def _parser(name: str) -> MessageParser | None:
    """By name: none, the letters', a format of calls, or "qwen3" for reasoning before hermes calls."""
    if name in ("", "letters"):
        return LetterParser() if name else None
    mode = name if name in ("required", "named") else "auto"
    use = ToolUse(mode, "hermes" if name == "qwen3" else name, ("f",))  # type: ignore[arg-type]
    return new_parser(Shown(tools=use, reasoning="qwen3" if name == "qwen3" else None))


def _run(api: str, shown: Shown, says: list[Told], turns: list[tuple[int, int]], parsed: str = "", **request: Any) -> None:
    def fresh() -> tuple[Response, Writer]:
        response = response_of(shown, n=len(says), include_usage=True, **request)
        return response, _writer(api, response.form(), parsed)

    answer = whole(*fresh(), says)
    chunks = streamed(*fresh(), says, [(number % len(says), size) for number, size in turns])
    assert joined_choices(chunks, api, len(says)) == [flat_choice(choice, api) for choice in answer["choices"]]
    assert (chunks[-1]["choices"], chunks[-1]["usage"]) == ([], answer["usage"])
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


@pytest.mark.composes("streaming", "logprobs", "stop strings", "n")
@settings(max_examples=60, deadline=None)
@given(
    said=_chats(),
    stop=_stops,
    turns=_turns,
    logprobs=st.sampled_from([None, 0, 3]),
    ids=st.booleans(),
    special=st.booleans(),
)
def test_a_chat(said, stop, turns, logprobs, ids, special):
    parsed, data = said
    shown = Shown(logprobs=logprobs, return_token_ids=ids, keep_special_tokens=special)
    says = [told(tokens, stop=stop, keep_special=special, logprobs=logprobs) for tokens in data]
    # The prompt's ids stand in the first chunk of a chat, not in a choice.
    _run("chat", shown, says, turns, parsed, stop=stop)


@settings(max_examples=60, deadline=None)
@given(
    data=st.lists(_tokens, min_size=1, max_size=3),
    stop=_stops,
    turns=_turns,
    logprobs=st.sampled_from([None, 0, 3]),
    echo=st.sampled_from([None, "echo", "echo_only"]),
    ids=st.booleans(),
    as_ids=st.booleans(),
)
def test_a_completion(data, stop, turns, logprobs, echo, ids, as_ids):
    shown = Shown(logprobs, echo=echo is not None, echo_only=echo == "echo_only", return_token_ids=ids, tokens_as_ids=as_ids)
    says = [told(tokens, stop=stop, logprobs=logprobs) for tokens in data]
    _run("completion", shown, says, turns, stop=stop, prompts=("a\u20acb",))


@settings(deadline=None)
@given(data=_tokens, special=st.booleans())
def test_the_bytes_of_a_chats_tokens_join_to_its_text(data, special):
    response = response_of(Shown(logprobs=0, keep_special_tokens=special))
    (choice,) = whole(response, _writer("chat", response.form()), [told(data, keep_special=special, logprobs=0)])["choices"]
    data = b"".join(bytes(token["bytes"]) for token in choice["logprobs"]["content"])
    text = choice["message"]["content"]
    if choice["finish_reason"] == "length" or not special:
        assert data.decode("utf-8", "replace") == text
    else:
        assert data.decode("utf-8", "replace") == text + "<eos>", "listed although cut from the text"


@settings(deadline=None)
@given(data=_tokens)
def test_the_offsets_of_a_completions_tokens_are_places_in_its_text(data):
    response = response_of(Shown(logprobs=0, echo=True), prompts=("a\u20acb",))
    (choice,) = whole(response, _writer("completion", response.form()), [told(data, logprobs=0)])["choices"]
    text, columns = choice["text"], choice["logprobs"]
    assert {len(column) for column in columns.values()} == {len(columns["tokens"])}
    bounds = [*columns["text_offset"], len(text)]
    assert bounds == sorted(bounds)
    assert text.startswith("a\u20acb")
    for start, end, name in zip(bounds, bounds[1:], columns["tokens"], strict=False):
        if "\\x" not in name and name != "<eos>" and end > start:
            assert text[start:end] == name or "\ufffd" in text[start:end]


def test_the_chunks_of_a_parsed_chat_are_what_openais_clients_expect():
    tokens = [*b'?hm?ok#{"a":', *b"1}$#{}$", 256]
    response = response_of(Shown())
    chunks = streamed(response, _writer("chat", response.form(), "letters"), [told(tokens)], [(0, 3), (0, 5), (0, 4)])
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    ids = [call["id"] for delta in deltas for call in delta.get("tool_calls", ()) if "id" in call]
    assert len(set(ids)) == 2
    assert json.loads(json.dumps(deltas).replace(ids[0], "1").replace(ids[1], "2")) == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "hm", "reasoning": "hm"},
        {"content": "ok", "tool_calls": [{"index": 0, "id": "1", "type": "function", "function": {"name": "f1", "arguments": "{"}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '"a":'}}]},
        {
            "content": "<content>",
            "tool_calls": [
                {"index": 0, "function": {"arguments": "1}"}},
                {"index": 1, "id": "2", "type": "function", "function": {"name": "f2", "arguments": "{}"}},
            ],
        },
    ]
    assert chunks[-2]["choices"][0]["finish_reason"] == "tool_calls"
    assert TABLE.vocab_size == VOCAB
