"""Flags of the worker service. Imports nothing heavy: `tokenloom serve` reads this class to build its own flags."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from libs.config import ServiceConfig, Settings
from libs.config.concerns import AdvertiseSettings, StepSettings, StoreSettings, TemplateSettings
from libs.config.settings import Address, Amount


class ModelSettings(Settings):
    """The model."""

    model: Path = Field(description="Model directory: config.json, tokenizer files and weights (*.safetensors or one *.gguf).")
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = Field(
        "auto", description="Type of weights, activations and KV cache. auto: float32 on CPUs, where the 16-bit types are slower."
    )
    max_model_len: Amount | None = Field(
        None,
        ge=1,
        description="Longest sequence (prompt + output) in tokens. None: what the model allows, lowered if the KV cache is smaller.",
    )


class CacheSettings(Settings):
    """The KV cache."""

    kv_cache_memory_bytes: Amount | None = Field(None, ge=1, description="Size of the KV cache in bytes; None: derived from memory.")
    gpu_memory_utilization: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Share of the device's memory (CPUs: the machine's or the container's) for weights and KV cache together. "
        "None: a KV cache of 4 GiB, or a quarter of the memory where that is less.",
    )

    def contradictions(self) -> Iterator[str]:
        """See Settings."""
        if self.kv_cache_memory_bytes is not None and self.gpu_memory_utilization is not None:
            yield "--kv-cache-memory-bytes and --gpu-memory-utilization both give the KV cache its size; leave one of them out"


class ExecutionSettings(Settings):
    """The forward pass."""

    threads: int | None = Field(
        None, ge=1, description="Threads of the forward pass. None: the CPUs this process may use (a container's quota counts)."
    )
    batch_invariant: bool = Field(
        True,
        description="Compute each row with the same arithmetic whatever else is in the step, so that neighbours change no token. "
        "C++ kernels always do and cost nothing for it; off makes the reference up to a third faster at a single stream.",
    )
    kernels: Literal["auto", "cpu", "reference"] = Field(
        "auto", description="auto: C++ kernels, or the plain torch reference where no C++ compiler is found; cpu: C++ kernels or fail."
    )


class MeshSettings(Settings):
    """Its place in the mesh."""

    listen: Address = Field("127.0.0.1:0", description="gRPC address: unix:/path or host:port (port 0: any free one).")


class WorkerConfig(
    ModelSettings,
    TemplateSettings,
    CacheSettings,
    StepSettings,
    ExecutionSettings,
    MeshSettings,
    StoreSettings,
    AdvertiseSettings,
    ServiceConfig,
):
    """The worker service: weights, KV cache, attention and sampling of one model, behind one gRPC stream."""

    section: ClassVar[str] = "worker"

    def contradictions(self) -> Iterator[str]:
        """See Settings."""
        if self.kernels == "cpu" and self.dtype in ("float16", "bfloat16"):
            yield f"--kernels cpu and --dtype {self.dtype}: the C++ kernels take float32; leave --kernels at auto, or --dtype"
