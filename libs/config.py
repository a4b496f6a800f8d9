"""The base of every service's configuration: one class per service, whose field docs are its --help.

A field can be given as a flag (`--max-num-seqs 8`), as an environment variable (`TOKENLOOM_MAX_NUM_SEQS=8`) or left at its
default, in this order. Booleans take `--flag` and `--no-flag`; lists are repeated flags or items between commas, in the environment
too, and `--flag=` is the empty list. `cli serve` joins the four classes into one command line and
hands each service the flags it knows, so that a default stands in one place only.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_origin

from pydantic import Field, ValidationError, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, CliApp, SettingsConfigDict

from libs.errors import ErrorCode, TokenloomError

ConfigT = TypeVar("ConfigT", bound="CommonConfig")


class CommonConfig(BaseSettings):
    """What every service and the whole local mesh can be told."""

    model_config = SettingsConfigDict(
        env_prefix="TOKENLOOM_",
        cli_kebab_case=True,
        cli_implicit_flags="dual",
        cli_avoid_json=True,
        cli_hide_none_type=True,
        extra="forbid",
        frozen=True,
        # The library's own reading of lists takes quotes and brackets for JSON: an API key is to arrive as it was typed.
        enable_decoding=False,
    )

    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe message that is logged.")
    log_format: Literal["console", "json"] = Field("json", description="`json`: one object a line; `console`: for people.")
    otlp_endpoint: list[str] = Field(
        default_factory=list,
        description="OTLP/gRPC endpoint that receives this service's spans (http://host:4317); may be repeated. None: no traces.",
    )

    @field_validator("*", mode="before")
    @classmethod
    def _split_list(cls, value: Any, info: ValidationInfo) -> Any:
        annotation = cls.model_fields[info.field_name].annotation if info.field_name else None
        if isinstance(value, str) and get_origin(annotation) is list:
            return [item.strip() for item in value.split(",") if item.strip()]
        return value


# What pydantic-settings reads as "no value" on a command line and in its help.
NONE_WORD = "None"


class ServiceConfig(CommonConfig):
    """What every service can be told."""

    metrics_host: str = Field("127.0.0.1", description="Address of the Prometheus endpoint (the gateway serves /metrics on its own port).")
    metrics_port: int = Field(0, ge=0, le=65535, description="Port of the Prometheus endpoint. 0: none.")
    instance: str = Field("", description="Name of this process in logs, traces and metrics. Empty: made from service and pid.")


def parse(config: type[ConfigT], args: Sequence[str], *, prog: str) -> ConfigT:
    """Reads `args` and the environment into `config`. Prints help or the error and raises SystemExit as argparse does."""
    patched = type(config.__name__, (config,), {"model_config": SettingsConfigDict(cli_prog_name=prog), "__doc__": config.__doc__})
    try:
        return CliApp.run(patched, cli_args=list(args))
    except ValidationError as error:
        for problem in error.errors():
            flag = "--" + ".".join(str(part) for part in problem["loc"]).replace("_", "-")
            print(f"{prog}: error: {flag}: {problem['msg']}", file=sys.stderr)
        raise SystemExit(2) from None


def to_args(config: CommonConfig, fields: Sequence[str]) -> list[str]:
    """The flags that make `parse` give the named fields the values they have in `config`; fields left at their default are left out.

    Raises TokenloomError (INVALID_REQUEST) for an item of a list with a comma in it, and for the text NONE_WORD.
    """
    args: list[str] = []
    for name in fields:
        value = getattr(config, name)
        if name not in config.model_fields_set or value is None:
            continue
        flag = name.replace("_", "-")
        args.append(f"--{flag}={to_text(value, flag)}" if not isinstance(value, bool) else f"--{flag}" if value else f"--no-{flag}")
    return args


def to_text(value: Any, flag: str) -> str:
    """A value as it is written behind `--flag=` or in the environment. Raises as to_args."""
    if isinstance(value, list) and any("," in item for item in value):
        raise TokenloomError(ErrorCode.INVALID_REQUEST, f"--{flag}: an item must not contain a comma", param=flag)
    text = ",".join(value) if isinstance(value, list) else str(value) if isinstance(value, str | Path) else json.dumps(value)
    if text == NONE_WORD:
        raise TokenloomError(ErrorCode.INVALID_REQUEST, f"--{flag}: {NONE_WORD} stands for no value", param=flag)
    return text
