"""Tools reach every model: through templates that know them, and as text through those that know none."""

from __future__ import annotations

import json
import re

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from libs.errors import ErrorCode, TokenloomError
from libs.models.directory import ModelDirectory
from services.tokenizer.templates import ChatTemplate, tool_support
from tests.support.tiny_llama import CHAT_TEMPLATE as PLAIN

WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"town": {"type": "string"}}}},
}
TIME = {"type": "function", "function": {"name": "time", "description": "né <b>"}}
USER = {"role": "user", "content": "Rain in Paris?"}
KNOWS = (
    "{% for t in tools or [] %}T{{ t | tojson }}{% endfor %}{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}={{ c.function.arguments.town }}{% endfor %}\n{% endfor %}"
)


def call(name: str, arguments, call_id: str = "call_1") -> dict:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def assistant(*calls: dict, **fields) -> dict:
    return {"role": "assistant", "tool_calls": list(calls), **fields}


def answer(content, call_id: str = "call_1") -> dict:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def turns(text: str) -> list[tuple[str, str]]:
    """Role and content of each message that the plain template rendered."""
    return re.findall(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>\n", text, re.DOTALL)


def render(messages, tools=(), source: str = PLAIN, **options) -> str:
    return ChatTemplate(source, {}).render(messages, tools=tools, **options)


def test_a_template_that_knows_tools_gets_them_and_arguments_as_objects():
    chat = [USER, assistant(call("weather", '{"town": "Paris"}'), content=None), answer("rain")]
    with_objects = [USER, assistant(call("weather", {"town": "Paris"}), content=""), answer("rain")]
    expected, _ = render_jinja_template([with_objects], [WEATHER], chat_template=KNOWS)
    assert render(chat, [WEATHER], KNOWS) == expected[0]
    assert "weather=Paris" in expected[0]


def test_without_tools_a_template_that_knows_none_renders_as_ever():
    assert turns(render([USER])) == [("user", "Rain in Paris?")]


def test_a_template_that_knows_no_tools_gets_them_as_a_system_message():
    (role, text), *rest = turns(render([USER], [WEATHER, TIME]))
    assert role == "system"
    assert rest == [("user", "Rain in Paris?")]
    listed = text.split("<tools>\n")[1].split("\n</tools>")[0].splitlines()
    assert [json.loads(line) for line in listed] == [WEATHER, TIME]
    assert "né <b>" in text
    example = text.split("<tool_call>\n")[1].split("\n</tool_call>")[0]
    assert set(json.loads(example)) == {"name", "arguments"}


@pytest.mark.parametrize("role", ["system", "developer"])
def test_the_chat_s_own_system_message_stays_before_the_tools(role):
    (first, text), *rest = turns(render([{"role": role, "content": "Be short."}, USER], [WEATHER]))
    assert first == role
    assert text.startswith("Be short.\n\n")
    assert '"weather"' in text
    assert len(rest) == 1


@pytest.mark.parametrize("content", ["", None])
def test_an_empty_system_message_is_the_tools_alone(content):
    (_, text), *rest = turns(render([{"role": "system", "content": content}, USER], [WEATHER]))
    assert text == turns(render([USER], [WEATHER]))[0][1]
    assert len(rest) == 1


def test_calls_and_answers_are_text_in_the_format_that_the_model_is_asked_for():
    chat = [
        USER,
        assistant(call("weather", '{"town": "Paris"}'), call("time", "", "call_2"), content="Let me see."),
        answer("rain"),
        answer("noon", "call_2"),
        {"role": "user", "content": "Thanks"},
    ]
    found = turns(render(chat, [WEATHER, TIME]))[1:]
    assert [role for role, _ in found] == ["user", "assistant", "user", "user"]
    calls = found[1][1]
    assert calls.startswith("Let me see.\n<tool_call>\n")
    spelled = re.findall(r"<tool_call>\n(.*)\n</tool_call>", calls)
    assert [json.loads(text) for text in spelled] == [
        {"name": "weather", "arguments": {"town": "Paris"}},
        {"name": "time", "arguments": {}},
    ]
    assert found[2][1] == "<tool_response>\nrain\n</tool_response>\n<tool_response>\nnoon\n</tool_response>"
    assert found[3][1] == "Thanks"


@pytest.mark.parametrize("fields", [{}, {"content": None}, {"content": ""}])
def test_a_call_without_content_is_the_call_alone(fields):
    found = turns(render([USER, assistant(call("time", "{}"), **fields), answer("noon")]))
    assert found[1] == ("assistant", '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>')
    assert found[2] == ("user", "<tool_response>\nnoon\n</tool_response>")


def test_calls_in_a_chat_are_rendered_though_this_request_brings_no_tools():
    assert "<tools>" not in render([USER, assistant(call("time", "{}")), answer("noon")])
    assert "<tool_call>" in render([USER, assistant(call("time", "{}")), answer("noon")])


def test_an_assistant_message_after_calls_can_be_continued():
    chat = [USER, assistant(call("time", "{}")), answer("noon"), {"role": "assistant", "content": "It is "}]
    assert render(chat, [TIME], continue_final_message=True).endswith("<|im_start|>assistant\nIt is ")


def test_a_template_that_renders_calls_but_no_tools_keeps_its_own_way_of_calls():
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.tool_calls %}CALLS{% endif %}{% endfor %}"
    text = render([USER, assistant(call("time", "{}"), content="x"), answer("noon")], [TIME], source)
    assert text.startswith("<system>")
    assert text.endswith("<assistant>xCALLS<tool>noon")


@pytest.mark.parametrize(
    ("calls", "param"),
    [
        ([{"id": "1"}], "messages[1].tool_calls[0]"),
        ([call("a", "{}"), call(None, "{}")], "messages[1].tool_calls[1]"),
        ([call("a", "{")], "messages[1].tool_calls[0].function.arguments"),
        ([call("a", "[" * 100_000)], "messages[1].tool_calls[0].function.arguments"),
        ([call("a", "[1]")], "messages[1].tool_calls[0].function.arguments"),
        ([call("a", "[]")], "messages[1].tool_calls[0].function.arguments"),
        ([call("a", "0")], "messages[1].tool_calls[0].function.arguments"),
        ([call("a", [])], "messages[1].tool_calls[0].function.arguments"),
        ("weather", "messages[1].tool_calls"),
        (["weather"], "messages[1].tool_calls[0]"),
    ],
)
def test_calls_that_are_none_are_refused_by_their_place(calls, param):
    with pytest.raises(TokenloomError) as caught:
        render([USER, {"role": "assistant", "content": "", "tool_calls": calls}])
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID_REQUEST, param)


OPENING = "{% for m in messages %}<{{ m.role }}>"
CALLS = "{% for c in m.tool_calls or [] %}{{ c.function.name }}"
ENDING = "{% endfor %}{% endfor %}"
NULL_CALLS = (
    "{% if m.content is none %}" + CALLS + "{{ c.function.arguments | tojson }}{% endfor %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
# As DeepSeek R1's: calls only where there is no content, arguments joined as text.
TEXT_CALLS = NULL_CALLS.replace("{{ c.function.arguments | tojson }}", "{{ '' + c.function.arguments }}")
SPELLED = '{"town": "Paris"}'


@pytest.mark.parametrize(
    ("source", "rendered"),
    [
        (OPENING + "{{ m.content or '' }}" + CALLS + "{{ c.function.arguments | tojson }}" + ENDING, SPELLED),
        (OPENING + "{{ m.content }}" + CALLS + "{{ c.function.arguments | tojson }}" + ENDING, SPELLED),
        (OPENING + "{{ m.content | trim }}" + CALLS + "{{ c.function.arguments | tojson }}" + ENDING, SPELLED),
        (OPENING + "{{ '' + m.content }}" + CALLS + "{{ c.function.arguments | tojson }}" + ENDING, SPELLED),
        (OPENING + "{{ m.content }}" + CALLS + "{{ c.function.arguments }}" + ENDING, SPELLED),
        (OPENING + "{{ m.content }}" + CALLS + "{{ c.function.arguments + '' }}" + ENDING, SPELLED),
        (OPENING + NULL_CALLS, SPELLED),
        (OPENING + TEXT_CALLS, SPELLED),
        (OPENING + CALLS + "{% for k, v in c.function.arguments.items() %}[{{ k }}]{{ v }}{% endfor %}" + ENDING, "[town]Paris"),
    ],
)
@pytest.mark.parametrize("fields", [{}, {"content": None}, {"content": ""}])
@pytest.mark.parametrize("arguments", [SPELLED, {"town": "Paris"}])
def test_a_template_gets_calls_in_the_form_that_it_takes(source, rendered, fields, arguments):
    chat = [USER, assistant(call("weather", arguments), **fields), answer("rain")]
    text = render(chat, source=source)
    assert text.startswith("<user>")
    assert f"<assistant>weather{rendered}<tool>" in text


def test_a_template_that_takes_text_gets_the_clients_own():
    sent = '{"town":"Paris", "n":1.50}'
    assert f"weather{sent}<tool>" in render([USER, assistant(call("weather", sent)), answer("rain")], source=OPENING + TEXT_CALLS)
    assert "weather{}<tool>" in render([USER, assistant(call("weather", " ")), answer("rain")], source=OPENING + TEXT_CALLS)


def test_what_is_said_beside_a_call_stays():
    source = OPENING + "{{ m.content }}" + CALLS + ENDING
    assert "<assistant>So:weather<tool>" in render([USER, assistant(call("weather", "{}"), content="So:"), answer("rain")], source=source)


def test_a_template_that_refuses_the_probe_gets_calls_as_most_take_them():
    source = (
        "{{ raise_exception('no') if messages | length > 2 }}"
        + OPENING
        + "{{ m.content }}"
        + CALLS
        + "{{ c.function.arguments.town }}"
        + ENDING
    )
    assert render([USER, assistant(call("weather", SPELLED))], source=source) == "<user>Rain in Paris?<assistant>weatherParis"


def test_the_form_is_found_out_once_and_only_where_there_are_calls():
    rendered = []
    template = ChatTemplate("{{ count(messages) }}", {"count": rendered.append})
    template.render([USER])
    assert len(rendered) == 1
    for _ in range(3):
        template.render([USER, assistant(call("weather", "{}"))], tools=[])
    assert len(rendered) == 1 + 3


QWEN = "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}<tool_call>{{ '{\"name\": x}' }}{% endif %}"
QWEN_CODER = "{% if tools %}<tools></tools><tool_call>\n<function=example>{% endif %}"
LLAMA = (
    "{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}"
    "{%- if not tools is defined %}{%- set tools = none %}{%- endif %}"
    '{%- if tools is not none %}{{ \'{"name": function name, "parameters": dictionary}\' }}{%- endif %}<|python_tag|>'
)
LLAMA_PYTHONIC = "{%- if tools %}{{ '[func_name1(params_name1=params_value1), func_name2(params)]' }}{%- endif %}"
MISTRAL = "{%- if not tools is defined %}{%- set tools = none %}{%- endif %}{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]"


@pytest.mark.parametrize(
    ("source", "form", "rendered"),
    [
        (PLAIN, "hermes", False),
        ("{% set tools = 1 %}", "hermes", False),
        (QWEN, "hermes", True),
        (QWEN_CODER, "", True),
        (LLAMA, "llama3_json", True),
        (LLAMA_PYTHONIC, "pythonic", True),
        (MISTRAL, "mistral", True),
        ("{{ tools }}", "", True),
        (None, "", False),
    ],
)
def test_the_format_of_calls_is_found_in_the_template_s_text(source, form, rendered):
    found = tool_support(source)
    assert (found.format, found.rendered) == (form, rendered)


def test_a_template_is_read_for_its_tools_and_not_run():
    assert tool_support("{{ 'a' * 10 ** 11 }}{{ tools }}").rendered


def test_a_round_trip_of_tools_renders_on_the_real_model_s_template(model_dir):
    model = ModelDirectory(model_dir)
    chat = [USER, assistant(call("weather", '{"town": "Paris"}')), answer("rain")]
    text = render(chat, [WEATHER], model.chat_template or "", add_generation_prompt=True)
    assert [role for role, _ in turns(text)] == ["system", "user", "assistant", "user"]
    assert text.endswith("<|im_start|>assistant\n")
