"""The flags of `tokenloom serve`: the union of the four services' own, and its help, grouped by service.

A flag stands in its service's config class only. What the mesh itself decides (addresses, sockets, instance names) is left out, so that
giving it is an error and not a silent override.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import Field, ValidationError, create_model
from pydantic.fields import FieldInfo
from pydantic_settings import CliPositionalArg
from rich.console import Console
from rich.table import Table

from cli.trace_settings import TraceKeepingSettings
from libs.config import CommonConfig, ConfigT, ServiceConfig
from libs.errors import ErrorCode, TokenloomError
from services.gateway.config import GatewayConfig
from services.scheduler.config import SchedulerConfig
from services.tokenizer.config import TokenizerConfig
from services.worker.config import WorkerConfig

SERVICES: Mapping[str, type[ServiceConfig]] = {
    "gateway": GatewayConfig,
    "scheduler": SchedulerConfig,
    "worker": WorkerConfig,
    "tokenizer": TokenizerConfig,
}
# Decided by the mesh for every service; `uds` because a mesh is found by its port.
DECIDED = frozenset({"listen", "store", "instance", "model", "uds", "metrics_host", "metrics_port"}) | {
    f"{name}_address" for name in ("scheduler", "tokenizer", "worker")
}


class ServeOptions(TraceKeepingSettings, CommonConfig):
    """Serves a model on this machine: gateway, scheduler, worker and tokenizer, each its own process."""

    model: CliPositionalArg[str] = Field("", description="Model directory, .gguf file or hub id. None: SmolLM2-135M-Instruct.")
    log_format: Literal["console", "json"] = Field(
        "json", description="console: for people (default on a terminal); json: one object a line."
    )
    otlp_endpoint: list[str] = Field(
        default_factory=list,
        description="OTLP/gRPC endpoint that receives all spans too (http://host:4317), beside the built-in store and "
        "OTEL_EXPORTER_OTLP_ENDPOINT; may be repeated.",
    )


def _joined_fields() -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for config in SERVICES.values():
        for name, info in config.model_fields.items():
            if name not in DECIDED and name not in ServeOptions.model_fields:
                fields.setdefault(name, (info.annotation, info))
    return fields


# Built and not written by multiple inheritance: a service's flag that the mesh decides must not exist here at all.
ServeConfig: type[ServeOptions] = create_model("ServeConfig", __base__=ServeOptions, __doc__=ServeOptions.__doc__, **_joined_fields())


def service_config(config: type[ConfigT], options: ServeOptions, **decided: Any) -> ConfigT:
    """One service's configuration: the options that it knows as the user gave them, and what the mesh decided.

    Raises TokenloomError (INVALID_REQUEST, `param` is the field) when the service would refuse it.
    """
    given = {name: getattr(options, name) for name in options.model_fields_set if name in config.model_fields and name not in DECIDED}
    known = {name: value for name, value in decided.items() if name in config.model_fields}
    try:
        return config(**{**given, **known})
    except ValidationError as error:
        problem = error.errors()[0]
        name = ".".join(map(str, problem["loc"]))
        raise TokenloomError(
            ErrorCode.INVALID_REQUEST, f"--{name.replace('_', '-')}: {problem['msg']}" if name else problem["msg"], param=name or None
        ) from None


def print_help(console: Console) -> None:
    """The flags of every service, each under the service that it concerns first."""
    console.print("\n[bold]usage:[/bold] tokenloom serve [MODEL] [--flag value ...]\n")
    console.print(ServeOptions.__doc__)
    console.print("Every flag can also be an environment variable: --max-num-seqs is TOKENLOOM_MAX_NUM_SEQS.\n")
    seen: set[str] = set()
    groups: dict[str, type[CommonConfig]] = {"mesh": ServeOptions, **SERVICES}
    for title, config in groups.items():
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 2), title=f"[bold]{title}[/bold]", title_justify="left")
        table.add_column(ratio=1, no_wrap=False)
        table.add_column(ratio=2)
        for name, info in sorted(config.model_fields.items(), key=lambda item: item[0] != "model"):
            if name not in seen and (name not in DECIDED or name == "model"):
                seen.add(name)
                table.add_row(*_help_row(name, info))
        if table.row_count:
            console.print(table)
            console.print()


def _help_row(name: str, info: FieldInfo) -> tuple[str, str]:
    flag = name.replace("_", "-")
    if name == "model":
        return "MODEL", info.description or ""
    spelling = f"--{flag} | --no-{flag}" if info.annotation is bool else f"--{flag} {'|'.join(_spellings(info.annotation))}"
    default = info.get_default(call_default_factory=True)
    shown = "" if default is None or default in ("", []) else f" Default: {', '.join(default) if isinstance(default, list) else default}."
    return spelling, f"{info.description or ''}{shown}"


def _spellings(annotation: Any) -> Iterator[str]:
    """How values of a type are written on a command line: INT, TEXT, or the choices."""
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        for part in get_args(annotation):
            if part is not types.NoneType:
                yield from _spellings(part)
    elif origin is Literal:
        yield from map(str, get_args(annotation))
    elif origin is list:
        yield from _spellings(get_args(annotation)[0])
    else:
        yield {int: "INT", float: "NUMBER", bool: "BOOL"}.get(annotation, "TEXT")
