"""Which parsers there are, the operator's own among them, and the one for a choice.

An operator adds a format of tool calls by an entry point of the group `tokenloom.tool_parsers` that is a ToolFormat, and one of reasoning
by one of `tokenloom.reasoning_parsers` that is a ReasoningFormat; the entry point's name is the parser's. docs/tools.md has an example.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import TypeVar

from services.gateway.parsers.base import MessageParser
from services.gateway.parsers.filters import FirstCall, WithoutSpecialTokens
from services.gateway.parsers.hermes import CLOSE as HERMES_CLOSE
from services.gateway.parsers.hermes import OPEN as HERMES_OPEN
from services.gateway.parsers.hermes import HermesParser
from services.gateway.parsers.json_output import NamedCall, RequiredCalls
from services.gateway.parsers.llama3 import TAG, Llama3JsonParser
from services.gateway.parsers.mistral import OPEN as MISTRAL_OPEN
from services.gateway.parsers.mistral import MistralParser
from services.gateway.parsers.pythonic import PythonicParser
from services.gateway.parsers.reasoning import CLOSE, OPEN, PlainText, ReasoningParser
from services.gateway.wanted import Shown, ToolUse

TOOL_GROUP = "tokenloom.tool_parsers"
REASONING_GROUP = "tokenloom.reasoning_parsers"
# For a template that asks for calls in no format that is known: text without its markers is left as it is.
FALLBACK = "hermes"

FormatT = TypeVar("FormatT")


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A model's way to write calls. `new`: a parser of one choice's text; `markers`: texts that are special tokens of some models and have
    to stay in the text for it.
    """

    new: Callable[[], MessageParser]
    markers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """A model's way to reason. `new`: a parser of one choice's text that gives what is no reasoning to another; `end`: the text that ends
    the reasoning, behind which constraints begin. `open`: the text that begins it; `opened`: a parser of a text that begins within the
    reasoning, because the prompt ends with `open`, None where `new`'s does for it.
    """

    new: Callable[[MessageParser], MessageParser]
    end: str
    open: str = ""
    opened: Callable[[MessageParser], MessageParser] | None = None

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that are special tokens of some models and have to stay in the text for the parser."""
        return (self.open, self.end) if self.open else (self.end,)


_TOOLS: Mapping[str, ToolFormat] = {
    "hermes": ToolFormat(HermesParser, (HERMES_OPEN, HERMES_CLOSE)),
    "llama3_json": ToolFormat(Llama3JsonParser, (TAG,)),
    "mistral": ToolFormat(MistralParser, (MISTRAL_OPEN, "[ARGS]", "[CALL_ID]")),
    "pythonic": ToolFormat(PythonicParser),
}
_WITHIN = functools.partial(ReasoningParser, always=True)
_REASONING: Mapping[str, ReasoningFormat] = {
    "deepseek_r1": ReasoningFormat(_WITHIN, CLOSE, OPEN, _WITHIN),
    "qwen3": ReasoningFormat(functools.partial(ReasoningParser, always=False), CLOSE, OPEN, _WITHIN),
}


def tool_parser_names() -> tuple[str, ...]:
    """What --tool-call-parser takes: built in first, then the operator's own."""
    return _names(_TOOLS, TOOL_GROUP)


def reasoning_parser_names() -> tuple[str, ...]:
    """What --reasoning-parser takes."""
    return _names(_REASONING, REASONING_GROUP)


def tool_format(name: str) -> ToolFormat:
    """The format of that name. Raises ValueError when there is none, or its entry point cannot be loaded or is no ToolFormat."""
    return _TOOLS.get(name) or _plug_in(TOOL_GROUP, name, ToolFormat)


def reasoning_format(name: str) -> ReasoningFormat:
    """The format of that name. Raises as tool_format does."""
    return _REASONING.get(name) or _plug_in(REASONING_GROUP, name, ReasoningFormat)


def needs_special_tokens(shown: Shown, template_format: str, special_tokens: Collection[str]) -> bool:
    """Whether special tokens have to stay in the text for the parser of what is shown: markers of its formats are among the model's."""
    return not _markers(shown, template_format).isdisjoint(special_tokens)


def new_parser(
    shown: Shown, template_format: str = "", special_tokens: Collection[str] = (), *, reasoning_opened: bool = False
) -> MessageParser | None:
    """The parser of one choice; None where all text is content.

    `template_format`: what the model's template asks for, "" when unknown; it counts where the request's ToolUse names none.
    `special_tokens`: the texts of the model's special tokens where they were kept for the parser's sake alone; those that it does not know
    are taken out. `reasoning_opened`: the text begins within the reasoning, whatever is usual in its format.
    """
    parser = _tool_parser(shown.tools, template_format) if shown.tools else None
    if shown.reasoning is not None:
        form = reasoning_format(shown.reasoning)
        new = form.opened if reasoning_opened and form.opened is not None else form.new
        parser = new(parser or PlainText())
    if not special_tokens:
        return parser
    return WithoutSpecialTokens(parser or PlainText(), frozenset(special_tokens) - _markers(shown, template_format))


def _markers(shown: Shown, template_format: str) -> frozenset[str]:
    """What the parsers of tools and of reasoning look for. Calls that a grammar enforces are JSON without markers."""
    tools = tool_format(_format(shown.tools, template_format)).markers if shown.tools and shown.tools.mode == "auto" else ()
    return frozenset(tools).union(reasoning_format(shown.reasoning).markers if shown.reasoning is not None else ())


def _tool_parser(use: ToolUse, template_format: str) -> MessageParser:
    if use.mode == "required":
        return RequiredCalls()
    if use.mode == "named":
        return NamedCall(use.names[0])
    parser = tool_format(_format(use, template_format)).new()
    return parser if use.parallel else FirstCall(parser)


def _format(use: ToolUse, template_format: str) -> str:
    return use.format or template_format or FALLBACK


def _names(built_in: Mapping[str, object], group: str) -> tuple[str, ...]:
    return (*built_in, *sorted(entry_points(group=group).names - built_in.keys()))


@functools.cache
def _plug_in(group: str, name: str, kind: type[FormatT]) -> FormatT:
    found = list(entry_points(group=group, name=name))
    if not found:
        raise ValueError(f"there is no entry point {name} in {group}")
    try:
        loaded = found[0].load()
    except Exception as error:  # it is the operator's module: it can raise anything
        raise ValueError(f"the entry point {name} of {group} cannot be loaded: {error}") from error
    if not isinstance(loaded, kind):
        raise ValueError(f"the entry point {name} of {group} is {type(loaded).__name__}, not {kind.__name__}")
    return loaded
