"""The flags of `tokenloom serve`: the union of the four services' own, and its help, grouped by service.

A flag stands in its service's config class only. What the mesh itself decides (addresses, sockets, instance names) is left out, so that
giving it is an error and not a silent override.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, create_model
from pydantic.fields import FieldInfo
from pydantic_settings import CliPositionalArg
from rich.console import Console
from rich.table import Table

from cli.trace_settings import TraceKeepingSettings
from libs.config import CommonConfig, ConfigT, ServiceConfig, Settings
from libs.config.concerns import StepSettings
from libs.config.describe import help_of, spellings
from libs.config.found import Found, Source
from libs.config.settings import flag_of
from libs.config.sources import build
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
    f"{name}_address" for name in ("advertise", "scheduler", "tokenizer", "worker")
}


class ServeOptions(TraceKeepingSettings, CommonConfig):
    """Serves a model on this machine: gateway, scheduler, worker and tokenizer, each its own process."""

    refused: ClassVar[Mapping[str, str]] = dict.fromkeys(
        sorted(DECIDED - {"model"}), "`tokenloom serve` decides this for every service of its mesh"
    )

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
    """One service's configuration: the options that it knows as the user gave them, its own section of the file, what the mesh decided.

    Raises TokenloomError (INVALID_REQUEST, `param` is the field) when the service would refuse it.
    """
    own = options.section_of(config.section)
    for name in own.keys() & options.refused.keys():
        raise TokenloomError(ErrorCode.INVALID_REQUEST, f"{own[name].where}: {options.refused[name]}", param=name)
    mine = config.model_fields.keys() - DECIDED - {"config"}
    found = {name: options.found(name) for name in options.model_fields_set & mine}
    found |= {name: value for name, value in own.items() if name not in found or found[name].source < Source.ENVIRONMENT}
    found |= {name: Found(value, Source.DECIDED, flag_of(name)) for name, value in decided.items() if name in config.model_fields}
    return build(config, found)


def refuse_disagreements(configs: Mapping[str, Settings]) -> None:
    """Refuses two services of one mesh that were told different sizes of a step, as sections of a file can.

    Raises TokenloomError (INVALID_REQUEST) that names both.
    """
    for name in StepSettings.model_fields:
        told = {service: config.found(name) for service, config in configs.items() if name in type(config).model_fields}
        if len({found.value for found in told.values()}) > 1:
            values = ", ".join(f"{found.value} to the {service} ({found.where})" for service, found in told.items())
            raise TokenloomError(ErrorCode.INVALID_REQUEST, f"{flag_of(name)} is one number for a mesh, but it is {values}", param=name)


def print_help(console: Console) -> None:
    """The flags of every service, each under the service that it concerns first, by concern."""
    console.print("\n[bold]usage:[/bold] tokenloom serve [MODEL] [--flag value ...]\n")
    console.print(ServeOptions.__doc__)
    console.print(
        "Every flag can also be an environment variable (--max-num-seqs is TOKENLOOM_MAX_NUM_SEQS) or stand in a --config file.\n"
    )
    seen: set[str] = set()
    for title, names, fields in help_groups():
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 2), title=f"[bold]{title}[/bold]", title_justify="left")
        table.add_column(ratio=1, no_wrap=False)
        table.add_column(ratio=2)
        for name in names:
            if name not in seen:
                table.add_row(*_help_row(name, fields[name]))
        seen.update(names)
        if table.row_count:
            console.print(table)
            console.print()


def help_groups() -> Iterator[tuple[str, list[str], Mapping[str, FieldInfo]]]:
    """The concerns of `tokenloom serve`: title, names of the flags, and the fields. A concern of several services comes once for each."""
    yield "mesh", [name for group in ServeOptions.groups() for name in group.fields], ServeOptions.model_fields
    for config in SERVICES.values():
        for group in config.groups():
            names = [name for name in group.fields if name not in DECIDED and name not in ServeOptions.model_fields]
            if names:
                services = ", ".join(owner for owner, kind in SERVICES.items() if names[0] in kind.model_fields)
                yield f"{services}: {group.title}", names, config.model_fields


def _help_row(name: str, info: FieldInfo) -> tuple[str, str]:
    flag = name.replace("_", "-")
    if name == "model":
        return "MODEL", info.description or ""
    spelling = f"--{flag} | --no-{flag}" if info.annotation is bool else f"--{flag} {'|'.join(spellings(info.annotation))}"
    return spelling, help_of(info)
