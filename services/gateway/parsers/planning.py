"""From the tools of a request to what its output must be, and how it is read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from libs.constraints import Constraint, ConstraintKind
from libs.errors import ErrorCode, TokenloomError
from services.gateway.parsers.schemas import (
    DEFINITION_MARKS,
    MAX_SCHEMA_DEPTH,
    Schema,
    arguments_schema,
    as_definitions,
    depth_of,
    wrong_type,
)
from services.gateway.tools import Tool, ToolChoice, ToolChoiceParam
from services.gateway.wanted import ToolUse

MAX_TOOLS = 1024
# Of the tools' JSON, written without blanks: what is walked through for a request, and what a schema of all tools is made of.
MAX_TOOLS_BYTES = 256 * 1024
# Wider than OpenAI's (64 letters, digits, _ and -): MCP's servers have longer ones, and vLLM takes dots.
MAX_NAME = 128
_NAME = re.compile(r"[A-Za-z0-9_.:/-]+")
# The parameter of the constraint that is made of several tools, and a place in its schema.
PARAM = "tools"
_PLACE = re.compile(rf"#/\$defs/tool(\d+)([{''.join(map(re.escape, DEFINITION_MARKS.values()))}]?)")


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """`use`: how the output is parsed, None where it is content alone. `constraint`: what makes calls certain. `tools_json`: the tools that
    the model is told of, as the template is given them; empty: none.
    """

    use: ToolUse | None = None
    constraint: Constraint | None = None
    tools_json: bytes = b""


def plan_tools(
    tools: Sequence[Tool] | None, choice: ToolChoiceParam | None, *, parallel: bool | None = None, format: str = "", auto: bool = True
) -> ToolPlan:
    """What `tools`, `tool_choice` and `parallel_tool_calls` (None: true) ask for.

    `format`: the operator's parser for calls, "" for that of the template. `auto` False: where the model may choose, its text is not
    parsed. Without a choice it is "auto". With "none" the model is told of the tools all the same, as in vLLM. With allowed_tools it is
    told of those alone.

    Raises TokenloomError naming the parameter: INVALID_REQUEST, INVALID_CONSTRAINT for a schema that no grammar can be made of.
    """
    tools = tools or ()
    tools_json = _encode(tools)
    _check(tools, len(tools_json))
    mode, chosen = _choose(tools, choice)
    if not tools or mode == "none":
        return ToolPlan(tools_json=tools_json)
    if isinstance(choice, ToolChoice) and choice.type == "allowed_tools":
        tools_json = _encode([tools[index] for index in chosen])
    names = tuple(tools[index].function.name for index in chosen)
    if mode == "auto":
        use = ToolUse("auto", format, names, parallel is not False) if auto else None
        return ToolPlan(use, None, tools_json)
    use = ToolUse(mode, format, names, parallel is not False)
    return ToolPlan(use, _constraint(tools, chosen, use), tools_json)


def attribute(error: TokenloomError) -> None:
    """Where a refusal of the schema that was made of all tools says where in it, names the tool at fault, and the place in its schema."""
    if error.param == PARAM and (found := _PLACE.search(error.message)) is not None:
        error.param = _schema_of(found[1])
        error.message = _PLACE.sub(_clients_place, error.message)
        error.args = (error.message,)


def _clients_place(found: re.Match[str]) -> str:
    kinds = {mark: kind for kind, mark in DEFINITION_MARKS.items()}
    return _schema_of(found[1]) + (f"/{kinds[found[2]]}/" if found[2] else "")


def _schema_of(index: str | int) -> str:
    return f"tools[{index}].function.parameters"


def _encode(tools: Sequence[Tool]) -> bytes:
    return msgspec.json.encode(tools) if tools else b""


def _check(tools: Sequence[Tool], size: int) -> None:
    """`size`: bytes of their JSON. It and their number come first: everything else walks through them."""
    if len(tools) > MAX_TOOLS:
        raise _invalid(f"tools: at most {MAX_TOOLS} are taken; got {len(tools)}", "tools")
    if size > MAX_TOOLS_BYTES:
        raise _invalid(f"tools: {size} bytes exceed the limit of {MAX_TOOLS_BYTES}", "tools")
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        param, name = f"tools[{index}].function.name", tool.function.name
        if not _NAME.fullmatch(name) or len(name) > MAX_NAME:
            allowed = f"1 to {MAX_NAME} letters, digits, and any of _ - . : /"
            raise _invalid(f"{param} must have {allowed}; got {name[:MAX_NAME]!r}", param)
        if name in seen:
            raise _invalid(f"{param}: another tool is called {name} too", param)
        seen.add(name)
        _check_parameters(tool.function.parameters, _schema_of(index))


def _check_parameters(parameters: Schema | None, param: str) -> None:
    """What is no schema of an object. Whether the rest of it is a schema, the compiler of constraints finds out where one is needed."""
    if not isinstance(parameters, dict):
        return
    kind = parameters.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise _invalid(f'{param}.type must be "object": a tool takes its arguments by name', f"{param}.type")
    for name, wanted, article in (("properties", dict, "an object"), ("required", list, "an array")):
        if not isinstance(parameters.get(name, wanted()), wanted):
            raise _invalid(f"{param}.{name} must be {article}", f"{param}.{name}")
    if depth_of(parameters, MAX_SCHEMA_DEPTH) > MAX_SCHEMA_DEPTH:
        raise _invalid(f"{param} is nested deeper than {MAX_SCHEMA_DEPTH} levels", param)


def _check_types(tool: Tool, param: str) -> None:
    place = wrong_type(tool.function.parameters) if tool.function.parameters is not None else ""
    if place:
        problem = "is no type of JSON" if place.endswith("/type") else "is no schema"
        raise TokenloomError(ErrorCode.INVALID_CONSTRAINT, f"{param}{place[:MAX_NAME]} {problem}", param=param)


def _choose(tools: Sequence[Tool], choice: ToolChoiceParam | None) -> tuple[Literal["none", "auto", "required", "named"], Sequence[int]]:
    """The mode, and the tools (by index) that may be called."""
    if choice is None:
        choice = "auto"
    if not tools and choice not in ("none", "auto"):
        raise _invalid("tool_choice asks for a call, but there are no tools", "tool_choice")
    if not isinstance(choice, ToolChoice):
        return choice, range(len(tools))
    indices = {tool.function.name: index for index, tool in enumerate(tools)}
    if choice.type == "function":
        if choice.function is None:
            raise _invalid("tool_choice.function is required", "tool_choice.function")
        return "named", [_index(indices, choice.function.name, "tool_choice.function.name")]
    allowed = choice.allowed_tools
    if allowed is None:
        raise _invalid("tool_choice.allowed_tools is required", "tool_choice.allowed_tools")
    if not allowed.tools:
        raise _invalid("tool_choice.allowed_tools.tools must name a tool", "tool_choice.allowed_tools.tools")
    path = "tool_choice.allowed_tools.tools"
    found = [_index(indices, tool.function.name, f"{path}[{index}].function.name") for index, tool in enumerate(allowed.tools)]
    return allowed.mode, sorted(set(found))


def _index(indices: dict[str, int], name: str, param: str) -> int:
    if name not in indices:
        raise _invalid(f"{param}: there is no tool called {name[:MAX_NAME]!r}", param)
    return indices[name]


def _constraint(tools: Sequence[Tool], chosen: Sequence[int], use: ToolUse) -> Constraint:
    if use.mode == "named":
        function = tools[chosen[0]].function
        schema = arguments_schema(function.parameters, strict=function.strict is not False)
        return _json_schema(schema, _schema_of(chosen[0]))
    for index in chosen:  # of a schema of them all not every compiler says which of them is wrong
        _check_types(tools[index], _schema_of(index))
    return _json_schema(_list_of_calls({index: tools[index] for index in chosen}, parallel=use.parallel), PARAM)


def _list_of_calls(tools: Mapping[int, Tool], *, parallel: bool) -> dict[str, Any]:
    """The schema of [{"name": ..., "parameters": {...}}, ...]. Each tool's schema, and each of its definitions, is a definition under
    a name of its own, whatever other tools call theirs. It has the tool's index in the request, so that an error can be told of.
    """
    schemas = {index: arguments_schema(tool.function.parameters, strict=tool.function.strict is not False) for index, tool in tools.items()}
    calls = [
        {
            "type": "object",
            "properties": {"name": {"type": "string", "enum": [tool.function.name]}, "parameters": {"$ref": f"#/$defs/tool{index}"}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for index, tool in tools.items()
    ]
    return {
        "type": "array",
        "minItems": 1,
        **({} if parallel else {"maxItems": 1}),
        "items": {"anyOf": calls} if len(calls) > 1 else calls[0],
        "$defs": {key: value for index, schema in schemas.items() for key, value in as_definitions(schema, f"tool{index}").items()},
    }


def _json_schema(schema: dict[str, Any], param: str) -> Constraint:
    return Constraint(ConstraintKind.JSON_SCHEMA, (msgspec.json.encode(schema).decode(),), param=param)


def _invalid(message: str, param: str) -> TokenloomError:
    return TokenloomError(ErrorCode.INVALID_REQUEST, message, param=param)
