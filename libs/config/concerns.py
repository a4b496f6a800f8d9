"""Settings that more than one service has, each declared once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, Self

from pydantic import Field, model_validator

from libs.config.settings import Amount, Settings


class LogSettings(Settings):
    """Logging."""

    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe message that is logged.")
    log_format: Literal["console", "json"] = Field("json", description="`json`: one object a line; `console`: for people.")


class TraceSettings(Settings):
    """Traces."""

    otlp_endpoint: list[str] = Field(
        default_factory=list,
        description="OTLP/gRPC endpoint that receives this service's spans (http://host:4317), beside the one that OpenTelemetry's own "
        "variables name (OTEL_EXPORTER_OTLP_ENDPOINT ...); may be repeated. Neither: no traces.",
    )


class MetricsSettings(Settings):
    """Metrics and the process's name."""

    metrics_host: str = Field("127.0.0.1", description="Address of the Prometheus endpoint (the gateway serves /metrics on its own port).")
    metrics_port: int = Field(0, ge=0, le=65535, description="Port of the Prometheus endpoint. 0: none.")
    instance: str = Field("", description="Name of this process in logs, traces and metrics. Empty: made from service and pid.")


class FileSettings(Settings):
    """Settings in a file."""

    config: str = Field(
        "",
        description="YAML file of settings: keys as the flags are named, with dashes or underscores, for every service at its top and for "
        "one under `gateway:`, `scheduler:`, `tokenizer:`, `worker:`. Environment and flags win over it. Empty: none.",
    )


class CommonConfig(FileSettings, LogSettings, TraceSettings):
    """What every service and the whole local mesh can be told."""


class ServiceConfig(CommonConfig, MetricsSettings):
    """What every service can be told."""


class StatsSettings(Settings):
    """Statistics in the log."""

    stats_interval: float = Field(10.0, gt=0, description="Seconds between the log lines of statistics.")


class DrainSettings(Settings):
    """The end of the process."""

    drain_timeout: float = Field(30.0, ge=0, description="Seconds for running requests to finish after SIGTERM; then they are cancelled.")


class StepSettings(Settings):
    """A step's size (scheduler and worker)."""

    max_num_seqs: int = Field(64, ge=1, le=4096, description="Most sequences that one step may hold.")
    max_num_batched_tokens: Amount = Field(
        320,
        ge=1,
        description="Most tokens computed in one step, prefill and decode together; a worker takes one whole sequence, whatever this says. "
        "Where it is not given and --max-num-seqs is more, as many as that.",
    )

    @model_validator(mode="after")
    def _room_for_a_token_of_each(self) -> Self:
        """Decodes are never held back: the default has a token for each sequence. It stays a default: nobody gave it."""
        if not self.given("max_num_batched_tokens"):
            self.__dict__["max_num_batched_tokens"] = max(self.max_num_batched_tokens, self.max_num_seqs)
        return self

    def contradictions(self) -> Iterator[str]:
        """See Settings."""
        if self.given("max_num_seqs") and self.given("max_num_batched_tokens") and self.max_num_batched_tokens < self.max_num_seqs:
            yield (
                f"--max-num-batched-tokens {self.max_num_batched_tokens} is less than --max-num-seqs {self.max_num_seqs}: "
                "no step could hold so many sequences, each of which takes a token at least"
            )


class TemplateSettings(Settings):
    """The chat template."""

    chat_template: str = Field(
        "",
        description="Jinja chat template in place of the model's: a file, or the template itself in one line. Tokenizers and workers must "
        "be given the same: it is part of the fingerprint by which they know each other's model. Empty: the model's own.",
    )


class StoreSettings(Settings):
    """The shared store."""

    store: str = Field(
        "",
        description="The mesh's shared store: a SQLite file's path, or redis://host:6379/0 (rediss://, unix:///path; ?prefix=NAME for "
        "several meshes in one Redis). It holds the registry of workers and schedulers, the leader's token, API keys, quotas. Empty: none.",
    )


class AdvertiseSettings(Settings):
    """The address in the registry."""

    advertise_address: str = Field(
        "",
        description="Address that others reach this service by, written to the store: host:port, or a host alone for the port it listens "
        "on. Empty: --listen, or this host's own address where that is every interface.",
    )

    def contradictions(self) -> Iterator[str]:
        """See Settings."""
        if self.advertise_address and not getattr(self, "store", ""):
            yield "--advertise-address says nothing without --store: there is no registry to write it to"
