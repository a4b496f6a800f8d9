"""The `tokenloom` command. Each subcommand's module is loaded when it is called: `trace` needs no model library, `--version` nothing."""

from __future__ import annotations

import importlib
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

# The one lazy registry of the command line: what is imported for which command.
_MODULES = {"serve": "cli.serve", "config": "cli.config", "trace": "cli.trace", "model": "cli.model", "keys": "cli.keys"}

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
