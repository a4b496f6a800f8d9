"""Configuration of the scheduler service; the field docs are its --help."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from libs.config import ServiceConfig, Settings
from libs.config.concerns import AdvertiseSettings, DrainSettings, StatsSettings, StepSettings, StoreSettings
from libs.config.settings import Address


class MeshSettings(Settings):
    """Its place in the mesh."""

    listen: Address = Field("127.0.0.1:50052", description="gRPC address of the service: `unix:/path` or `host:port`.")
    worker_address: list[Address] = Field(
        default_factory=list, description="Address of a worker group; may be repeated. Beside the registry."
    )
    tokenizer_address: list[Address] = Field(default_factory=list, description="Address of a tokenizer replica; may be repeated.")
    shard: int = Field(0, ge=0, description="Shard of worker groups that this scheduler owns.")
    worker_grace: float = Field(60.0, gt=0, description="Seconds that requests wait for a worker to come back before they fail with 503.")


class QueueSettings(Settings):
    """The waiting queue."""

    scheduling_policy: Literal["fcfs", "priority"] = Field(
        "fcfs", description="Order of the waiting queue: by arrival, or by the requests' priority (lower first), then arrival."
    )
    max_queue: int = Field(1024, ge=1, description="Most requests that may be live (waiting or running); beyond it a submit gets a 429.")
    max_queue_tokens: int = Field(
        0, ge=0, description="Most tokens (prompts plus max_tokens) that live requests may sum to; beyond it a 429. 0: no such bound."
    )


class PlanSettings(Settings):
    """What a step holds."""

    enable_chunked_prefill: bool = Field(True, description="Split long prompts over steps. Off: the budget grows to the context length.")
    enable_prefix_caching: bool = Field(True, description="Reuse KV blocks of prompts that begin alike.")


class PaceSettings(Settings):
    """When steps are sent, and leases."""

    dispatch_margin_ms: float = Field(
        3.0, ge=0, description="Step N+1 is planned and sent when step N is predicted to end within this time. 0: only after N's result."
    )
    max_lease_steps: int = Field(
        8,
        ge=1,
        le=1024,
        description="Most decode steps that a worker is granted in one message; cut short when somebody arrives or leaves. 1: no leases.",
    )
    step_timeout: float = Field(
        120.0,
        gt=0,
        description="Seconds after which a worker whose step has not ended counts as hung; sooner after 100 times what such steps took.",
    )


class SchedulerConfig(
    MeshSettings,
    StoreSettings,
    AdvertiseSettings,
    QueueSettings,
    StepSettings,
    PlanSettings,
    PaceSettings,
    DrainSettings,
    StatsSettings,
    ServiceConfig,
):
    """The scheduler: owner of the waiting queue, the KV block ledger and every ending."""

    section: ClassVar[str] = "scheduler"
