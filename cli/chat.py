"""`tokenloom chat`: a conversation in the terminal, or by a pipe with a message a line."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cli.answer import Answer, ToolCall, receive
from cli.answer_view import describe_call, describe_end, harmless, view_for
from cli.client import ApiClient, ApiError, WrongUsage
from cli.conversation import Conversation, refuse_reserved
from cli.json_text import decode
from cli.source import QUOTES, Source
from cli.streams import INTERRUPTED, forgive, leave_quietly

ROUTE = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What the command line says. `extra`: further parameters of every request; `message`: one question instead of a conversation."""

    url: str
    model: str = ""
    api_key: str = ""
    system: str = ""
    message: str = ""
    plain: bool = False
    tools: Path | None = None
    extra: dict[str, Any] = field(default_factory=dict)


class Leave(Exception):
    """The user has had enough."""


def main(options: ChatOptions) -> int:
    """Talks until the input ends. 1 when it cannot begin, 2 for wrong usage; in a pipe, or with one message, 1 if an answer failed."""
    forgive()
    console, errors = Console(highlight=False), Console(stderr=True, highlight=False)
    try:
        with ApiClient(options.url, options.api_key) as client:
            talk = _begin(client, options)
            chat = Chat(client, talk, console, errors, source=Source(console), markdown=not options.plain)
            return chat.once(options.message) if options.message else chat.run()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        return leave_quietly()
    except (ApiError, OSError) as error:
        errors.print(Text(f"tokenloom chat: {error}", style="red"), soft_wrap=True)
        return 2 if isinstance(error, WrongUsage) else 1


def _begin(client: ApiClient, options: ChatOptions) -> Conversation:
    refuse_reserved(options.extra)
    tools = _read_tools(options.tools) if options.tools is not None else []
    served = client.models()
    if not served:
        raise ApiError(f"{client.url} serves no model")
    if options.model and options.model not in served:
        raise ApiError(f"{client.url} serves no model {options.model}; it serves {', '.join(served)}")
    return Conversation(options.model or served[0], options.system, dict(options.extra), tools)


def _read_tools(path: Path) -> list[dict[str, Any]]:
    try:
        tools = decode(path.read_bytes())
    except OSError as error:
        raise WrongUsage(f"--tools {path}: {error.strerror}") from None
    except ValueError as error:
        raise WrongUsage(f"--tools {path} holds no JSON: {error}") from None
    if not isinstance(tools, list):
        raise WrongUsage(f"--tools {path} must hold a list, as `tools` of a request")
    return tools


class Chat:
    """The loop of a conversation: messages to the server, words that begin with a slash to the commands."""

    def __init__(self, client: ApiClient, talk: Conversation, console: Console, errors: Console, *, source: Source, markdown: bool) -> None:
        self._client, self._talk, self._console, self._errors, self._source = client, talk, console, errors, source
        self._markdown = markdown
        self._failed = False
        self.commands: dict[str, tuple[str, Callable[[str], None]]] = {
            "help": ("what can be typed here", self._help),
            "reset": ("begin anew", self._reset),
            "retry": ("have the last message answered again", self._retry),
            "system": ("[TEXT|off]  show or set the system message", self._system),
            "model": ("[NAME]  show the served models, or take another", self._model),
            "temperature": ("[NUMBER|off]  show or set the temperature", self._temperature),
            "save": ("FILE  save the conversation as JSON", self._save),
            "load": ("FILE  go on with one that was saved", self._load),
            "stats": ("tokens and times of the last answer and of all", self._stats),
            "markdown": ("[on|off]  whether answers are shown as Markdown", self._set_markdown),
            "exit": ("end (Ctrl-D too)", self._exit),
        }

    def run(self) -> int:
        """Until the input ends."""
        if self._source.interactive:
            self._greet()
        while True:
            try:
                message = self._source.message()
                if message is None:
                    break
                self.react(message)
            except KeyboardInterrupt:
                if not self._source.interactive:
                    raise
                self._console.print()
                self._say("Ctrl-D or /exit ends.")
            except Leave:
                break
        return 1 if self._failed and not self._source.interactive else 0

    def once(self, message: str) -> int:
        """One message and its answer; the exit code. KeyboardInterrupt passes."""
        worked = self.ask(message)
        if self._talk.answers and self._talk.answers[-1].stopped:
            raise KeyboardInterrupt
        return 0 if worked else 1

    def _greet(self) -> None:
        self._console.print(Text.assemble((self._talk.model, "bold"), (f" at {self._client.url}", "dim")))
        self._say('/help shows the commands; """ begins and ends a message of several lines; Ctrl-C stops an answer.')

    def react(self, message: str) -> None:
        """Obeys a command or has a message answered. Raises Leave."""
        word, _, rest = message.strip().partition(" ")
        if not word:
            return
        if not word.startswith("/"):
            self.ask(message)
            return
        name = word[1:]
        found = [known for known in self.commands if known == name] or [known for known in self.commands if known.startswith(name)]
        if len(found) != 1:
            self._complain(f"there is no command {word}; /help shows those that there are")
            return
        try:
            self.commands[found[0]][1](rest.strip())
        except BrokenPipeError:
            raise
        except (ApiError, OSError) as error:
            self._complain(str(error))

    def ask(self, message: str) -> bool:
        """Has a message answered, and the calls that the answer makes; whether it worked."""
        return self._take_turn({"role": "user", "content": message})

    def _take_turn(self, message: dict[str, Any]) -> bool:
        """A message and all answers to it. However it ends, the conversation is one that the next message can go on with."""
        self._talk.begin(message)
        try:
            worked = self._answer()
        except BaseException:
            self._talk.settle()
            raise
        self._talk.settle() if worked else self._talk.withdraw()
        return worked

    def _answer(self) -> bool:
        while True:
            answer = self._receive()
            if answer is None:
                return False
            if answer.stopped and not self._source.interactive:
                raise KeyboardInterrupt
            if not answer.whole_calls or answer.stopped or not self._make_calls(answer.whole_calls):
                return True

    def _receive(self) -> Answer | None:
        """One answer, kept as far as it came; None and a complaint when it failed."""
        answer = Answer()
        chunks = self._client.stream(ROUTE, self._talk.body())
        try:
            with contextlib.closing(chunks), self._source.quiet():
                receive(chunks, answer, view_for(self._console, markdown=self._markdown))
        except ApiError as error:
            self._complain(str(error))
            return None
        self._talk.take(answer)
        if self._source.interactive:
            self._console.print()
        if not self._console.is_terminal and (end := describe_end(answer)):
            self._errors.print(Text(f"tokenloom chat: {end}"))
        return answer

    def _make_calls(self, calls: Sequence[ToolCall]) -> bool:
        """Asks for the result of each call; whether all were given. In a pipe each is a line of the input."""
        for call in calls:
            try:
                result = self._source.line(f"result of {harmless(describe_call(call))[:60]}: ")
            except KeyboardInterrupt:
                self._say("The call was not made; /retry asks again.")
                raise
            if result is None:
                self._say("The call got no result and was not made; /retry asks again.")
                return False
            self._talk.result_of(call.id, result)
        return True

    @property
    def _remarks(self) -> Console:
        """Where commands say what they have to: in a pipe not among the answers."""
        return self._console if self._console.is_terminal else self._errors

    def _say(self, text: str) -> None:
        self._remarks.print(Text(text, style="dim"))

    def _complain(self, text: str) -> None:
        self._failed = True
        self._errors.print(Text(text if self._source.interactive else f"tokenloom chat: {text}", style="red"), soft_wrap=True)

    def _help(self, _argument: str) -> None:
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True)
        table.add_column()
        for name, (text, _) in self.commands.items():
            arguments, _, words = text.rpartition("  ")
            table.add_row(Text(f"/{name} {arguments}".rstrip(), style="cyan"), Text(words))
        table.add_row(Text(QUOTES, style="cyan"), Text("begins and ends a message of several lines; a line that ends in \\ goes on"))
        table.add_row(Text("Ctrl-C", style="cyan"), Text("stops the answer; what has come stays in the conversation"))
        self._remarks.print(table)

    def _reset(self, _argument: str) -> None:
        self._talk.reset()
        self._say("The conversation begins anew.")

    def _retry(self, _argument: str) -> None:
        before = list(self._talk.messages)
        question = self._talk.take_back()
        if question is None:
            raise ApiError("there is no message to answer again")
        try:
            self._take_turn(question)
        finally:
            self._talk.restore(before)

    def _system(self, argument: str) -> None:
        if argument:
            self._talk.system = "" if argument == "off" else argument
        self._say(f"System message: {harmless(self._talk.system)}" if self._talk.system else "No system message.")

    def _model(self, argument: str) -> None:
        served = self._client.models()
        if argument and argument not in served:
            raise ApiError(f"{self._client.url} serves no model {argument}; it serves {', '.join(served)}")
        self._talk.model = argument or self._talk.model
        for name in served:
            self._say(f"{'*' if name == self._talk.model else ' '} {harmless(name)}")

    def _temperature(self, argument: str) -> None:
        if argument == "off":
            self._talk.sampling.pop("temperature", None)
        elif argument:
            try:
                temperature = float(argument)
                if not math.isfinite(temperature) or temperature < 0:
                    raise ValueError
                self._talk.sampling["temperature"] = temperature
            except ValueError:
                raise ApiError(f"{argument} is no temperature: a number from 0, or off for the model's own") from None
        self._say(f"Temperature: {self._talk.sampling.get('temperature', 'the model' + chr(39) + 's own')}")

    def _save(self, argument: str) -> None:
        if not argument:
            raise ApiError("/save needs the name of a file")
        self._talk.save(_path(argument))
        self._say(f"Saved {len(self._talk.messages)} messages to {argument}.")

    def _load(self, argument: str) -> None:
        if not argument:
            raise ApiError("/load needs the name of a file")
        self._talk.load(_path(argument))
        waiting = "; /retry asks the last one of yours" if self._talk.unanswered else ""
        self._say(f"Loaded {len(self._talk.messages)} messages from {argument}{waiting}.")

    def _stats(self, _argument: str) -> None:
        if not self._talk.answers:
            self._say("There is no answer yet.")
            return
        table = Table(box=None, padding=(0, 2, 0, 0))
        for title in ("", "prompt", "cached", "output", "first token", "total", "tokens/s"):
            table.add_column(title, justify="right" if title else "left", header_style="dim")
        table.add_row("last answer", *_numbers(self._talk.answers[-1:]))
        table.add_row(f"all {len(self._talk.answers)}", *_numbers(self._talk.answers))
        self._remarks.print(table)

    def _set_markdown(self, argument: str) -> None:
        if argument not in ("", "on", "off"):
            raise ApiError("/markdown takes on or off")
        self._markdown = argument == "on" if argument else self._markdown
        self._say(f"Markdown is {'on' if self._markdown else 'off'}.")

    def _exit(self, _argument: str) -> None:
        raise Leave


def _path(argument: str) -> Path:
    """A file that a user names. Raises ApiError for what is no name."""
    try:
        path = Path(argument).expanduser()
        os.fsencode(path)
    except (RuntimeError, ValueError) as error:
        raise ApiError(f"{argument!a} is no name of a file: {error}") from None
    if "\0" in argument:
        raise ApiError(f"{argument!a} is no name of a file")
    return path


def _numbers(answers: Sequence[Answer]) -> Iterator[str]:
    """Sums of tokens and times; of several answers the mean time to the first token and the rate of all their tokens together."""
    yield str(sum(answer.prompt_tokens for answer in answers))
    yield str(sum(answer.cached_tokens for answer in answers))
    yield str(sum(answer.completion_tokens for answer in answers))
    firsts = [answer.first for answer in answers if answer.first is not None]
    yield f"{sum(firsts) / len(firsts) * 1000:.0f} ms" if firsts else "-"
    yield f"{sum(answer.total for answer in answers):.2f} s"
    rated = [answer for answer in answers if answer.decode_seconds > 0]
    tokens, seconds = sum(answer.completion_tokens - 1 for answer in rated), sum(answer.decode_seconds for answer in rated)
    yield f"{tokens / seconds:.1f}" if seconds else "-"
