"""Tools as clients declare them: the types of the bodies, apart from them because parsers plan with them."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct


class FunctionDefinition(Struct, kw_only=True, omit_defaults=True):
    """A function that the model may call. `parameters`: the JSON schema of its arguments; absent: it takes none."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | bool | None = None
    strict: bool | None = None


class Tool(Struct, kw_only=True):
    """One entry of `tools`; functions are the only kind."""

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Struct):
    """A function by its name."""

    name: str


class NamedTool(Struct, kw_only=True):
    """A tool by its name, as allowed_tools lists them."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Struct):
    """Which of the tools may be called (OpenAI's `allowed_tools`); `mode` "required": one of them must be."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class ToolChoice(Struct, kw_only=True):
    """`tool_choice` as an object: {"type": "function", "function": {...}} or {"type": "allowed_tools", "allowed_tools": {...}}."""

    type: Literal["function", "allowed_tools"]
    function: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None


ToolChoiceParam = Literal["none", "auto", "required"] | ToolChoice
