import json

import jsonschema
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.constraints import ConstraintKind
from libs.errors import ErrorCode, TokenloomError
from services.gateway.api.decode import decode_chat
from services.gateway.api.policy import Policy
from services.gateway.api.validate import want_chat
from services.gateway.parsers import planning
from services.gateway.parsers.factory import new_parser
from services.gateway.parsers.planning import MAX_NAME, MAX_TOOLS, MAX_TOOLS_BYTES, ToolPlan, attribute, plan_tools
from services.gateway.parsers.schemas import MAX_SCHEMA_DEPTH, arguments_schema, as_definitions
from services.gateway.tools import FunctionDefinition, Tool, ToolChoiceParam
from services.gateway.wanted import Shown, ToolUse
from tests.unit.gateway.parsers.texts import read

CITY = {"type": "object", "properties": {"city": {"$ref": "#/$defs/Name"}}, "required": ["city"], "$defs": {"Name": {"type": "string"}}}
# The same name for another thing, a reference to itself, and one into its properties.
TREE = {
    "type": "object",
    "properties": {
        "size": {"$ref": "#/$defs/Name"},
        "children": {"type": "array", "items": {"$ref": "#"}},
        "other": {"$ref": "#/properties/size"},
        "$ref": {"const": {"$ref": "#/kept"}},
    },
    "required": ["size"],
    "additionalProperties": False,
    "$defs": {"Name": {"type": "integer"}},
}


def tool(name="f", parameters=None, strict=None):
    return Tool(type="function", function=FunctionDefinition(name=name, parameters=parameters, strict=strict))


def choice(**fields):
    return msgspec.convert(fields, ToolChoiceParam)


def named(name):
    return choice(type="function", function={"name": name})


def allowed(mode, *names):
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return choice(type="allowed_tools", allowed_tools={"mode": mode, "tools": tools})


def schema_of(plan):
    assert plan.constraint.kind is ConstraintKind.JSON_SCHEMA
    schema = json.loads(plan.constraint.text)
    jsonschema.Draft202012Validator.check_schema(schema)
    return schema


def allows(plan, value):
    return jsonschema.Draft202012Validator(schema_of(plan)).is_valid(value)


def refusal(*arguments, **options):
    with pytest.raises(TokenloomError) as caught:
        plan_tools(*arguments, **options)
    assert caught.value.code is ErrorCode.INVALID_REQUEST
    return caught.value.param


@pytest.mark.parametrize("tools", [None, []])
@pytest.mark.parametrize("asked", [None, "none", "auto"])
def test_without_tools_nothing_is_planned(tools, asked):
    assert plan_tools(tools, asked) == ToolPlan()


def test_the_model_may_choose_by_default():
    plan = plan_tools([tool("f"), tool("g", CITY)], None, format="mistral")
    assert plan == plan_tools([tool("f"), tool("g", CITY)], "auto", format="mistral", parallel=True)
    assert plan.use == ToolUse("auto", "mistral", ("f", "g"))
    assert plan.constraint is None
    assert json.loads(plan.tools_json) == [
        {"type": "function", "function": {"name": "f"}},
        {"type": "function", "function": {"name": "g", "parameters": CITY}},
    ]


def test_with_none_the_model_knows_the_tools_and_its_text_is_content():
    plan = plan_tools([tool("f")], "none")
    assert (plan.use, plan.constraint) == (None, None)
    assert json.loads(plan.tools_json) == [{"type": "function", "function": {"name": "f"}}]


def test_where_the_operator_switched_auto_off_only_enforced_calls_are_parsed():
    assert plan_tools([tool("f")], "auto", auto=False).use is None
    assert plan_tools([tool("f")], "auto", auto=False).tools_json
    assert plan_tools([tool("f")], "required", auto=False).use is not None
    assert plan_tools([tool("f")], named("f"), auto=False).use is not None


def test_required_is_a_list_of_at_least_one_call_of_a_tool_with_its_arguments():
    plan = plan_tools([tool("f", CITY), tool("g", TREE), tool("h")], "required")
    assert plan.use == ToolUse("required", "", ("f", "g", "h"))
    assert plan.constraint.param == "tools"
    f = {"name": "f", "parameters": {"city": "Bonn"}}
    g = {"name": "g", "parameters": {"size": 1, "children": [{"size": 2}], "other": 3, "$ref": {"$ref": "#/kept"}}}
    assert allows(plan, [f])
    assert allows(plan, [g, f, {"name": "h", "parameters": {}}])
    for wrong in ([], f, [{"name": "f"}], [{**f, "more": 1}], [{"name": "x", "parameters": {}}], [{"name": "h", "parameters": {"a": 1}}],
                  [{"name": "f", "parameters": g["parameters"]}], [{"name": "g", "parameters": {"size": "a"}}],
                  [{"name": "g", "parameters": {"size": 1, "children": [{"size": "a"}]}}],
                  [{"name": "g", "parameters": {"size": 1, "other": "a"}}],
                  [{"name": "f", "parameters": "{}"}]):  # fmt: skip
        assert not allows(plan, wrong), wrong


def test_without_parallel_calls_it_is_one():
    plan = plan_tools([tool("f")], "required", parallel=False)
    call = {"name": "f", "parameters": {}}
    assert allows(plan, [call])
    assert not allows(plan, [call, call])
    assert not plan.use.parallel
    assert not plan_tools([tool("f")], "auto", parallel=False).use.parallel


def test_named_is_that_tools_arguments():
    plan = plan_tools([tool("f", CITY), tool("g", TREE)], named("g"), format="hermes")
    assert plan.use == ToolUse("named", "hermes", ("g",))
    assert plan.constraint.param == "tools[1].function.parameters"
    assert allows(plan, {"size": 1, "children": [{"size": 2, "children": []}]})
    assert not allows(plan, {"size": 1, "children": [{}]})
    assert not allows(plan, [])


def test_allowed_tools_are_all_that_the_model_hears_of():
    tools = [tool("f"), tool("g"), tool("h")]
    plan = plan_tools(tools, allowed("auto", "h", "f", "h"))
    assert plan.use == ToolUse("auto", "", ("f", "h"))
    assert [told["function"]["name"] for told in json.loads(plan.tools_json)] == ["f", "h"]
    plan = plan_tools(tools, allowed("required", "g"))
    assert plan.use == ToolUse("required", "", ("g",))
    assert allows(plan, [{"name": "g", "parameters": {}}])
    assert not allows(plan, [{"name": "f", "parameters": {}}])


@pytest.mark.parametrize(
    ("parameters", "good", "bad"),
    [
        (None, {}, {"a": 1}),
        (False, {}, {"a": 1}),
        ({}, {"a": 1}, [1]),
        (True, {"a": 1}, "a"),
        ({"properties": {"a": {"type": "integer"}}}, {"a": 1}, 5),
        ({"type": ["object", "null"]}, {}, None),
        ({"type": "object", "$schema": "http://json-schema.org/draft-07/schema#", "$id": "https://example.org/a",
          "properties": {"a": {"$ref": "#/definitions/b"}},
          "definitions": {"b": {"type": "string"}}}, {"a": "b"}, {"a": 1}),
    ],
)  # fmt: skip
def test_arguments_are_an_object_whatever_the_schema_says(parameters, good, bad):
    plan = plan_tools([tool("f", parameters)], named("f"))
    assert allows(plan, good)
    assert not allows(plan, bad)
    plan = plan_tools([tool("f", parameters)], "required")
    assert allows(plan, [{"name": "f", "parameters": good}])
    assert not allows(plan, [{"name": "f", "parameters": bad}])


def test_a_schema_that_is_a_reference_to_an_object_stays_one():
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}}, "additionalProperties": False}
    parameters = {"$ref": "#/$defs/Node", "$defs": {"Node": node}}
    assert arguments_schema(parameters) == parameters
    plan = plan_tools([tool("f", parameters)], "required")
    assert allows(plan, [{"name": "f", "parameters": {"next": {"next": {}}}}])
    assert not allows(plan, [{"name": "f", "parameters": {"next": 1}}])
    for other in (
        {"$ref": "#/$defs/No", "$defs": {"Node": node}},
        {"$ref": "#/$defs/A", "$defs": {"A": {"type": "array"}}},
        {"$ref": "#"},
        {"$ref": 5},
    ):
        assert arguments_schema(other)["type"] == "object"


def test_objects_that_do_not_say_whether_they_are_open_are_closed_unless_strict_is_false():
    inner = {"type": "object", "properties": {"b": {"type": "integer"}}}
    parameters = {
        "type": "object",
        "properties": {"a": inner, "open": {**inner, "additionalProperties": True}, "properties": {"enum": [{"properties": {}}]}},
    }
    strict, loose = (plan_tools([tool("f", parameters, strict)], named("f")) for strict in (None, False))
    for arguments in ({"more": 1}, {"a": {"more": 1}}):
        assert allows(loose, arguments)
        assert not allows(strict, arguments)
    assert allows(strict, {"a": {"b": 1}, "open": {"more": 1}, "properties": {"properties": {}}})
    parts = {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}
    assert allows(plan_tools([tool("f", parts, True)], named("f")), {"a": 1, "b": 2})


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([tool("")], "tools[0].function.name"),
        ([tool("f"), tool("two words")], "tools[1].function.name"),
        ([tool("f\n")], "tools[0].function.name"),
        ([tool("ä")], "tools[0].function.name"),
        ([tool("f" * (MAX_NAME + 1))], "tools[0].function.name"),
        ([tool("f"), tool("g"), tool("f")], "tools[2].function.name"),
        ([tool(f"f{index}") for index in range(MAX_TOOLS + 1)], "tools"),
        ([tool("f", {"type": "string"})], "tools[0].function.parameters.type"),
        ([tool("f", {"type": ["null"]})], "tools[0].function.parameters.type"),
        ([tool("f", {"type": {}})], "tools[0].function.parameters.type"),
        ([tool("f", {"properties": []})], "tools[0].function.parameters.properties"),
        ([tool("f", {"required": {}})], "tools[0].function.parameters.required"),
        ([tool("f"), tool("g", {"a": json.loads("[" * MAX_SCHEMA_DEPTH + "]" * MAX_SCHEMA_DEPTH)})], "tools[1].function.parameters"),
    ],
)
@pytest.mark.parametrize("asked", ["none", "auto", "required"])
def test_what_is_no_tool_is_refused_by_name(tools, param, asked):
    assert refusal(tools, asked) == param


def test_names_that_other_servers_take_are_taken():
    for name in ("a.b", "mcp__x-y:z/1", "f" * MAX_NAME, "_"):
        assert plan_tools([tool(name)], "required").use.names == (name,)


@pytest.mark.parametrize(
    ("tools", "asked", "param"),
    [
        ([], "required", "tool_choice"),
        (None, named("f"), "tool_choice"),
        ([tool("f")], named("g"), "tool_choice.function.name"),
        ([tool("f")], choice(type="function"), "tool_choice.function"),
        ([tool("f")], choice(type="allowed_tools"), "tool_choice.allowed_tools"),
        ([tool("f")], allowed("auto"), "tool_choice.allowed_tools.tools"),
        ([tool("f")], allowed("required", "f", "g"), "tool_choice.allowed_tools.tools[1].function.name"),
    ],
)
def test_a_choice_of_what_is_not_there_is_refused_by_name(tools, asked, param):
    assert refusal(tools, asked) == param


def test_references_move_with_the_schema_and_data_stays():
    schema = {
        "$ref": "#",
        "items": [{"$ref": "#/a"}, {"$ref": "#anchor"}, {"$ref": "https://example.org#/a"}],
        "enum": [{"$ref": "#/a"}],
        "default": {"$ref": "#/a"},
        "properties": {"enum": {"$ref": "#/$defs/b~1c/items"}, "$ref": {"not": {"$ref": "#/definitions/b"}}},
        "$defs": {"b/c": {"items": {"$ref": "#/$defs/b~1c"}}, "b": True},
        "definitions": {"b": {"$ref": "#/$defs/b"}},
    }
    assert as_definitions(schema, "x") == {
        "x": {
            "$ref": "#/$defs/x",
            "items": [{"$ref": "#/$defs/x/a"}, {"$ref": "#anchor"}, {"$ref": "https://example.org#/a"}],
            "enum": [{"$ref": "#/a"}],
            "default": {"$ref": "#/a"},
            "properties": {"enum": {"$ref": "#/$defs/x.b~1c/items"}, "$ref": {"not": {"$ref": "#/$defs/x:b"}}},
        },
        "x.b/c": {"items": {"$ref": "#/$defs/x.b~1c"}},
        "x.b": True,
        "x:b": {"$ref": "#/$defs/x.b"},
    }


ARGUMENTS = st.fixed_dictionaries({"size": st.integers()}, optional={"other": st.integers(), "children": st.just([{"size": 1}])})


@settings(max_examples=30, deadline=None)
@given(st.lists(ARGUMENTS, min_size=1, max_size=3), st.integers(0, 2))
def test_what_a_plan_allows_its_parser_reads(several, indent):
    plan = plan_tools([tool("f", TREE)], "required")
    value = [{"name": "f", "parameters": arguments} for arguments in several]
    assert allows(plan, value)
    message = read(lambda: new_parser(Shown(tools=plan.use)), json.dumps(value, indent=indent or None))
    assert [json.loads(arguments) for _, arguments in message.calls] == several
    assert message.content == ""
    plan = plan_tools([tool("f", TREE)], named("f"))
    message = read(lambda: new_parser(Shown(tools=plan.use)), json.dumps(several[0]))
    assert [(name, json.loads(arguments)) for name, arguments in message.calls] == [("f", several[0])]


def test_arguments_of_a_schema_are_not_changed_in_place():
    before = json.dumps(TREE)
    arguments_schema(TREE, strict=True)
    plan_tools([tool("f", TREE, True)], "required")
    assert json.dumps(TREE) == before


def big(count, size):
    return [tool(f"f{index}", {"type": "object", "description": "x" * size}) for index in range(count)]


@pytest.mark.parametrize("asked", ["auto", "none", "required"])
def test_tools_are_bounded_in_what_the_client_sent_before_anything_walks_through_them(asked, monkeypatch):
    monkeypatch.setattr(planning, "_check_parameters", None)
    assert refusal(big(1, MAX_TOOLS_BYTES), asked) == "tools"
    assert refusal(big(MAX_TOOLS + 1, 1), asked) == "tools"


@pytest.mark.parametrize(("count", "size"), [(MAX_TOOLS, 100), (1, MAX_TOOLS_BYTES - 200)])
def test_as_many_tools_as_are_allowed_are_served_whatever_is_made_of_them(count, size):
    body = {"messages": [{"role": "user", "content": "x"}], "tools": big(count, size), "tool_choice": "required"}
    wanted = want_chat(decode_chat(msgspec.json.encode(body)), "m", "", Policy(max_sequences=1))
    assert len(json.loads(wanted.constraint.text)["$defs"]) == count
    assert wanted.constraint.param == "tools"


@pytest.mark.parametrize(
    ("parameters", "place"),
    [
        ({"properties": {"a": {"type": "wat"}}}, "/properties/a/type is no type"),
        ({"properties": {"a": {"items": {"anyOf": [{"type": ["string", "any"]}]}}}}, "/properties/a/items/anyOf/0/type is no type"),
        ({"properties": {"a": 3}}, "/properties/a is no schema"),
        ({"$defs": {"a": {"type": 3}}}, "/$defs/a/type is no type"),
    ],
)
def test_of_several_schemas_the_wrong_one_is_named(parameters, place):
    with pytest.raises(TokenloomError) as caught:
        plan_tools([tool("f", CITY), tool("g", parameters), tool("h", TREE)], "required")
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID_CONSTRAINT, "tools[1].function.parameters")
    assert place in caught.value.message
    assert plan_tools([tool("g", parameters)], "auto").use is not None


def test_types_are_looked_for_where_schemas_are():
    parameters = {"properties": {"type": {"const": {"type": "wat"}}, "b": {"enum": [{"type": 1}]}, "c": True}, "required": ["type"]}
    assert plan_tools([tool("f", parameters)], "required").constraint is not None


@pytest.mark.parametrize(
    ("said", "param", "told"),
    [
        ("#/$defs/tool3/properties/a is bad", "tools[3].function.parameters", "tools[3].function.parameters/properties/a is bad"),
        ("x: #/$defs/tool12.Name", "tools[12].function.parameters", "x: tools[12].function.parameters/$defs/Name"),
        ("x: #/$defs/tool1:Name/a", "tools[1].function.parameters", "x: tools[1].function.parameters/definitions/Name/a"),
        ("too large", "tools", "too large"),
        ("#/items/x", "tools", "#/items/x"),
    ],
)
def test_what_the_compiler_says_of_the_common_schema_is_told_of_the_tool(said, param, told):
    error = TokenloomError(ErrorCode.INVALID_CONSTRAINT, said, param="tools")
    attribute(error)
    assert (error.param, error.message, str(error)) == (param, told, told)


def test_what_it_says_of_other_schemas_stays():
    error = TokenloomError(ErrorCode.INVALID_CONSTRAINT, "#/$defs/tool3 is bad", param="response_format")
    attribute(error)
    assert (error.param, error.message) == ("response_format", "#/$defs/tool3 is bad")


def test_definitions_have_the_index_of_their_tool_in_the_request():
    plan = plan_tools([tool("f"), tool("g", CITY), tool("h", TREE)], allowed("required", "g", "h"))
    assert set(schema_of(plan)["$defs"]) == {"tool1", "tool1.Name", "tool2", "tool2.Name"}
