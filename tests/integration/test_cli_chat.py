"""The command line's clients as processes before a real gateway: on a terminal, in a pipe, interrupted."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import struct
import sys
import termios
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support.gateway_fakes import FakeScheduler, say, silence
from tests.support.gateway_process import Gateway, running_gateway
from tokenloom.scheduler.v1 import scheduler_pb2

COMMAND = (sys.executable, "-m", "cli.main")
ROOT = Path(__file__).parents[2]


def environment(**more: str) -> dict[str, str]:
    """A terminal's, whatever the tests run in."""
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR", "TOKENLOOM_API_KEY")}
    return {**kept, "TERM": "xterm-256color", **more}


async def run(gateway: Gateway, *arguments: str, stdin: bytes = b"", **variables: str) -> tuple[int, str, str]:
    """The command in a pipe: exit code, stdout, stderr."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *COMMAND, *arguments, stdin=pipe, stdout=pipe, stderr=pipe, cwd=ROOT, env=environment(TOKENLOOM_URL=gateway.url, **variables)
    )
    out, err = await process.communicate(stdin)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


class Terminal:
    """A process on a terminal of its own, 80 columns wide; `text` is all that it wrote."""

    def __init__(self, process: asyncio.subprocess.Process, master: int) -> None:
        self.process, self._master = process, master
        self.text = ""
        self._arrived = asyncio.Event()
        asyncio.get_running_loop().add_reader(master, self._read)

    def _read(self) -> None:
        try:
            data = os.read(self._master, 65536)
        except OSError:  # its last holder has closed it
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(self._master)
        self.text += data.decode(errors="replace")
        self._arrived.set()

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    async def until(self, text: str, *, after: int = 0) -> int:
        """Waits for `text` beyond the offset `after`; returns the offset behind it."""
        async with asyncio.timeout(60):
            while (at := self.text.find(text, after)) < 0:
                self._arrived.clear()
                await self._arrived.wait()
        return at + len(text)


@asynccontextmanager
async def terminal(gateway: Gateway, *arguments: str) -> AsyncIterator[Terminal]:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    # The terminal must be the process's own, or Ctrl-C would reach nobody.
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "import fcntl, os, sys, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])",
        *COMMAND,
        *arguments,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        cwd=ROOT,
        env=environment(TOKENLOOM_URL=gateway.url),
    )
    os.close(slave)
    try:
        yield Terminal(process, master)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        asyncio.get_running_loop().remove_reader(master)
        os.close(master)


@pytest.fixture
async def gateway(tmp_path: Path):
    async with running_gateway(tmp_path, FakeScheduler(say("Hello **you**"))) as gateway:
        yield gateway


async def test_a_pipe_gets_answers_and_completions_as_they_are(gateway):
    chat, complete = await asyncio.gather(
        run(gateway, "chat", stdin=b"hi\n/stats\nhow are you?\n"), run(gateway, "complete", "-", "--max-tokens=20", stdin=b"a\n")
    )
    assert chat[:2] == (0, "Hello **you**\nHello **you**\n"), chat[2]
    assert "tokens/s" in chat[2]
    assert complete == (0, "Hello **you**", "")


async def test_a_server_that_is_away_and_a_key_that_is_missing_are_said_in_a_sentence(tmp_path):
    async with running_gateway(tmp_path, api_key=["secret"]) as gateway:
        refused, right, away = await asyncio.gather(
            run(gateway, "chat", "hi"),
            run(gateway, "chat", "hi", TOKENLOOM_API_KEY="secret"),
            run(gateway, "complete", "hi", "--url=http://127.0.0.1:9"),
        )
    assert refused[0] == away[0] == 1
    assert "--api-key or TOKENLOOM_API_KEY" in refused[2]
    assert "no server answers at http://127.0.0.1:9" in away[2]
    assert right == (0, "hello\n", "")


async def test_a_chat_on_a_terminal_draws_markdown_and_ends_by_ctrl_d(gateway):
    async with terminal(gateway, "chat") as chat:
        await chat.until("> ")
        chat.type("hi\n")
        answered = await chat.until("you\x1b[0m")
        assert "**you**" not in chat.text[chat.text.rfind("\x1b[2K") :]
        await chat.until("> ", after=answered)
        chat.type("\x04")
        assert await asyncio.wait_for(chat.process.wait(), 60) == 0
    assert "\x1b[?25h" in chat.text, "the cursor is shown again"


async def half(session, submit: scheduler_pb2.Submit) -> None:
    """Says a little and nothing more."""
    session.emit(submit.id, list(b"so far"))
    await silence(session, submit)


async def test_ctrl_c_stops_the_answer_at_the_server_too_and_the_chat_goes_on(tmp_path):
    scheduler = FakeScheduler(half)
    async with running_gateway(tmp_path, scheduler) as gateway, terminal(gateway, "chat") as chat:
        await chat.until("> ")
        chat.type("hi\n")
        await chat.until("so far")
        chat.type("\x03")
        stopped = await chat.until("[stopped]")
        async with asyncio.timeout(30):
            await scheduler.cancels.get()
        await chat.until("> ", after=stopped)
        scheduler.behaviour = say("again")
        chat.type("/retry\n")
        await chat.until("again", after=stopped)
        await gateway.until_idle()
    sent = [call.chat.messages_json for call in gateway.tokenizer.calls]
    assert b"so far" not in sent[1], "what is asked again is the question"


async def test_what_a_pipe_brings_that_is_no_text_is_no_traceback(gateway):
    chat, complete, refused = await asyncio.gather(
        run(gateway, "chat", "--plain", stdin=b"a\xff\n", PYTHONIOENCODING="ascii"),
        run(gateway, "complete", "-", stdin=b"a\xff"),
        run(gateway, "complete", "a", "--model=\udcff"),
    )
    assert chat == (0, "Hello **you**\n", "")
    assert complete == (0, "Hello **you**", "")
    assert refused[:2] == (1, "")
    assert refused[2].startswith("tokenloom complete: the request cannot be sent")


async def test_ctrl_d_at_a_result_of_a_tool_drops_the_call_and_what_follows_is_a_whole_conversation(tmp_path):
    tools = tmp_path / "tools.json"
    tools.write_text('[{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]')
    scheduler = FakeScheduler(say('<tool_call>{"name": "weather", "arguments": {}}</tool_call>'))
    async with (
        running_gateway(tmp_path, scheduler, enable_auto_tool_choice=True, tool_call_parser="hermes") as gateway,
        terminal(gateway, "chat", f"--tools={tools}") as chat,
    ):
        await chat.until("> ")
        chat.type("Rain?\n")
        await chat.until("result of weather(): ")
        chat.type("\x04")
        dropped = await chat.until("The call got no result and was not made")
        await chat.until("> ", after=dropped)
        scheduler.behaviour = say("Fine.")
        chat.type("How are you?\n")
        await chat.until("Fine.", after=dropped)
        await gateway.until_idle()
    sent = gateway.tokenizer.calls[-1].chat.messages_json
    assert b"How are you?" in sent
    assert b"Rain?" not in sent
    assert b"weather" not in sent
