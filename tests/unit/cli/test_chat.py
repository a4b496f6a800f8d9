"""`tokenloom chat`: messages and commands, typed or piped, and what becomes of each."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from cli import chat as chat_command
from cli.chat import Chat
from cli.client import ApiClient
from cli.conversation import Conversation
from cli.main import app
from cli.source import Source
from tests.support.scripted_api import ScriptedApi, delta, event, refuses, streams, text

CALL = delta(
    tool_calls=[{"index": 0, "id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"town": "Paris"}'}}]
)
CALLS = [CALL, delta("tool_calls"), b"data: [DONE]\n\n"]
BROKEN = [delta(content="so far"), event({"error": {"message": "no worker left", "code": "no_worker"}})]


class Talk:
    """A chat over a script: `say` feeds lines and returns what stdout and stderr got of them; the exit code is in `code`."""

    typed = False

    def __init__(self, *scripts, terminal: bool = False, **settings) -> None:
        self.api = ScriptedApi(*(scripts or (streams(text("Hel", "lo")),)))
        self.terminal, self.settings, self.code = terminal, settings, -1
        self.conversation = Conversation("tiny", **settings)

    def say(self, *lines: str) -> tuple[str, str]:
        out, err = io.StringIO(), io.StringIO()
        console = Console(file=out, force_terminal=self.terminal, color_system=None, width=80, highlight=False)
        errors = Console(file=err, width=80, highlight=False)
        with ApiClient("http://h", "", self.api) as client:
            source = Source(console, io.StringIO("".join(f"{line}\n" for line in lines)))
            source.interactive = self.typed
            self.code = Chat(client, self.conversation, console, errors, source=source, markdown=True).run()
        return out.getvalue(), err.getvalue()


def contents(body: dict) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in body["messages"]]


def test_each_line_is_a_message_and_each_answer_a_line():
    talk = Talk(streams(text("One.")), streams(text("Two.")), system="Be short.")
    assert talk.say("first", "second") == ("One.\nTwo.\n", "")
    assert talk.code == 0
    assert contents(talk.api.bodies[1]) == [("system", "Be short."), ("user", "first"), ("assistant", "One."), ("user", "second")]
    assert talk.api.bodies[0]["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['"""', "a", "", "b", '"""'], "a\n\nb"),
        (['"""', "a", "/reset"], "a\n/reset"),
        (["a\\", "b\\", "c"], "a\nb\nc"),
        (["a\\"], "a"),
    ],
)
def test_a_message_may_have_several_lines(lines, message):
    talk = Talk()
    talk.say(*lines)
    assert [contents(body) for body in talk.api.bodies] == [[("user", message)]]


def test_empty_lines_are_no_messages():
    talk = Talk()
    assert talk.say("", "   ") == ("", "")
    assert talk.api.bodies == []


def test_what_a_command_says_is_no_part_of_the_answers_in_a_pipe():
    out, err = Talk().say("/system Be brief.", "hi", "/stats")
    assert out.startswith("Hello\n")
    assert "System message: Be brief." in err


def test_settings_hold_from_the_next_message_on():
    talk = Talk()
    talk.say("/temperature 0.5", "/model other", "/system S", "a", "/temperature off", "/system off", "b")
    first, second = talk.api.bodies
    assert (first["temperature"], first["model"], first["messages"][0]) == (0.5, "other", {"role": "system", "content": "S"})
    assert "temperature" not in second
    assert second["messages"][0]["role"] == "user"


def test_reset_begins_anew_with_the_same_settings():
    talk = Talk(system="S")
    talk.say("a", "/reset", "b")
    assert contents(talk.api.bodies[1]) == [("system", "S"), ("user", "b")]


def test_retry_asks_the_last_message_again():
    talk = Talk(streams(text("one")), streams(text("two")))
    out, _ = talk.say("a", "/retry")
    assert out == "one\ntwo\n"
    assert contents(talk.api.bodies[1]) == [("user", "a")]
    assert talk.conversation.messages[-1]["content"] == "two"


def test_commands_may_be_cut_short_while_they_are_one():
    talk = Talk()
    _, err = talk.say("/ret", "/s", "/nothing")
    assert "there is no message to answer again" in err
    assert err.count("there is no command") == 2


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("/temperature hot", "hot is no temperature"),
        ("/model big", "serves no model big; it serves tiny, other"),
        ("/save", "needs the name"),
        ("/load", "needs the name"),
        ("/load /nowhere/x.json", "No such file"),
        ("/save /nowhere/x.json", "No such file"),
        ("/markdown maybe", "on or off"),
    ],
)
def test_a_command_that_cannot_be_obeyed_says_why_and_the_chat_goes_on(command, words):
    talk = Talk()
    out, err = talk.say(command, "hi")
    assert words in err
    assert out == "Hello\n"
    assert talk.code == 1, "a script is to know"


def test_a_conversation_is_saved_and_gone_on_with(tmp_path):
    file = tmp_path / "chat.json"
    first = Talk(system="S")
    first.say("/temperature 0.25", "a", f"/save {file}")
    second = Talk()
    second.say(f"/load {file}", "b")
    body = second.api.bodies[0]
    assert contents(body) == [("system", "S"), ("user", "a"), ("assistant", "Hello"), ("user", "b")]
    assert body["temperature"] == 0.25


def test_the_messages_of_a_request_can_be_loaded_too(tmp_path):
    file = tmp_path / "messages.json"
    file.write_text(json.dumps([{"role": "system", "content": "S"}, {"role": "user", "content": "a"}]))
    talk = Talk()
    _, err = talk.say(f"/load {file}", "/retry", "b")
    assert "/retry asks the last one of yours" in err
    assert contents(talk.api.bodies[0]) == [("system", "S"), ("user", "a")]
    assert contents(talk.api.bodies[1]) == [("system", "S"), ("user", "a"), ("assistant", "Hello"), ("user", "b")]


@pytest.mark.parametrize("content", ["{", "3", '{"messages": 3}', '[{"x": 1}]'])
def test_a_file_that_holds_no_conversation_is_refused(tmp_path, content):
    file = tmp_path / "x.json"
    file.write_text(content)
    _, err = Talk().say(f"/load {file}")
    assert "holds no" in err


def test_an_error_leaves_the_message_for_another_try():
    talk = Talk(streams(BROKEN), streams(text("whole")))
    out, err = talk.say("a", "/retry")
    assert out == "so far\nwhole\n"
    assert "broke off: no worker left" in err
    assert contents(talk.api.bodies[1]) == [("user", "a")]
    assert talk.code == 1


def broken_off():
    yield delta(content="so far")
    raise KeyboardInterrupt


def stopped_before_anything():
    yield delta(role="assistant", content="")
    raise KeyboardInterrupt


FAILED = [streams(BROKEN), refuses(400, "too_long", "Too long"), streams(CALLS[:1] + BROKEN[1:])]


@pytest.mark.parametrize("failed", FAILED)
def test_a_message_that_failed_is_no_part_of_the_conversation_but_of_retry(failed):
    talk = Talk(streams(text("One.")), failed, streams(text("Two.")), failed, streams(text("Three.")))
    talk.say("a", "b", "c", "d", "/retry")
    assert contents(talk.api.bodies[2]) == [("user", "a"), ("assistant", "One."), ("user", "c")]
    assert contents(talk.api.bodies[4]) == [*contents(talk.api.bodies[2]), ("assistant", "Two."), ("user", "d")]
    assert [message["role"] for message in talk.conversation.messages] == ["user", "assistant"] * 3


def test_a_turn_that_fails_after_a_call_is_taken_back_whole():
    talk = Talk(streams(CALLS), refuses(503, "no_worker", "Nobody"), streams(text("It rains.")))
    talk.say("Rain?", "heavy", "/retry")
    assert contents(talk.api.bodies[2]) == [("user", "Rain?")]
    assert talk.code == 1


def test_a_retry_that_fails_leaves_the_answer_that_there_was():
    talk = Talk(streams(text("One.")), refuses(503, "no_worker", "Nobody"), streams(text("Two.")))
    talk.say("a", "/retry", "b")
    assert contents(talk.api.bodies[1]) == [("user", "a")]
    assert contents(talk.api.bodies[2]) == [("user", "a"), ("assistant", "One."), ("user", "b")]


@pytest.mark.parametrize(("said", "kept"), [("", []), ("Let me see. ", [("user", "Rain?"), ("assistant", "Let me see. ")])])
def test_a_call_without_a_result_is_not_told_of(said, kept):
    two = delta(tool_calls=[{"index": 1, "id": "call_2", "type": "function", "function": {"name": "weather", "arguments": "{}"}}])
    talk = Talk(streams([delta(content=said), CALL, two, *CALLS[1:]]), tools=[{"type": "function", "function": {"name": "weather"}}])
    _, err = talk.say("Rain?", "the first one's result")
    assert "was not made; /retry asks again" in err
    assert contents({"messages": talk.conversation.messages}) == kept
    assert "tool_calls" not in str(talk.conversation.messages)
    assert (talk.conversation.unanswered is None) is bool(kept)


def test_ctrl_c_at_a_tool_result_drops_the_call_and_the_chat_goes_on(monkeypatch):
    talk = Talk(streams(CALLS), streams(text("Fine.")), terminal=True)
    typed = iter(["Rain?", KeyboardInterrupt(), "How are you?"])

    def type_in(_source: Source, _prompt: str) -> str | None:
        line = next(typed, None)
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr(Source, "line", type_in)
    monkeypatch.setattr(Source, "quiet", lambda _source: contextlib.nullcontext())
    monkeypatch.setattr(Talk, "typed", True)
    out, _ = talk.say()
    assert "The call was not made" in out
    assert contents(talk.api.bodies[1]) == [("user", "How are you?")]


def test_an_answer_stopped_before_anything_came_leaves_its_message_to_retry():
    talk = Talk(streams(stopped_before_anything()))
    with pytest.raises(KeyboardInterrupt):
        talk.say("a")
    assert talk.conversation.messages == []
    assert talk.conversation.unanswered == {"role": "user", "content": "a"}


@pytest.mark.parametrize("number", ["nan", "inf", "-1", "-inf"])
def test_a_temperature_is_a_finite_number_from_0(number):
    talk = Talk()
    _, err = talk.say(f"/temperature {number}", "hi")
    assert "is no temperature" in err
    assert "temperature" not in talk.api.bodies[0]


@pytest.mark.parametrize("setting", [{"sampling": {"temperature": float("nan")}}, {"system": "\udcff"}])
def test_what_cannot_be_sent_or_saved_is_said_and_the_chat_goes_on(setting, tmp_path):
    talk = Talk(**setting)
    _, err = talk.say("hi", f"/save {tmp_path / 'c.json'}", "/temperature 1", "/system S", "hi")
    assert "the request cannot be sent: it holds" in err
    assert "cannot be saved" in err
    assert contents(talk.api.bodies[0]) == [("system", "S"), ("user", "hi")]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('[{"role": "wizard", "content": "x"}]', "the role of message 0 is none of"),
        ('[{"role": ["user"], "content": "x"}]', "the role of message 0 is none of"),
        ('{"messages": [], "sampling": [1]}', "`sampling` must be an object"),
        ('{"messages": [], "sampling": {"n": 2}}', "n must be 1"),
        ('{"messages": [], "sampling": {"top_p": NaN}}', "NaN"),
    ],
)
def test_a_conversation_that_no_server_would_take_is_not_loaded(content, words, tmp_path):
    file = tmp_path / "c.json"
    file.write_text(content)
    talk = Talk()
    _, err = talk.say("a", f"/load {file}", "b")
    assert words in " ".join(err.split())
    assert contents(talk.api.bodies[1]) == [("user", "a"), ("assistant", "Hello"), ("user", "b")]


@pytest.mark.parametrize("command", ["/save ~nobody-of-this-name/x", "/load a\0b"])
def test_what_is_no_name_of_a_file_is_said(command):
    assert "is no name of a file" in Talk().say(command)[1]


def test_a_refused_message_is_an_error_and_the_next_one_is_asked():
    talk = Talk(refuses(429, "over_window", "Too much", **{"retry-after": "2"}), streams(text("fine")))
    out, err = talk.say("a", "b")
    assert "Too much (try again in 2 s)" in err
    assert out == "fine\n"


def test_ctrl_c_keeps_the_part_that_came_and_ends_a_script():
    talk = Talk(streams(broken_off()))
    with pytest.raises(KeyboardInterrupt):
        talk.say("a")
    assert talk.conversation.messages[-1] == {"role": "assistant", "content": "so far"}


def test_the_results_of_calls_are_asked_for_and_the_answer_goes_on():
    talk = Talk(streams(CALLS), streams(text("It rains.")), tools=[{"type": "function", "function": {"name": "weather"}}])
    out, _ = talk.say("Rain?", "heavy rain")
    call, answer = out.splitlines()
    assert json.loads(call)["function"] == {"name": "weather", "arguments": '{"town": "Paris"}'}
    assert answer == "It rains."
    assert talk.api.bodies[0]["tools"][0]["function"]["name"] == "weather"
    assert talk.api.bodies[1]["messages"][-1] == {"role": "tool", "tool_call_id": "call_1", "content": "heavy rain"}
    assert talk.api.bodies[1]["messages"][-2]["tool_calls"][0]["id"] == "call_1"


@pytest.mark.parametrize("finish", ["length", "stop"])
def test_a_call_that_is_cut_off_is_neither_made_nor_told_of(finish):
    part = delta(tool_calls=[{"index": 0, "id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"to'}}])
    talk = Talk(streams([delta(content="Well. "), part, delta(finish), b"data: [DONE]\n\n"]), streams(text("Sunny.")))
    out, err = talk.say("Rain?", "And now?")
    assert out == "Well. \nSunny.\n"
    assert "cut off" in err or "incomplete" in err
    assert contents(talk.api.bodies[1]) == [("user", "Rain?"), ("assistant", "Well. "), ("user", "And now?")]
    assert not any("tool_calls" in message for message in talk.api.bodies[1]["messages"])


def test_stats_show_the_server_s_counts():
    talk = Talk(terminal=True)
    out, _ = talk.say("/stats", "a", "b", "/stats")
    assert "There is no answer yet." in out
    last, everything = [line.split() for line in out.splitlines() if line.startswith(("last", "all"))]
    assert last[2:5] == ["7", "2", "3"]
    assert everything[1:5] == ["2", "14", "4", "6"]


def test_help_names_every_command():
    out, _ = Talk(terminal=True).say("/help")
    for name in ("help", "reset", "retry", "system", "model", "temperature", "save", "load", "stats", "markdown", "exit"):
        assert f"/{name}" in out


def test_exit_ends_it():
    talk = Talk()
    assert talk.say("/exit", "a") == ("", "")
    assert talk.api.bodies == []


@pytest.fixture
def scripted(monkeypatch):
    """The command line against a script; returns its transport."""

    def use(*scripts, **options) -> ScriptedApi:
        api = ScriptedApi(*scripts, **options)
        monkeypatch.setattr(chat_command, "ApiClient", lambda url, key: ApiClient(url, key, api))
        return api

    return use


def test_one_message_on_the_command_line_has_one_answer(scripted, tmp_path):
    api = scripted(streams(text("Hello")))
    tools = tmp_path / "tools.json"
    tools.write_text('[{"type": "function", "function": {"name": "f"}}]')
    flags = ["--temperature=0.5", "--top-p=0.9", "--max-tokens=5", "--seed=1", "--stop=x", "--stop=y", f"--tools={tools}"]
    result = CliRunner().invoke(app, ["chat", "Hi", "--system=S", "--model=other", "--api-key=k", '--extra={"top_k": 3}', *flags])
    assert (result.exit_code, result.stdout) == (0, "Hello\n")
    expected = {"temperature": 0.5, "top_p": 0.9, "max_tokens": 5, "seed": 1, "stop": ["x", "y"], "top_k": 3, "model": "other"}
    assert expected.items() <= api.bodies[0].items()
    assert api.bodies[0]["tools"][0]["function"]["name"] == "f"
    assert api.headers[-1]["authorization"] == "Bearer k"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--model=big"], 1, "serves no model big; it serves tiny, other"),
        (["--url=nowhere"], 2, "no address of a server"),
        (["--extra={"], 2, "no JSON"),
        (["--extra=[]"], 2, "must be a JSON object"),
        (['--extra={"top_p": NaN}'], 2, "NaN or infinity"),
        (['--extra={"n": 2}'], 2, "n must be 1"),
        (['--extra={"stream": false}'], 2, "stream must be true"),
        (['--extra={"messages": []}'], 2, "the messages of a chat are its own"),
        (["--temperature=inf"], 2, "finite"),
        (["--temperature=-1"], 2, "--temperature"),
        (["--tools=/nowhere"], 2, "No such file"),
    ],
)
def test_what_is_wrong_at_the_start_ends_it_with_a_sentence(scripted, arguments, code, words):
    scripted(streams(text("Hello")))
    result = CliRunner().invoke(app, ["chat", "Hi", *arguments])
    assert result.exit_code == code
    assert words in " ".join(result.stderr.replace("│", " ").split())


def test_a_server_without_models_and_a_failed_answer_are_exit_code_1(scripted):
    scripted(streams(text("x")), models=())
    assert "serves no model" in CliRunner().invoke(app, ["chat", "Hi"]).stderr
    scripted(refuses(503, "no_worker", "Nobody there"))
    result = CliRunner().invoke(app, ["chat", "Hi"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert "Nobody there" in result.stderr


@pytest.mark.parametrize("content", ["{", "{}"])
def test_a_file_of_tools_must_hold_a_list(scripted, tmp_path: Path, content):
    scripted(streams(text("x")))
    (tmp_path / "t.json").write_text(content)
    result = CliRunner().invoke(app, ["chat", "Hi", f"--tools={tmp_path / 't.json'}"])
    assert result.exit_code == 2
    assert "t.json" in result.stderr


@pytest.mark.parametrize("arguments", [["chat", "Hi"], ["chat"]])
def test_ctrl_c_in_a_script_is_exit_code_130_after_what_had_come(scripted, arguments):
    scripted(streams(broken_off()))
    result = CliRunner().invoke(app, arguments, input="Hi\nagain\n")
    assert (result.exit_code, result.stdout) == (130, "so far\n")
