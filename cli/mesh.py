"""What a local mesh consists of: for each service its process, addresses, ports and flags, derived from the user's options.

gateway (HTTP on --port) --unix--> scheduler --unix--> worker
                         --unix--> tokenizer           every service --unix--> traces (OTLP)
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from opentelemetry.sdk.resources import OTELResourceDetector

from cli.child import ServiceSpec
from cli.flags import SERVICES, ServeOptions, refuse_disagreements, service_config
from cli.ports import choose
from cli.rundir import RunDirectory
from cli.trace_settings import TraceKeepingSettings
from libs.config import ServiceConfig, to_args, to_text
from libs.models.catalog import DEFAULT_MODEL
from libs.telemetry.otel_environment import read_environment
from services.gateway.config import GatewayConfig

METRICS_HOST = "127.0.0.1"
# What a service gets for its running work at the end if it has no --drain-timeout, and on top for closing streams and exporting spans.
_DRAIN_SECONDS, _STOP_MARGIN_SECONDS = 5.0, 5.0


@dataclass(frozen=True, slots=True)
class Mesh:
    """The plan of a local mesh. `specs` stand in the order in which the services end."""

    specs: tuple[ServiceSpec, ...]
    gateway: GatewayConfig
    metrics_urls: Mapping[str, str]
    run_directory: Path


def served_names(given: Sequence[str], model: str, directory: Path) -> list[str]:
    """What clients may call the model: the names given, or the default model's name, the hub id, or the directory's name."""
    if given:
        return list(given)
    if not model:
        return [DEFAULT_MODEL.name]
    return [directory.name if model == DEFAULT_MODEL.name or Path(model).exists() else model]


def otlp_endpoints(options: ServeOptions, run_directory: RunDirectory) -> list[str]:
    """Where every service sends its spans by its flag: the built-in store, and what the user named.

    The OTEL_* variables reach the services as they are. Raises TokenloomError for one that no service could honour.
    """
    read_environment()
    return list(dict.fromkeys([run_directory.socket("traces"), *options.otlp_endpoint]))


def plan(options: ServeOptions, model: Path, port: int, log_format: str, run_directory: RunDirectory) -> Mesh:
    """The processes that serve `model` on `port`. Raises TokenloomError when a service would refuse its flags."""
    ports: dict[str, int] = {}
    for offset, name in enumerate(("scheduler", "worker", "tokenizer"), 1):
        ports[name] = choose(METRICS_HOST, port + offset, (port, *ports.values()))
    endpoints = otlp_endpoints(options, run_directory)
    names = served_names(getattr(options, "served_model_name", []), options.model, model)
    configs = {
        name: service_config(
            config,
            options,
            **_decided(name, run_directory),
            model=str(model),
            port=port,
            served_model_name=names,
            metrics_host=METRICS_HOST,
            metrics_port=ports.get(name, 0),
            otlp_endpoint=endpoints,
            log_format=log_format,
        )
        for name, config in SERVICES.items()
    }
    refuse_disagreements(configs)
    gateway = configs["gateway"]
    assert isinstance(gateway, GatewayConfig)
    specs = [_spec(name, config) for name, config in configs.items()]
    return Mesh(
        specs=(*specs, _traces(options, log_format, run_directory)),
        gateway=gateway,
        metrics_urls={name: f"http://{METRICS_HOST}:{port}/metrics" for name, port in ports.items()},
        run_directory=run_directory.path,
    )


def _decided(name: str, run_directory: RunDirectory) -> dict[str, object]:
    """Where the service listens and whom it dials; a service that has no such flag does not get it."""
    return {
        "listen": run_directory.socket(name),
        "instance": f"{name}-0",
        "store": str(run_directory.path / "store.db"),
        "scheduler_address": run_directory.socket("scheduler"),
        "tokenizer_address": [run_directory.socket("tokenizer")],
    }


def _spec(name: str, config: ServiceConfig) -> ServiceSpec:
    drain = getattr(config, "drain_delay", 0.0) + getattr(config, "drain_timeout", _DRAIN_SECONDS)
    stop_seconds = drain + _STOP_MARGIN_SECONDS
    flags = to_args(config, [field for field in type(config).model_fields if field not in config.secrets()])
    # -P: a folder called `services` where the user happens to stand must not be imported.
    command = (sys.executable, "-P", "-m", f"services.{name}", *flags)
    return ServiceSpec(name, command, stop_seconds, env={**_secrets(config), **_service_name(name)})


def _secrets(config: ServiceConfig) -> dict[str, str]:
    """What must not show in the process list travels in the environment."""
    return {f"TOKENLOOM_{name.upper()}": to_text(getattr(config, name), name) for name in config.secrets() & config.model_fields_set}


def _service_name(name: str) -> dict[str, str]:
    """One OTEL_SERVICE_NAME for the mesh names four services: the same for all of them would make their spans one service's."""
    given = OTELResourceDetector().detect().attributes.get("service.name")
    return {"OTEL_SERVICE_NAME": f"{given}-{name}"} if given else {}


def _traces(options: ServeOptions, log_format: str, run_directory: RunDirectory) -> ServiceSpec:
    flags = (f"--listen={run_directory.socket('traces')}", f"--database={run_directory.path / 'traces.db'}")
    logs = (f"--log-level={options.log_level}", f"--log-format={log_format}")
    keeping = to_args(options, list(TraceKeepingSettings.model_fields))
    return ServiceSpec("traces", (sys.executable, "-P", "-m", "cli.trace_receiver", *flags, *logs, *keeping), essential=False)
