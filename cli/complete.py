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
from cli.client import ApiClient, ApiError

ROUTE = "/v1/completions"


@dataclass(frozen=True, slots=True)
class CompleteOptions:
    """What the command line says. `prompt` "-": all of stdin. `extra`: further parameters of the request.

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

    @property
    def streams(self) -> bool:
        """Whether the text is shown as it comes."""
        simple = self.n == 1 and self.logprobs is None and not self.as_json
        return simple if self.stream is None else self.stream

    def body(self, prompt: str) -> dict[str, Any]:
        """The request."""
        optional = {"model": self.model or None, "logprobs": self.logprobs, "echo": self.echo or None, "n": self.n if self.n != 1 else None}
        return {"prompt": prompt, **{name: value for name, value in optional.items() if value is not None}, **self.extra}


def main(options: CompleteOptions) -> int:
    """Prints the completion. 1, and why on stderr, when there is none; 130 after Ctrl-C."""
    try:
        if options.streams and not options.as_json and (options.n > 1 or options.logprobs is not None):
            raise ApiError("--stream shows one text as it comes; with --n or --logprobs it goes with --json only")
        prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
        with ApiClient(options.url, options.api_key) as client:
            if options.streams:
                _print_stream(client, options, prompt)
            else:
                _print_whole(client.post(ROUTE, options.body(prompt)), options)
        sys.stdout.flush()
    except (ApiError, OSError) as error:
        with contextlib.suppress(OSError):
            print(f"tokenloom complete: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _print_stream(client: ApiClient, options: CompleteOptions, prompt: str) -> None:
    last = "\n"
    chunks = client.stream(ROUTE, options.body(prompt))
    with contextlib.closing(chunks):
        for chunk in chunks:
            if options.as_json:
                print(json.dumps(chunk, ensure_ascii=False), flush=True)
                continue
            for choice in chunk.get("choices") or ():
                last = _write(choice["text"]) or last
    _end_line(last)


def _print_whole(answer: dict[str, Any], options: CompleteOptions) -> None:
    if options.as_json:
        print(json.dumps(answer, ensure_ascii=False, indent=2))
        return
    console = Console(highlight=False)
    for choice in answer["choices"]:
        if options.n > 1:
            console.print(Text(f"[{choice['index']}] {choice.get('finish_reason') or ''}", style="dim"))
        _end_line(_write(choice["text"]) or "\n", listed=options.n > 1 or bool(choice.get("logprobs")))
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
