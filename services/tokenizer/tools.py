"""Tools in chats: which format a template asks of the model, and text for a template that knows none.

Some templates (SmolLM2's) render nothing but roles and contents. To such a one a chat with tools is given as plain messages in the way that
the Hermes models made common:

    system     the chat's own system message, a blank line, and the tools: one JSON object a line between <tools> and </tools>, and how to
               call them
    assistant  the content, then each call as <tool_call>{"name": ..., "arguments": {...}}</tool_call>, on lines of their own
    user       the tools' answers, each between <tool_response> and </tool_response>; several in a row are one message

A model that follows it writes its own calls as the assistant's are written here, which the gateway's hermes parser reads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from libs.errors import ErrorCode, TokenloomError

HERMES = "hermes"
# What stands in a template of each format, and what stands only in others that share it (Qwen3-Coder's and GLM's calls are no JSON).
_MARKS = (
    ("mistral", ("[TOOL_CALLS]", "[AVAILABLE_TOOLS]"), ()),
    ("pythonic", ("func_name1(params_name1", "func_name1(params_1"), ()),
    ("llama3_json", ("<|python_tag|>", '{"name": function name'), ("<tool_call>",)),
    (HERMES, ("<tool_call>",), ("<function=", "<arg_key>")),
)
_SYSTEM = ("system", "developer")

Message = Mapping[str, Any]


def tool_format(source: str, *, knows_tools: bool) -> str:
    """The format in which a template asks for calls: hermes, mistral, llama3_json, pythonic, or "" for one that is not known here.

    hermes for a template that knows no tools: it is given their text by `as_text`.
    """
    if not knows_tools:
        return HERMES
    for name, marks, others in _MARKS:
        if any(mark in source for mark in marks) and not any(mark in source for mark in others):
            return name
    return ""


def with_objects(messages: Sequence[Message]) -> list[Message]:
    """The messages with each tool call's arguments as the JSON value that clients send as a string, which is what templates expect.

    Raises TokenloomError(INVALID_REQUEST) naming the call that has no function's name or whose arguments are no JSON.
    """
    return [_with_objects(message, f"messages[{index}]") for index, message in enumerate(messages)]


def as_text(messages: Sequence[Message], tools: Sequence[Any], *, calls_too: bool) -> list[Message]:
    """The same chat for a template that knows no tools; `calls_too`: nor calls and their answers, so that roles and contents must do.

    `messages` come from `with_objects`.
    """
    plain = list(_plain(messages)) if calls_too else list(messages)
    if not tools:
        return plain
    has_system = bool(plain) and plain[0].get("role") in _SYSTEM
    role, own = (plain[0]["role"], plain[0].get("content")) if has_system else ("system", "")
    content = f"{own}\n\n{_description(tools)}" if own else _description(tools)
    return [{"role": role, "content": content}, *(plain[1:] if has_system else plain)]


def _with_objects(message: Message, path: str) -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return message
    if not isinstance(calls, list):
        raise _invalid("must be a list of calls", f"{path}.tool_calls")
    return {**message, "tool_calls": [_call(call, f"{path}.tool_calls[{index}]") for index, call in enumerate(calls)]}


def _call(call: Any, path: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _invalid("must have a function with a name", path)
    arguments = function.get("arguments")
    if isinstance(arguments, str) and arguments.strip():
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise _invalid(f"is no valid JSON: {error}", f"{path}.function.arguments") from None
    elif not arguments:
        arguments = {}
    return {**call, "function": {**function, "arguments": arguments}}


def _plain(messages: Sequence[Message]) -> Iterator[Message]:
    answers: list[str] = []
    for message in messages:
        if message.get("role") == "tool":
            answers.append(f"<tool_response>\n{message.get('content') or ''}\n</tool_response>")
            continue
        if answers:
            yield {"role": "user", "content": "\n".join(answers)}
            answers = []
        yield _spelled(message)
    if answers:
        yield {"role": "user", "content": "\n".join(answers)}


def _spelled(message: Message) -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return message
    texts = [f"<tool_call>\n{_json(_named(call['function']))}\n</tool_call>" for call in calls]
    content = message.get("content")
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**rest, "content": "\n".join([content, *texts] if content else texts)}


def _named(function: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": function["name"], "arguments": function["arguments"]}


def _description(tools: Sequence[Any]) -> str:
    listed = "\n".join(map(_json, tools))
    return (
        "You may call functions to help with the request. Each one is described by a JSON object between the <tools> tags:\n"
        f"<tools>\n{listed}\n</tools>\n"
        "To call a function, write its name and arguments as a JSON object between <tool_call> tags, one pair of tags for each call:\n"
        '<tool_call>\n{"name": "the function\'s name", "arguments": {"parameter": "value"}}\n</tool_call>'
    )


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _invalid(problem: str, param: str) -> TokenloomError:
    return TokenloomError(ErrorCode.INVALID_REQUEST, f"{param} {problem}", param=param)
