"""Chat templates render as transformers renders them, and fail as a client can understand."""

from __future__ import annotations

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from libs.errors import ErrorCode, TokenloomError
from libs.models.directory import ModelDirectory
from services.tokenizer.templates import ChatTemplate

CHAT = [{"role": "user", "content": "Hi <b> & 'you'"}, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "x "}]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "é <tag>", "parameters": {"b": 1, "a": [1, 2]}}}]

TEMPLATES = {
    "trim_blocks": "{% for m in messages %}\n  {{ m.role }}: {{ m.content }}\n    {% if loop.last %}\nend\n    {% endif %}\n{% endfor %}\n",
    "loop controls": "{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "tojson": "{{ tools | tojson }}|{{ tools | tojson(indent=2) }}|{{ messages | tojson }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}\n{% endfor %}x",
    "missing": "{{ nothing }}{% if tools is none %}none{% endif %}{% if documents %}d{% endif %}{{ add_generation_prompt }}",
    "tokens": "{{ bos_token }}{% for m in messages %}{{ m.content | trim }}{{ eos_token }}{% endfor %}{{ extra }}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "date": "{{ strftime_now('%Y') }}",
}
KNOW_TOOLS = ("tojson", "missing")


@pytest.mark.parametrize(
    ("source", "tools"), [(source, tools) for name, source in TEMPLATES.items() for tools in ([(), TOOLS] if name in KNOW_TOOLS else [()])]
)
def test_a_template_renders_as_transformers_renders_it(source, tools):
    variables = {"bos_token": "<s>", "eos_token": "</s>", "extra": 3}
    expected, _ = render_jinja_template([CHAT], tools=tools or None, chat_template=source, add_generation_prompt=True, **variables)
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    assert template.render(CHAT, tools=tools, add_generation_prompt=True, variables={"extra": 3}) == expected[0]


def test_the_real_models_template_opens_an_assistant_turn(model_dir):
    model = ModelDirectory(model_dir)
    text = ChatTemplate(model.chat_template or "", model.special_tokens).render(CHAT[:1], add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant")
    assert text.endswith("<|im_start|>user\nHi <b> & 'you'<|im_end|>\n<|im_start|>assistant\n")


def test_what_the_template_refuses_reaches_the_client_in_its_own_words():
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(TokenloomError, match=r"^roles must alternate$") as caught:
        template.render(CHAT)
    assert (caught.value.code, caught.value.param) == (ErrorCode.TEMPLATE_ERROR, "messages")


@pytest.mark.parametrize(
    "source",
    [
        "{{ 1 // 0 }}",
        "{{ nothing.at.all }}",
        "{{ 'a' + none }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ range(1000000000) }}",
        "{% include 'file' %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_whatever_goes_wrong_inside_a_template_is_a_template_error(source):
    with pytest.raises(TokenloomError, match=r"the chat template failed: .") as caught:
        ChatTemplate(source, {}).render(CHAT)
    assert caught.value.code is ErrorCode.TEMPLATE_ERROR


def test_a_template_that_does_not_compile_is_refused_when_it_is_loaded():
    with pytest.raises(TokenloomError, match="the model's chat template is broken"):
        ChatTemplate("{% for %}", {})


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
def test_variables_cannot_replace_the_chat(name):
    with pytest.raises(TokenloomError, match=f"cannot set {name}") as caught:
        ChatTemplate("x", {}).render(CHAT, variables={name: 1})
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID_REQUEST, "chat_template_kwargs")


@pytest.mark.parametrize("name", ["self", "args", "kwargs", "environment", "a b", ""])
def test_a_variable_may_have_any_other_name(name):
    assert ChatTemplate("{{ bos_token }}", {"bos_token": "<s>"}).render(CHAT, variables={name: 1}) == "<s>"


def test_variables_may_replace_special_tokens():
    assert ChatTemplate("{{ bos_token }}", {"bos_token": "<s>"}).render([], variables={"bos_token": "!"}) == "!"


TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
STRIPPED = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>{% endfor %}"


@pytest.mark.parametrize(
    ("source", "content", "end"),
    [(TURNS, "So far ", "<assistant>So far "), (STRIPPED, "So far ", "<assistant>So far"), (TURNS, "", "<assistant>")],
)
def test_a_continued_message_ends_where_its_content_ends(source, content, end):
    chat = [CHAT[0], {"role": "assistant", "content": content}]
    assert ChatTemplate(source, {}).render(chat, continue_final_message=True).endswith(f"</>{end}")


def test_a_message_is_continued_even_where_its_text_occurs_earlier():
    chat = [{"role": "user", "content": "same"}, {"role": "assistant", "content": "same"}]
    assert ChatTemplate(TURNS, {}).render(chat, continue_final_message=True) == "<user>same</><assistant>same"


@pytest.mark.parametrize(
    ("chat", "options", "code", "named"),
    [
        (CHAT, {"add_generation_prompt": True}, ErrorCode.INVALID_REQUEST, "exclude each other"),
        ([], {}, ErrorCode.INVALID_REQUEST, "needs a last message"),
        ([{"role": "assistant", "content": None}], {}, ErrorCode.INVALID_REQUEST, "needs a last message"),
    ],
)
def test_what_cannot_be_continued_is_refused(chat, options, code, named):
    with pytest.raises(TokenloomError, match=named) as caught:
        ChatTemplate(TURNS, {}).render(chat, continue_final_message=True, **options)
    assert caught.value.code is code


def test_a_template_that_drops_the_last_message_cannot_continue_it():
    with pytest.raises(TokenloomError, match="leaves out the last message"):
        ChatTemplate("nothing", {}).render(CHAT, continue_final_message=True)
