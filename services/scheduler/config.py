"""Configuration of the scheduler service; the field docs are its --help."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from libs.config import ServiceConfig


class SchedulerConfig(ServiceConfig):
    """The scheduler: owner of the waiting queue, the KV block ledger and every ending."""

    listen: str = Field("127.0.0.1:50052", description="gRPC address of the service: `unix:/path` or `host:port`.")
    store: str = Field("", description="Path of the shared store (SQLite): worker registry, fencing token. Empty: --worker-address only.")
    worker_address: list[str] = Field(default_factory=list, description="Address of a worker group; may be repeated. Beside the registry.")
    tokenizer_address: list[str] = Field(default_factory=list, description="Address of a tokenizer replica; may be repeated.")
    shard: int = Field(0, ge=0, description="Shard of worker groups that this scheduler owns.")
    max_num_seqs: int = Field(64, ge=1, description="Most sequences that one step may hold.")
    max_num_batched_tokens: int = Field(512, ge=1, description="Token budget of a step: prefill and decode tokens together.")
    enable_chunked_prefill: bool = Field(True, description="Split long prompts over steps. Off: the budget grows to the context length.")
    enable_prefix_caching: bool = Field(True, description="Reuse KV blocks of prompts that begin alike.")
    scheduling_policy: Literal["fcfs", "priority"] = Field(
        "fcfs", description="Order of the waiting queue: by arrival, or by the requests' priority (lower first), then arrival."
    )
    max_queue: int = Field(1024, ge=1, description="Most requests that may be live (waiting or running); beyond it a submit gets a 429.")
    max_queue_tokens: int = Field(
        0, ge=0, description="Most tokens (prompts plus max_tokens) that live requests may sum to; beyond it a 429. 0: no such bound."
    )
    dispatch_margin_ms: float = Field(
        3.0, ge=0, description="Step N+1 is planned and sent when step N is predicted to end within this time. 0: only after N's result."
    )
    max_lease_steps: int = Field(
        1,
        ge=1,
        le=1024,
        description="Most decode steps that a worker is granted in one message; cut short when somebody arrives or leaves. 1: no leases.",
    )
    worker_grace: float = Field(60.0, gt=0, description="Seconds that requests wait for a worker to come back before they fail with 503.")
    step_timeout: float = Field(
        120.0,
        gt=0,
        description="Seconds after which a worker whose step has not ended counts as hung; sooner after 100 times what such steps took.",
    )
    stats_interval: float = Field(10.0, gt=0, description="Seconds between the log lines of statistics.")
    drain_timeout: float = Field(30.0, ge=0, description="Seconds that live requests may go on after SIGTERM before they are cancelled.")
