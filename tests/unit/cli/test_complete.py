"""`tokenloom complete`: the text and nothing else on stdout, whatever the form that was asked for."""

from __future__ import annotations

import json

import httpx
import pytest
from typer.testing import CliRunner

from cli import complete as complete_command
from cli.client import ApiClient
from cli.main import app
from tests.support.scripted_api import ScriptedApi, event, refuses, streams

LOGPROBS = {
    "tokens": [" a", " b"],
    "token_logprobs": [None, -0.25],
    "top_logprobs": [None, {" b": -0.25, " é": -1.5}],
    "text_offset": [0, 2],
}


def chunks(*pieces: str) -> list[bytes]:
    return [*(event({"choices": [{"index": 0, "text": piece}]}) for piece in pieces), b"data: [DONE]\n\n"]


def whole(*texts: str, **fields):
    choices = [{"index": index, "text": text, "finish_reason": "stop", **fields} for index, text in enumerate(texts)]
    return lambda _body: httpx.Response(200, json={"choices": choices})


@pytest.fixture
def run(monkeypatch):
    """Runs the command against one script; returns its result and the request's body."""

    def with_script(script, *arguments: str, stdin: str | bytes | None = None):
        api = ScriptedApi(script)
        monkeypatch.setattr(complete_command, "ApiClient", lambda url, key: ApiClient(url, key, api))
        result = CliRunner().invoke(app, ["complete", *arguments], input=stdin)
        return result, api.bodies[0] if api.bodies else None

    return with_script


def test_the_text_is_streamed_as_it_is(run):
    result, body = run(streams(chunks(" wor", "ld\x1b[m")), "Hello", "--max-tokens=5", "--temperature=0")
    assert (result.exit_code, result.stdout) == (0, " world\x1b[m")
    assert body == {"prompt": "Hello", "max_tokens": 5, "temperature": 0.0, "stream": True}


def test_the_prompt_may_come_from_a_pipe(run):
    _, body = run(streams(chunks("x")), "-", stdin="a\nb\n")
    assert body["prompt"] == "a\nb\n"


def test_without_streaming_the_text_is_the_same(run):
    result, body = run(whole(" world"), "Hello", "--no-stream", "--echo", "--model=tiny")
    assert result.stdout == " world"
    assert body == {"prompt": "Hello", "echo": True, "model": "tiny"}


def test_several_texts_are_numbered(run):
    result, body = run(whole("one", "two"), "x", "--n=2")
    assert body["n"] == 2
    lines = [line.strip() for line in result.stdout.splitlines()]
    assert lines == ["[0] stop", "one", "[1] stop", "two"]


def test_log_probabilities_are_listed_with_their_alternatives(run):
    result, body = run(whole(" a b", logprobs=LOGPROBS), "x", "--logprobs=2")
    assert body["logprobs"] == 2
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ['"', 'a"', "-"] in rows
    assert ['"', 'b"', "-0.250", '"', 'b"', "-0.25", '"', 'é"', "-1.50"] in rows


def test_json_is_the_server_s_answer(run):
    result, _ = run(whole("é"), "x", "--json")
    assert json.loads(result.stdout)["choices"][0]["text"] == "é"
    result, _ = run(streams(chunks("a", "b")), "x", "--json", "--stream", "--n=2")
    assert [json.loads(line)["choices"][0]["text"] for line in result.stdout.splitlines()] == ["a", "b"]


@pytest.mark.parametrize("flags", [["--stream", "--n=2"], ["--stream", "--logprobs=1"], ['--extra={"stream": true, "n": 2}']])
def test_what_cannot_be_shown_as_it_comes_is_refused(run, flags):
    result, body = run(whole("x"), "x", *flags)
    assert (result.exit_code, body) == (2, None)
    assert "--stream shows one text" in result.stderr


@pytest.mark.parametrize("extra", [{"n": 2}, {"best_of": 2}, {"stream": False}, {"logprobs": 1}])
def test_what_the_further_parameters_ask_for_decides_how_it_is_shown(run, extra):
    result, body = run(whole("one", "two"), "x", f"--extra={json.dumps(extra)}")
    assert "stream" not in body
    assert [line.strip() for line in result.stdout.splitlines()] == ["[0] stop", "one", "[1] stop", "two"]


def test_a_prompt_comes_one_way_only(run):
    result, body = run(whole("x"), "x", '--extra={"prompt": ["a", "b"]}')
    assert (result.exit_code, body) == (2, None)


def test_what_no_request_can_hold_is_an_error_in_a_sentence(run):
    result, body = run(whole("x"), "a\udcff")
    assert (result.exit_code, body) == (1, None)
    assert "cannot be sent: it holds half a character" in result.stderr


def test_what_is_no_text_in_a_pipe_is_replaced(run):
    _, body = run(streams(chunks("x")), "-", stdin=b"a\xff")
    assert body["prompt"] == "a\ufffd"


def test_further_parameters_go_along(run):
    _, body = run(streams(chunks("x")), "x", '--extra={"structured_outputs": {"choice": ["a"]}}')
    assert body["structured_outputs"] == {"choice": ["a"]}


@pytest.mark.parametrize("flags", [[], ["--no-stream"], ["--json"]])
def test_an_error_is_said_on_stderr_with_exit_code_1(run, flags):
    result, _ = run(refuses(401, "unauthorized", "Who are you?"), "x", *flags)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("tokenloom complete: Who are you?; give the key")


def test_an_answer_that_breaks_off_is_an_error_after_what_has_come(run):
    result, _ = run(streams([event({"choices": [{"index": 0, "text": "so far"}]}), event({"error": {"message": "gone"}})]), "x")
    assert (result.exit_code, result.stdout) == (1, "so far")
    assert "broke off: gone" in result.stderr
