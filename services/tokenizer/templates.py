"""Chat templates: the model's own Jinja source, rendered as transformers renders it, in an immutable sandbox.

A template is a program that came with the weights. It runs inside an encoder process, whose time and memory are bounded, and sees
nothing but its variables.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from libs.errors import ErrorCode, TokenloomError
from services.tokenizer.tools import CallForm, as_text, find_call_form, has_calls, tool_format, with_calls

# Ends the last message while it is rendered, to find where the model is to go on. The space tells whether the template strips contents.
_OPEN_END = "\N{NULL}tokenloom-continue\N{NULL}"
_RESERVED = ("messages", "tools", "add_generation_prompt")


@dataclass(frozen=True, slots=True)
class ToolSupport:
    """How a template deals with tools. `format`: see services.tokenizer.tools.tool_format; `rendered`: it renders `tools` by itself, as
    text they are given to one that does not; `calls_rendered`: it renders the calls in messages.
    """

    format: str
    rendered: bool
    calls_rendered: bool


def tool_support(source: str | None) -> ToolSupport:
    """What a template's text says of tools; it is read here and not run. None: no template, no support. Raises jinja2.TemplateError."""
    if source is None:
        return ToolSupport("", rendered=False, calls_rendered=False)
    names = _environment().parse(source).find_all(nodes.Name)
    rendered = any(name.name == "tools" and name.ctx == "load" for name in names)
    return ToolSupport(tool_format(source, knows_tools=rendered), rendered, calls_rendered="tool_calls" in source)


class ChatTemplate:
    """A compiled chat template and the special tokens that are its variables."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, owner: str = "the model's chat template") -> None:
        """`owner` names the template in errors. Raises TokenloomError(TEMPLATE_ERROR) when the source is no valid template."""
        self._special_tokens = dict(special_tokens)
        try:
            self._tools = tool_support(source)
            self._template = _environment().from_string(source)
        except Exception as error:  # what is nested too deeply fails in Python's own compiler, in several ways
            reason = str(error) or type(error).__name__
            raise TokenloomError(ErrorCode.TEMPLATE_ERROR, f"{owner} is broken: {reason}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] = (),
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a chat. With `continue_final_message` it ends where the last message's content ends.

        Raises TokenloomError: TEMPLATE_ERROR with the template's own message or what went wrong in it; INVALID_REQUEST for variables
        that would replace the chat itself, tool calls that are none, or an open end that cannot be.
        """
        taken = [name for name in variables or () if name in _RESERVED]
        if taken:
            raise _invalid(f"chat_template_kwargs cannot set {', '.join(taken)}", "chat_template_kwargs")
        if not self._tools.rendered and not self._tools.calls_rendered:
            messages = as_text(with_calls(messages, CallForm()), tools, calls_too=True)
        else:
            messages = with_calls(messages, self._call_form if has_calls(messages) else CallForm())
            if not self._tools.rendered:
                messages = as_text(messages, tools, calls_too=False)
        if continue_final_message:
            messages = _with_open_end(messages, add_generation_prompt)
        try:
            text = self._text(messages, tools, add_generation_prompt, variables or {})
        except _TemplateRefusal as error:
            raise TokenloomError(ErrorCode.TEMPLATE_ERROR, str(error), param="messages") from error
        except MemoryError as error:
            raise TokenloomError(ErrorCode.TEMPLATE_ERROR, "rendering the chat template took too much memory", param="messages") from error
        except Exception as error:  # a template is a program: it can raise anything, and none of it is this service's fault
            reason = str(error) or type(error).__name__
            raise TokenloomError(ErrorCode.TEMPLATE_ERROR, f"the chat template failed: {reason}", param="messages") from error
        return _cut_at_open_end(text) if continue_final_message else text

    def _text(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], add_generation_prompt: bool, variables: Mapping[str, Any]
    ) -> str:
        """What the template makes of its variables. Raises anything."""
        chat = {"messages": messages, "tools": list(tools) or None, "add_generation_prompt": add_generation_prompt}
        # One mapping: as keyword arguments, a variable named "self" would clash with render's own.
        return self._template.render(self._special_tokens | {"documents": None} | dict(variables) | chat)

    @functools.cached_property
    def _call_form(self) -> CallForm:
        """How this template takes calls, found out with the first chat that has any: within that one's bounds of time and memory."""
        return find_call_form(lambda messages: self._text(messages, (), False, {}))


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationTag])
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment


class GenerationTag(Extension):
    """`{% generation %} ... {% endgeneration %}` marks what an assistant wrote, for training; for a prompt it is its own content."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """See jinja2.ext.Extension."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _TemplateRefusal(Exception):
    """What a template's raise_exception(message) becomes."""


def _raise_exception(message: Any = "the chat template refused the messages") -> NoReturn:
    raise _TemplateRefusal(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without Jinja's HTML escapes: a prompt is no web page."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _with_open_end(messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> list[Mapping[str, Any]]:
    if add_generation_prompt:
        raise _invalid("continue_final_message and add_generation_prompt exclude each other", "continue_final_message")
    if not messages or not isinstance(messages[-1].get("content"), str):
        raise _invalid("continue_final_message needs a last message with text content", "continue_final_message")
    return [*messages[:-1], {**messages[-1], "content": f"{messages[-1]['content']}{_OPEN_END} "}]


def _cut_at_open_end(text: str) -> str:
    end = text.rfind(_OPEN_END)
    if end < 0:
        raise TokenloomError(
            ErrorCode.TEMPLATE_ERROR, "the chat template leaves out the last message, so that it cannot be continued", param="messages"
        )
    stripped = not text.startswith(" ", end + len(_OPEN_END))
    return text[:end].rstrip() if stripped else text[:end]


def _invalid(message: str, param: str) -> TokenloomError:
    return TokenloomError(ErrorCode.INVALID_REQUEST, message, param=param)
