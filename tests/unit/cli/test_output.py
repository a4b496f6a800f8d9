import io
import json
import threading

import pytest

from cli import output as output_module
from cli.output import Output


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self):
        return True


class StoppedTerminal(io.StringIO):
    """A stream whose writes wait until the test lets them go on, as after Ctrl-S."""

    def __init__(self):
        super().__init__()
        self.reached, self.go_on, self.caught_up = threading.Event(), threading.Event(), threading.Event()

    def write(self, text):
        self.reached.set()
        assert self.go_on.wait(20)
        written = super().write(text)
        if "line 4" in text:
            self.caught_up.set()
        return written


def written(log_format, act, err=None):
    out, err = io.StringIO(), err or io.StringIO()
    output = Output(log_format, out=out, err=err)
    act(output)
    output.close()
    return out.getvalue(), err.getvalue()


def test_json_lines_pass_unchanged_and_other_lines_get_the_services_name():
    def act(output):
        output.forward("worker", '{"event": "ready"}')
        output.forward("worker", "Traceback (most recent call last):")

    _, err = written("json", act)
    assert err == '{"event": "ready"}\nworker     | Traceback (most recent call last):\n'


def test_on_a_console_every_line_carries_its_services_name():
    _, err = written("console", lambda output: output.forward("gateway", "ready"))
    assert err == "gateway    | ready\n"


def test_colours_are_for_terminals():
    _, err = written("console", lambda output: output.forward("gateway", "ready"), Terminal())
    assert err.startswith("\x1b[34m")


@pytest.mark.parametrize(("log_format", "read"), [("json", lambda line: json.loads(line)["event"]), ("console", lambda line: line[-12:])])
def test_the_supervisors_own_events_are_in_the_services_format(log_format, read):
    _, err = written(log_format, lambda output: output.event("warning", "worker ended", restart_in_seconds=1))
    assert read(err.rstrip("\n")) == "worker ended"


def test_words_for_the_user_go_to_stdout_and_errors_to_stderr():
    def act(output):
        output.say("the URL")
        output.complain("no such model")

    assert written("json", act) == ("the URL\n", "no such model\n")


def test_a_terminal_that_stands_still_costs_log_lines_and_stalls_nobody(monkeypatch):
    monkeypatch.setattr(output_module, "CAPACITY", 5)
    terminal = StoppedTerminal()
    output = Output("console", out=io.StringIO(), err=terminal)
    output.forward("worker", "first")
    assert terminal.reached.wait(20)
    for number in range(20):
        output.forward("worker", f"line {number}")
    terminal.go_on.set()
    assert terminal.caught_up.wait(20)
    output.forward("worker", "after")
    output.close()
    lines = [line.split("| ", 1)[1] for line in terminal.getvalue().splitlines()]
    assert lines[:6] == ["first", *(f"line {number}" for number in range(5))]
    assert "15 log lines were dropped" in lines[6]
    assert lines[7] == "after"


def test_a_reader_that_went_away_does_not_end_the_writer():
    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    out = io.StringIO()
    output = Output("json", out=out, err=Gone())
    output.forward("worker", "lost")
    output.say("still here")
    output.close()
    assert out.getvalue() == "still here\n"
