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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a template takes the calls in messages. `text`: their arguments as JSON text, not as an object; `null`: the content of a message
    that only calls as null, not as an empty text.
    """

    text: bool = False
    null: bool = False


# What transformers' own templates take comes first.
CALL_FORMS = (CallForm(null=True), CallForm(), CallForm(text=True, null=True), CallForm(text=True))
_PROBE = {"tokenloom_probe": "value"}


def with_calls(messages: Sequence[Message], form: CallForm) -> list[Message]:
    """The messages with their calls as a template takes them, whether a client sent the arguments as text, as OpenAI has it, or not.

    Raises TokenloomError(INVALID_REQUEST) naming the call that has no function's name or whose arguments are no JSON object.
    """
    return [_with_calls(message, form, f"messages[{index}]") for index, message in enumerate(messages)]


def has_calls(messages: Sequence[Message]) -> bool:
    """Whether any message calls a tool."""
    return any(message.get("tool_calls") for message in messages)


def find_call_form(render: Callable[[Sequence[Message]], str]) -> CallForm:
    """How a template takes calls, found out by rendering a chat with one: `render` may raise anything.

    The first form that shows the call's name and its arguments as JSON, and no Python where JSON belongs. Where none does (the template
    writes calls in a way of its own, or refuses that chat), what most templates take.
    """
    for form in CALL_FORMS:
        try:
            text = render(with_calls(_PROBE_CHAT, form))
        except Exception:  # a template is a program that can raise anything; another form may suit it
            continue
        if _shows_call(text) and not (form.null and "None" in text):
            return form
    return CallForm()


_PROBE_CHAT: Sequence[Message] = (
    {"role": "user", "content": "probe"},
    {
        "role": "assistant",
        "content": None,
        # An id that Mistral's templates take too.
        "tool_calls": [{"id": "probe0001", "type": "function", "function": {"name": "probe_name", "arguments": json.dumps(_PROBE)}}],
    },
    {"role": "tool", "tool_call_id": "probe0001", "name": "probe_name", "content": "probe"},
)


def _shows_call(text: str) -> bool:
    (key,) = _PROBE
    # Quotes that are escaped, or Python's, are those of a value that the template took for another kind.
    return "probe_name" in text and key in text and f'\\"{key}' not in text and f"'{key}'" not in text


def as_text(messages: Sequence[Message], tools: Sequence[Any], *, calls_too: bool) -> list[Message]:
    """The same chat for a template that knows no tools; `calls_too`: nor calls and their answers, so that roles and contents must do.

    `messages` come from `with_calls`, with arguments as objects.
    """
    plain = list(_plain(messages)) if calls_too else list(messages)
    if not tools:
        return plain
    has_system = bool(plain) and plain[0].get("role") in _SYSTEM
    role, own = (plain[0]["role"], plain[0].get("content")) if has_system else ("system", "")
    content = f"{own}\n\n{_description(tools)}" if own else _description(tools)
    return [{"role": role, "content": content}, *(plain[1:] if has_system else plain)]


def _with_calls(message: Message, form: CallForm, path: str) -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return message
    if not isinstance(calls, list):
        raise _invalid("must be a list of calls", f"{path}.tool_calls")
    content = message.get("content") or (None if form.null else "")
    called = [_call(call, form, f"{path}.tool_calls[{index}]") for index, call in enumerate(calls)]
    return {**message, "content": content, "tool_calls": called}


def _call(call: Any, form: CallForm, path: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _invalid("must have a function with a name", path)
    arguments = _arguments(function.get("arguments"), f"{path}.function.arguments")
    if form.text:
        sent = function.get("arguments")
        arguments = sent if isinstance(sent, str) and arguments else _json(arguments)
    return {**call, "function": {**function, "arguments": arguments}}


def _arguments(sent: Any, path: str) -> Any:
    if isinstance(sent, str):
        try:
            sent = json.loads(sent) if sent.strip() else None
        except (ValueError, RecursionError) as error:
            raise _invalid(f"is no valid JSON: {error}", path) from None
    if sent is not None and not isinstance(sent, dict):
        raise _invalid("must be a JSON object", path)
    return sent or {}


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
