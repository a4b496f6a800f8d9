"""Flags of the worker service. Imports nothing heavy: `tokenloom serve` reads this class to build its own flags."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from libs.config import ServiceConfig


class WorkerConfig(ServiceConfig):
    """The worker service: weights, KV cache, attention and sampling of one model, behind one gRPC stream."""

    listen: str = Field("127.0.0.1:0", description="gRPC address: unix:/path or host:port (port 0: any free one).")
    model: Path = Field(description="Model directory: config.json, tokenizer files and weights (*.safetensors or one *.gguf).")
    store: str = Field("", description="SQLite file of the mesh's store, where the worker registers once loaded. Empty: it does not.")
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = Field(
        "auto", description="Type of weights, activations and KV cache. auto: float32 on CPUs, where the 16-bit types are slower."
    )
    max_model_len: int | None = Field(
        None,
        ge=1,
        description="Longest sequence (prompt + output) in tokens. None: what the model allows, lowered if the KV cache is smaller.",
    )
    max_num_seqs: int = Field(64, ge=1, le=4096, description="Most sequences in one step.")
    max_num_batched_tokens: int = Field(
        512, ge=1, description="Most tokens computed in one step; a worker takes at least one whole sequence, whatever this says."
    )
    kv_cache_memory_bytes: int | None = Field(
        None, ge=1, description="Size of the KV cache in bytes; wins over --gpu-memory-utilization. None: derived from memory."
    )
    gpu_memory_utilization: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Share of the device's memory (CPUs: the machine's or the container's) for weights and KV cache together. "
        "None: a KV cache of 4 GiB, or a quarter of the memory where that is less.",
    )
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
