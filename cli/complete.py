"""`tokenloom complete`: continues a prompt, once; its text goes to stdout as it is."""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cli.answer_view import harmless
from cli.client import ApiClient, ApiError, WrongUsage
from cli.streams import INTERRUPTED, forgive, leave_quietly

ROUTE = "/v1/completions"


@dataclass(frozen=True, slots=True)
class CompleteOptions:
    """What the command line says. `prompt` "-": all of stdin. `extra`: further parameters of the request, which win over those here.

    `stream` None: where one text is all that is asked for.
    """

    url: str
    prompt: str
    model: str = ""
    api_key: str = ""
    n: int = 1
    logprobs: int | None = None
    echo: bool = False
    stream: bool | None = None
    as_json: bool = False
    extra: dict[str, Any] = field(default_factory=dict)

    def request(self) -> tuple[dict[str, Any], bool]:
        """The body, and whether it is to be streamed. Raises WrongUsage for what cannot be shown as it is asked for."""
        if "prompt" in self.extra:
            raise WrongUsage("the prompt is the argument of `tokenloom complete`, and no further parameter")
        optional = {"model": self.model or None, "logprobs": self.logprobs, "echo": self.echo or None, "n": self.n if self.n != 1 else None}
        body = {"prompt": self.prompt, **{name: value for name, value in optional.items() if value is not None}, **self.extra}
        lone = body.get("n") in (None, 1) and body.get("logprobs") is None
        wanted = body.pop("stream", self.stream)
        streamed = lone and not self.as_json and body.get("best_of") in (None, 1) if wanted is None else bool(wanted)
        if streamed and not self.as_json and not lone:
            raise WrongUsage("--stream shows one text as it comes; with --n or --logprobs it goes with --json only")
        return body, streamed


def main(options: CompleteOptions) -> int:
    """Prints the completion. 1, and why on stderr, when there is none; 2 for wrong usage; as shells have it after Ctrl-C and SIGPIPE."""
    forgive()
    try:
        with ApiClient(options.url, options.api_key) as client:
            body, streamed = options.request()
            if options.prompt == "-":
                body["prompt"] = sys.stdin.read()
            if streamed:
                _print_stream(client, body, as_json=options.as_json)
            else:
                _print_whole(client.post(ROUTE, body), as_json=options.as_json)
        sys.stdout.flush()
    except BrokenPipeError:
        return leave_quietly()
    except (ApiError, OSError) as error:
        with contextlib.suppress(OSError):
            print(f"tokenloom complete: {error}", file=sys.stderr)
        return 2 if isinstance(error, WrongUsage) else 1
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def _print_stream(client: ApiClient, body: dict[str, Any], *, as_json: bool) -> None:
    last = "\n"
    chunks = client.stream(ROUTE, body)
    with contextlib.closing(chunks):
        for chunk in chunks:
            if as_json:
                print(json.dumps(chunk, ensure_ascii=False), flush=True)
                continue
            for choice in chunk.get("choices") or ():
                last = _write(choice["text"]) or last
    _end_line(last)


def _print_whole(answer: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(answer, ensure_ascii=False, indent=2))
        return
    console = Console(highlight=False)
    several = len(answer["choices"]) > 1
    for choice in answer["choices"]:
        if several:
            console.print(Text(f"[{choice['index']}] {choice.get('finish_reason') or ''}", style="dim"))
        _end_line(_write(choice["text"]) or "\n", listed=several or bool(choice.get("logprobs")))
        if choice.get("logprobs"):
            console.print(_table(choice["logprobs"]))


def _write(text: str) -> str:
    """Writes to stdout: to a terminal nothing that it would obey. Returns what was written."""
    shown = harmless(text) if sys.stdout.isatty() else text
    sys.stdout.write(shown)
    sys.stdout.flush()
    return shown


def _end_line(last: str, *, listed: bool = False) -> None:
    """A line break after the text where it is one of a list or on a terminal; a program gets a lone text as it is."""
    if (listed or sys.stdout.isatty()) and not last.endswith("\n"):
        print()


def _table(logprobs: dict[str, Any]) -> Table:
    """Each token with its log-probability and the alternatives, as the completions API lists them."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for title, justify in (("token", "left"), ("logprob", "right"), ("alternatives", "left")):
        table.add_column(title, justify=justify, header_style="dim", overflow="fold")  # type: ignore[arg-type]
    tops = logprobs.get("top_logprobs") or [None] * len(logprobs["tokens"])
    for token, value, top in zip(logprobs["tokens"], logprobs["token_logprobs"], tops, strict=True):
        others = "  ".join(f"{json.dumps(name, ensure_ascii=False)} {each:.2f}" for name, each in (top or {}).items())
        table.add_row(Text(json.dumps(token, ensure_ascii=False)), "-" if value is None else f"{value:.3f}", Text(others))
    return table
