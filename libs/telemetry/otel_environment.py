"""OpenTelemetry's own variables, read once at a service's start: https://opentelemetry.io/docs/specs/otel/configuration/.

What the SDK reads by itself when an exporter is made (headers, certificates, insecure, resource attributes) stays with it. Here is what it
would take wrongly, ignore, or only complain of: a value that cannot be honoured stops the start, and the message names the variable. Of
headers it shows nothing, for they hold keys.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import grpc
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased, Sampler, TraceIdRatioBased

from libs.errors import ErrorCode, TokenloomError

# What the standard says an exporter does that is named without an endpoint.
DEFAULT_ENDPOINT = "http://localhost:4317"
_PREFIX = "OTEL_EXPORTER_OTLP_"
_COMPRESSIONS = {"none": grpc.Compression.NoCompression, "gzip": grpc.Compression.Gzip}
_FILES = ("CERTIFICATE", "CLIENT_KEY", "CLIENT_CERTIFICATE")
_RESOURCE_ATTRIBUTES = "OTEL_RESOURCE_ATTRIBUTES"
_ENDPOINT = re.compile(r"https?://[^\s/]+(/\S*)?|unix:\S+|(?!\S*://)\S+")
_HEADER, _ATTRIBUTE = re.compile(r"\s*[A-Za-z0-9_.-]+\s*=.*"), re.compile(r"\s*[^\s=][^=]*=.*")
_RATIOS: Mapping[str, Callable[[float], Sampler]] = {
    "traceidratio": TraceIdRatioBased,
    "parentbased_traceidratio": lambda ratio: ParentBased(TraceIdRatioBased(ratio)),
}
_SAMPLERS: Mapping[str, Sampler] = {
    "always_on": ALWAYS_ON,
    "always_off": ALWAYS_OFF,
    "parentbased_always_on": ParentBased(ALWAYS_ON),
    "parentbased_always_off": ParentBased(ALWAYS_OFF),
}


@dataclass(frozen=True, slots=True)
class ExportSettings:
    """How spans leave a process.

    `endpoint` is the one that the environment names; None: it names none. `timeout_seconds` bounds one export with its retries. `sampler`
    decides at a trace's beginning; later decisions are the collector's or the built-in store's.
    """

    disabled: bool = False
    endpoint: str | None = None
    timeout_seconds: float = 10.0
    compression: grpc.Compression = grpc.Compression.NoCompression
    sampler: Sampler = _SAMPLERS["parentbased_always_on"]
    queue_size: int = 8192
    batch_size: int = 512
    delay_ms: int = 500


def read_environment(environ: Mapping[str, str] = os.environ) -> ExportSettings:
    """The settings that the OTEL_* variables make. An empty variable counts as unset, as the standard wants.

    Raises TokenloomError (INVALID_REQUEST, or UNSUPPORTED for what other exporters than OTLP/gRPC do); `param` is the variable.
    """
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return ExportSettings(disabled=True)
    defaults = ExportSettings()
    endpoint = _endpoint(environ)
    # The standard's milliseconds, not the seconds that this SDK takes them for.
    timeout_ms = _integer(environ, _signal(environ, "TIMEOUT"), 10_000, lowest=100)
    queue_size = _integer(environ, "OTEL_BSP_MAX_QUEUE_SIZE", defaults.queue_size)
    batch_size = _integer(environ, "OTEL_BSP_MAX_EXPORT_BATCH_SIZE", min(defaults.batch_size, queue_size))
    if batch_size > queue_size:
        raise _invalid("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", f"{batch_size} exceeds the queue of {queue_size} (OTEL_BSP_MAX_QUEUE_SIZE)")
    _check_files(environ)
    _check_pairs(environ, _signal(environ, "HEADERS"), _HEADER)
    _check_pairs(environ, _RESOURCE_ATTRIBUTES, _ATTRIBUTE)
    return ExportSettings(
        endpoint=endpoint,
        timeout_seconds=min(timeout_ms, _integer(environ, "OTEL_BSP_EXPORT_TIMEOUT", 30_000, lowest=100)) / 1000,
        compression=_compression(environ),
        sampler=_sampler(environ),
        queue_size=queue_size,
        batch_size=batch_size,
        delay_ms=_integer(environ, "OTEL_BSP_SCHEDULE_DELAY", defaults.delay_ms),
    )


def _signal(environ: Mapping[str, str], name: str) -> str:
    """The variable of that name that counts: the one for traces wins over the one for all signals."""
    for_traces = f"{_PREFIX}TRACES_{name}"
    return for_traces if environ.get(for_traces) else f"{_PREFIX}{name}"


def _endpoint(environ: Mapping[str, str]) -> str | None:
    wanted = {name.strip() for name in environ.get("OTEL_TRACES_EXPORTER", "").split(",") if name.strip()}
    if unknown := wanted - {"otlp", "none"}:
        raise _unsupported("OTEL_TRACES_EXPORTER", f"{', '.join(sorted(unknown))}: spans are exported over OTLP only (otlp, none)")
    if len(wanted) > 1:
        raise _invalid("OTEL_TRACES_EXPORTER", "none and otlp exclude each other")
    if "none" in wanted:
        return None
    name = _signal(environ, "ENDPOINT")
    endpoint = environ.get(name) or (DEFAULT_ENDPOINT if wanted else None)
    if endpoint and not _ENDPOINT.fullmatch(endpoint):
        raise _invalid(name, f"{endpoint}: must be http://host:port, https://host:port, host:port or unix:/path")
    protocol = _signal(environ, "PROTOCOL")
    if endpoint and environ.get(protocol, "") not in ("", "grpc"):
        raise _unsupported(protocol, f"{environ[protocol]}: spans are exported over OTLP/gRPC only (grpc)")
    return endpoint


def _compression(environ: Mapping[str, str]) -> grpc.Compression:
    name = _signal(environ, "COMPRESSION")
    value = environ.get(name, "").strip().lower() or "none"
    if value not in _COMPRESSIONS:
        raise _unsupported(name, f"{value}: must be none or gzip")
    return _COMPRESSIONS[value]


def _check_files(environ: Mapping[str, str]) -> None:
    for kind in _FILES:
        name = _signal(environ, kind)
        path = environ.get(name)
        if path and not Path(path).is_file():
            raise _invalid(name, f"there is no file {path}")


def _check_pairs(environ: Mapping[str, str], name: str, pair: re.Pattern[str]) -> None:
    items = [item for item in environ.get(name, "").split(",") if item.strip()]
    for number, item in enumerate(items, 1):
        if not pair.fullmatch(item):
            raise _invalid(name, f"item {number} of {len(items)} is no name=value; items are separated by commas")


def _sampler(environ: Mapping[str, str]) -> Sampler:
    name = environ.get("OTEL_TRACES_SAMPLER", "").strip().lower() or "parentbased_always_on"
    argument = environ.get("OTEL_TRACES_SAMPLER_ARG", "").strip()
    if name in _SAMPLERS:
        return _SAMPLERS[name]
    if name not in _RATIOS:
        raise _unsupported("OTEL_TRACES_SAMPLER", f"{name}: must be one of {', '.join([*_SAMPLERS, *_RATIOS])}")
    try:
        return _RATIOS[name](float(argument or "1"))
    except ValueError:
        raise _invalid("OTEL_TRACES_SAMPLER_ARG", f"{argument}: must be a number from 0 to 1") from None


def _integer(environ: Mapping[str, str], name: str, default: int, *, lowest: int = 1) -> int:
    text = environ.get(name, "").strip()
    if not text:
        return default
    try:
        value = int(text)
    except ValueError:
        raise _invalid(name, f"{text}: must be a whole number") from None
    if value < lowest:
        unit = " milliseconds" if lowest > 1 else ""
        raise _invalid(name, f"{text}: must be at least {lowest}{unit}")
    return value


def _invalid(name: str, problem: str) -> TokenloomError:
    return TokenloomError(ErrorCode.INVALID_REQUEST, f"{name}: {problem}", param=name)


def _unsupported(name: str, problem: str) -> TokenloomError:
    return TokenloomError(ErrorCode.UNSUPPORTED, f"{name}: {problem}", param=name)
