"""Flags of the worker service. Imports nothing heavy: `tokenloom serve` reads this class to build its own flags."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from libs.config import ServiceConfig, Settings
from libs.config.concerns import AdvertiseSettings, StepSettings, StoreSettings, TemplateSettings
from libs.config.settings import Address, Amount

# Forms of weights that vLLM serves and nothing here does.
_UNBUILT_QUANTIZATIONS = re.compile(
    r"aqlm|auto-round|bitblas|bitsandbytes|compressed-tensors|deepspeedfp|experts_int8|fp_quant|gguf|hqq|inc|ipex|marlin|moe_wna16|petit_nvfp4"
    r"|qqq|quark|rtn|torchao|tpu_int8|(\w*_)?(awq|gptq|fp8)(_\w+)?|modelopt(_\w+)?|mxfp[48]"
)


def _known_quantization(value: Any) -> Any:
    """What vLLM takes and nothing here does is refused by name, and no text at all with what stands for nothing."""
    if value == "":
        raise ValueError("an empty text is no form of weights; write int8, int4 or None, which is floats")
    if isinstance(value, str) and _UNBUILT_QUANTIZATIONS.fullmatch(value):
        more = "; a GGUF's blocks need no flag, and int4 computes with 4-bit ones as they are" if value == "gguf" else ""
        raise ValueError(f"{value} is not built here; int8 and int4 are, from any checkpoint while loading{more}")
    return value


class ModelSettings(Settings):
    """The model."""

    model: Path = Field(description="Model directory: config.json, tokenizer files and weights (*.safetensors or one *.gguf).")
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = Field(
        "auto",
        description="Type of weights, activations and KV cache. auto: float32, the C++ kernels' type. The 16-bit types halve the memory "
        "and run in the reference executor, several times slower; bfloat16 only on CPUs with instructions for it.",
    )
    quantization: Annotated[Literal["int8", "int4"] | None, BeforeValidator(_known_quantization)] = Field(
        None,
        description="Compute products in integers, to which weights of any checkpoint are rounded while loading. int8: a scale an output. "
        "int4: groups of 32 inputs, a GGUF's own where it has such, and the head in int8; rounded from floats it costs small models much "
        "of their quality (135M: 17% of perplexity), and int8 is the choice. None: in floats.",
    )
    max_model_len: Amount | None = Field(
        None,
        ge=1,
        description="Longest sequence (prompt + output) in tokens. None: what the model allows, lowered if the KV cache is smaller.",
    )
    max_logprobs: int = Field(
        20, ge=-1, description="Most alternatives that logprobs, top_logprobs and prompt_logprobs may list per token. -1: the vocabulary."
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
    pin_threads: bool = Field(
        True,
        description="Keep each thread of the forward pass to a CPU of its own, where they are as many as the CPUs this process may use; "
        "beside other busy processes steps are then shorter. Several workers of one machine would keep to the same CPUs: turn it off "
        "there, or give each CPUs of its own.",
    )
    batch_invariant: bool = Field(
        True,
        description="Compute each row with the same arithmetic whatever else is in the step, so that neighbours change no token. "
        "C++ kernels always do and cost nothing for it; off makes the reference up to a third faster at a single stream.",
    )
    kernels: Literal["auto", "cpu", "reference"] = Field(
        "auto", description="auto: C++ kernels, or the plain torch reference where no C++ compiler is found; cpu: C++ kernels or fail."
    )


def _known_backend(value: Any) -> Any:
    """What vLLM once took and nothing here does is refused by name."""
    if value in ("outlines", "lm-format-enforcer"):
        raise ValueError(f"{value} is not built here; xgrammar and llguidance (which vLLM calls guidance) are")
    return value


class ConstraintSettings(Settings):
    """Constrained output."""

    structured_outputs_config_backend: Annotated[Literal["auto", "xgrammar", "guidance", "llguidance"], BeforeValidator(_known_backend)] = (
        Field(
            "auto",
            description="What compiles JSON schemas, regular expressions and grammars: llguidance (or guidance), which auto is, or "
            "xgrammar, which is installed apart (tokenloom[xgrammar]).",
        )
    )
    constraint_compilers: int = Field(
        2, ge=1, description="Processes that compile constraints beside the forward pass; of several, one is kept for what compiles fast."
    )
    constraint_queue: int = Field(4096, ge=1, description="Constraints that may wait to be compiled; more are refused with 429.")
    constraint_timeout: float = Field(10.0, gt=0, description="Seconds that compiling one constraint may take.")
    constraint_memory_bytes: Amount = Field(
        1 << 30, ge=1, description="Memory, in bytes, by which compiling one constraint may make its process grow."
    )


_PROCESSOR = re.compile(r"[\w.]+:[\w.]+")


def _check_processor(value: str) -> str:
    if not _PROCESSOR.fullmatch(value):
        raise ValueError(f"{value} is no logits processor: write module:name")
    return value


class ProcessorSettings(Settings):
    """The operator's logits processors."""

    logits_processors: list[Annotated[str, AfterValidator(_check_processor)]] = Field(
        default_factory=list,
        description="Logits processor of the operator, module:name; may be repeated. Installed packages name theirs by entry points.",
    )


class RecordSettings(Settings):
    """What is kept for measuring."""

    record_steps: Path | None = Field(
        None, description="File to which every step's batch and answer are appended, prompts included, for bench.mesh_cost. None: no file."
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
    ConstraintSettings,
    ProcessorSettings,
    RecordSettings,
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
        if self.quantization is not None and self.dtype in ("float16", "bfloat16"):
            yield f"--quantization {self.quantization} and --dtype {self.dtype}: all else is float32; leave --dtype at auto"
