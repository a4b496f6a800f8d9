"""A chat's messages and template, as the tokenizer renders them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from libs.errors import ErrorCode, TokenloomError
from services.gateway.api.checks import invalid, unsupported
from services.gateway.api.policy import Policy
from services.gateway.api.prompt_fields import CHARS_PER_TOKEN
from services.gateway.api.requests import ChatRequest, ContentPart, Message, ToolCall
from services.gateway.wanted import Prompt
from tokenloom.tokenizer.v1 import tokenizer_pb2

MAX_TEMPLATE_BYTES = 256 * 1024
ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
# Types of content parts that are text, in the APIs of chats and of responses.
TEXT_PARTS = ("text", "input_text", "output_text")


def chat_prompt(request: ChatRequest, tools_json: bytes, label: str, policy: Policy) -> Prompt:
    """The prompt of a chat. `tools_json`: the tools that the template is to show. `label` is the client's x-request-id.

    Raises TokenloomError naming the parameter at fault.
    """
    proceed = request.continue_final_message is True
    if proceed and request.add_generation_prompt:
        raise invalid("continue_final_message and add_generation_prompt exclude each other", "continue_final_message")
    messages_json = msgspec.json.encode(_messages(request.messages))
    variables = _variables(request)
    chat = tokenizer_pb2.Chat(
        messages_json=messages_json,
        tools_json=tools_json,
        add_generation_prompt=request.add_generation_prompt is not False and not proceed,
        continue_final_message=proceed,
        template_kwargs_json=msgspec.json.encode(variables) if variables else b"",
        template=_template(request, policy),
    )
    size = len(messages_json) + len(tools_json)
    return Prompt(tokenizer_pb2.EncodeRequest(chat=chat, request_label=label), max(size // CHARS_PER_TOKEN, 1), "messages")


def _variables(request: ChatRequest) -> dict[str, Any]:
    """Further variables of the template: the client's own before those that parameters stand for."""
    found = dict(request.chat_template_kwargs or {})
    if "chat_template" in found:
        raise invalid("chat_template_kwargs cannot set chat_template", "chat_template_kwargs")
    if request.documents:
        found["documents"] = request.documents
    if request.reasoning_effort is not None:
        found.setdefault("reasoning_effort", request.reasoning_effort)
        if request.reasoning_effort == "none":
            found.setdefault("enable_thinking", False)
    return found


def _template(request: ChatRequest, policy: Policy) -> str:
    if request.chat_template is None:
        return ""
    if not policy.trust_chat_template:
        message = "chat_template is not supported: this server does not run --trust-request-chat-template"
        raise unsupported(message, "chat_template")
    if not request.chat_template.strip():
        raise invalid("chat_template must not be empty", "chat_template")
    if len(request.chat_template.encode()) > MAX_TEMPLATE_BYTES:
        raise invalid(f"chat_template exceeds the limit of {MAX_TEMPLATE_BYTES} bytes", "chat_template")
    return request.chat_template


def _messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages as the template sees them: content flattened to one string, absent fields left out."""
    if not messages:
        raise TokenloomError(ErrorCode.EMPTY_PROMPT, "messages must not be empty", param="messages")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: Message, path: str) -> dict[str, Any]:
    if message.role not in ROLES:
        roles = ", ".join(sorted(ROLES))
        raise invalid(f"{path}.role must be one of {roles}; got {message.role[:64]!r}", f"{path}.role")
    if message.tool_calls and message.role != "assistant":
        raise invalid(f"{path}.tool_calls: only an assistant calls tools", f"{path}.tool_calls")
    content = _content(message.content, f"{path}.content")
    # Beside calls nothing said may be null: it depends on the template which of the two it takes.
    rendered: dict[str, Any] = {"role": message.role, "content": None if message.tool_calls and message.content is None else content}
    if message.name is not None:
        rendered["name"] = message.name
    if message.tool_calls:
        rendered["tool_calls"] = [_call(call, f"{path}.tool_calls[{index}]") for index, call in enumerate(message.tool_calls)]
    if message.tool_call_id is not None:
        rendered["tool_call_id"] = message.tool_call_id
    reasoning = message.reasoning if message.reasoning is not None else message.reasoning_content
    if reasoning is not None:  # templates know it by the one name or by the other
        rendered["reasoning"] = rendered["reasoning_content"] = reasoning
    return rendered


def _call(call: ToolCall, path: str) -> dict[str, Any]:
    """A call as OpenAI writes it; its arguments become an object where the template is rendered."""
    if not call.function.name:
        raise invalid(f"{path}.function.name must not be empty", f"{path}.function.name")
    named = {"id": call.id} if call.id is not None else {}
    arguments = "{}" if call.function.arguments is None else call.function.arguments
    return {**named, "type": call.type, "function": {"name": call.function.name, "arguments": arguments}}


def _content(content: str | list[ContentPart] | None, path: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(_part(part, f"{path}[{index}]") for index, part in enumerate(content))


def _part(part: ContentPart, path: str) -> str:
    if part.type in TEXT_PARTS:
        if part.text is None:
            raise invalid(f"{path}.text is required", f"{path}.text")
        return part.text
    if part.type == "refusal":
        return part.refusal or ""
    raise TokenloomError(
        ErrorCode.UNSUPPORTED, f"{path}: content of type {part.type[:64]!r} is not supported; this model reads text only", param=path
    )
