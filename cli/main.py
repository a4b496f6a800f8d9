"""The `tokenloom` command. Each subcommand's module is loaded when it is called: `trace` needs no model library, `--version` nothing."""

from __future__ import annotations

import importlib
import math
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from cli.json_text import decode

# The one lazy registry of the command line: what is imported for which command.
_MODULES = {
    "serve": "cli.serve",
    "config": "cli.config",
    "chat": "cli.chat",
    "complete": "cli.complete",
    "trace": "cli.trace",
    "model": "cli.model",
    "keys": "cli.keys",
}

app = typer.Typer(name="tokenloom", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")


def _module(command: str) -> Any:
    return importlib.import_module(_MODULES[command])


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tokenloom {version('tokenloom')}")
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Language-model serving as a mesh of four services."""


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    short_help="Serve a model on this machine: the whole mesh as local processes.",
)
def serve(context: typer.Context) -> None:
    """Serve a model on this machine. Its flags are the services' own; `tokenloom serve --help` lists them."""
    raise typer.Exit(_module("serve").main(context.args))


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    short_help="Show the settings that a start would have, and where each comes from.",
)
def config(context: typer.Context) -> None:
    """Show the settings that `tokenloom serve` would have with these flags, or one service (`tokenloom config worker --model DIR`).

    Each with where it comes from: default, file, environment or flag; keys and passwords are hidden. Exit code 2 and the message that the
    start would end with when something is wrong. --json prints JSON, --docs the tables of docs/configuration.md.
    """
    raise typer.Exit(_module("config").main(context.args))


def _finite(value: float | None) -> float | None:
    """Range checks let NaN pass, and the lower ones infinity."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter("must be a finite number")
    return value


_Url = Annotated[str, typer.Option(envvar="TOKENLOOM_URL", help="Server to ask, with or without /v1.")]
_Model = Annotated[str, typer.Option(help="Name of the model. Empty: the first one served.")]
_ApiKey = Annotated[str, typer.Option(envvar="TOKENLOOM_API_KEY", help="Key of the server, if it wants one.")]
_MaxTokens = Annotated[int | None, typer.Option(min=1, help="Most tokens of an answer.")]
_Temperature = Annotated[
    float | None, typer.Option(min=0.0, callback=_finite, help="0: always the likeliest token. None: the model's own.")
]
_TopP = Annotated[
    float | None, typer.Option(min=0.0, max=1.0, callback=_finite, help="Draw from the likeliest tokens of this much probability.")
]
_Seed = Annotated[int | None, typer.Option(help="The same seed gives the same answer.")]
_Stop = Annotated[list[str] | None, typer.Option(help="Text that ends an answer; may be repeated.")]
_Extra = Annotated[
    str,
    typer.Option(help='Further parameters of the request, a JSON object: {"top_k": 5}.'),
]


def _parameters(extra: str, **given: Any) -> dict[str, Any]:
    """The parameters of a request: those that were given, and those in the JSON of --extra."""
    try:
        more = decode(extra or "{}")
    except ValueError as error:
        raise typer.BadParameter(f"no JSON of a request: {error}", param_hint="--extra") from None
    if not isinstance(more, dict):
        raise typer.BadParameter("must be a JSON object", param_hint="--extra")
    return {name: value for name, value in given.items() if value not in (None, [])} | more


@app.command()
def chat(
    message: Annotated[str, typer.Argument(help="One message to have answered. None: a conversation; from a pipe, a message a line.")] = "",
    url: _Url = "http://127.0.0.1:8000",
    model: _Model = "",
    api_key: _ApiKey = "",
    system: Annotated[str, typer.Option(help="System message.")] = "",
    temperature: _Temperature = None,
    top_p: _TopP = None,
    max_tokens: _MaxTokens = None,
    seed: _Seed = None,
    stop: _Stop = None,
    tools: Annotated[
        Path | None, typer.Option(help="JSON file of tools that the model may call, as in a request; you are asked for their results.")
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Show answers as they are instead of as Markdown.")] = False,
    extra: _Extra = "",
) -> None:
    """Chat with a served model. /help shows the commands of a conversation."""
    sampling = _parameters(extra, temperature=temperature, top_p=top_p, max_tokens=max_tokens, seed=seed, stop=stop)
    module = _module("chat")
    options = module.ChatOptions(
        url=url, model=model, api_key=api_key, system=system, message=message, plain=plain, tools=tools, extra=sampling
    )
    raise typer.Exit(module.main(options))


@app.command()
def complete(
    prompt: Annotated[str, typer.Argument(help="Text to continue; - for all of stdin.")],
    url: _Url = "http://127.0.0.1:8000",
    model: _Model = "",
    api_key: _ApiKey = "",
    n: Annotated[int, typer.Option(min=1, help="How many completions.")] = 1,
    temperature: _Temperature = None,
    top_p: _TopP = None,
    max_tokens: _MaxTokens = None,
    seed: _Seed = None,
    stop: _Stop = None,
    logprobs: Annotated[int | None, typer.Option(min=0, help="List each token's log-probability and so many alternatives.")] = None,
    echo: Annotated[bool, typer.Option("--echo", help="Print the prompt before its completion.")] = False,
    stream: Annotated[
        bool | None, typer.Option("--stream/--no-stream", help="Print as it comes. None: where there is one text and no more.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the server's answer, or each chunk of a stream, as JSON.")] = False,
    extra: _Extra = "",
) -> None:
    """Continue a prompt with a served model."""
    sampling = _parameters(extra, temperature=temperature, top_p=top_p, max_tokens=max_tokens, seed=seed, stop=stop)
    module = _module("complete")
    options = module.CompleteOptions(
        url=url,
        prompt=prompt,
        model=model,
        api_key=api_key,
        n=n,
        logprobs=logprobs,
        echo=echo,
        stream=stream,
        as_json=as_json,
        extra=sampling,
    )
    raise typer.Exit(module.main(options))


@app.command()
def trace(
    request_id: Annotated[str, typer.Argument(help="A response's id (chatcmpl-...), its x-request-id, or a trace id.")],
    port: Annotated[int, typer.Option(envvar="TOKENLOOM_PORT", help="Port of the mesh whose traces are read.")] = 8000,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the waterfall.")] = False,
    jaeger: Annotated[
        str, typer.Option(envvar=["TOKENLOOM_JAEGER", "JAEGER"], help="URL of a Jaeger to ask instead (http://localhost:16686).")
    ] = "",
    svg: Annotated[Path | None, typer.Option(help="Draw the waterfall into this file instead.", dir_okay=False)] = None,
) -> None:
    """Show where one request's time went: its spans through all services, with gaps, shares and events."""
    raise typer.Exit(_module("trace").main(request_id, port=port, as_json=as_json, jaeger=jaeger, svg=svg))


models = typer.Typer(no_args_is_help=True, help="Model files, without serving them.")
app.add_typer(models, name="model")


@models.command("import")
def model_import(
    model: Annotated[
        str, typer.Argument(envvar="MODEL", help="A name below --models, or a hub id (org/name). Empty: the packaged SmolLM2.")
    ] = "",
    to: Annotated[Path, typer.Option(help="Where services find it: a link that is exchanged once the import is whole.")] = Path(
        "/models/served"
    ),
    directory: Annotated[
        Path | None, typer.Option("--models", envvar="MODELS_DIR", help="Directory of model directories and .gguf files.")
    ] = None,
) -> None:
    """Import a model into a volume that services share. Without torch; does nothing where that model is there already."""
    raise typer.Exit(_module("model").main(model, to=to, models=directory))


keys = typer.Typer(no_args_is_help=True, help="API keys in the mesh's store, for gateways with --api-keys-from-store.")
app.add_typer(keys, name="keys")
_KeyName = Annotated[str, typer.Argument(metavar="NAME", help="What logs, traces and messages call the key.")]
_Rpm = Annotated[int, typer.Option(help="Requests a minute over all gateways. 0: no limit.")]
_Tpm = Annotated[int, typer.Option(help="Tokens a minute, of prompts and outputs, over all gateways. 0: no limit.")]
_StoreUrl = Annotated[
    str, typer.Option(envvar="TOKENLOOM_STORE", help="The mesh's store, as the gateways' --store. Empty: that of the local mesh on --port.")
]
_Port = Annotated[int, typer.Option(envvar="TOKENLOOM_PORT", help="Port of the local mesh.")]


@keys.command("create")
def keys_create(name: _KeyName, rpm: _Rpm = 0, tpm: _Tpm = 0, store: _StoreUrl = "", port: _Port = 8000) -> None:
    """Make a key and print it, once."""
    raise typer.Exit(_module("keys").create(name, rpm=rpm, tpm=tpm, store=store, port=port))


@keys.command("list")
def keys_list(store: _StoreUrl = "", port: _Port = 8000) -> None:
    """List the keys and their limits; of the keys themselves only hashes are known."""
    raise typer.Exit(_module("keys").show(store=store, port=port))


@keys.command("limit")
def keys_limit(name: _KeyName, rpm: _Rpm = 0, tpm: _Tpm = 0, store: _StoreUrl = "", port: _Port = 8000) -> None:
    """Replace a key's limits, both of them."""
    raise typer.Exit(_module("keys").limit(name, rpm=rpm, tpm=tpm, store=store, port=port))


@keys.command("revoke")
def keys_revoke(name: _KeyName, store: _StoreUrl = "", port: _Port = 8000) -> None:
    """End a key: new requests with it are refused within a few seconds, running ones go on."""
    raise typer.Exit(_module("keys").revoke(name, store=store, port=port))


def main() -> None:
    """Entry point of the `tokenloom` script."""
    app()


if __name__ == "__main__":
    sys.exit(app())
