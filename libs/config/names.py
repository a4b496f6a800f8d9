"""The names of every setting of the mesh, so that a service tells a sibling's setting in a shared environment or file from a typo.

A service's image may not hold its siblings' classes, so the names stand here a second time: tests/unit/cli/test_config_names.py fails when
they are not those of the classes.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Collection, Iterable, Mapping

_COMMON = frozenset({"config", "log_level", "log_format", "otlp_endpoint", "metrics_host", "metrics_port", "instance"})

SERVICE_SETTINGS: Mapping[str, frozenset[str]] = {
    "gateway": _COMMON
    | {"host", "port", "uds", "served_model_name", "api_key", "api_keys_from_store", "store"}
    | {"trust_request_chat_template", "return_tokens_as_token_ids"}
    | {"enable_auto_tool_choice", "tool_call_parser", "reasoning_parser"}
    | {"allowed_origins", "allowed_methods", "allowed_headers", "allow_credentials"}
    | {"max_body_bytes", "max_prompts", "request_timeout", "slow_reader_timeout", "sse_keep_alive", "drain_delay"}
    | {
        "scheduler_address",
        "tokenizer_address",
        "tokenizer_patience",
        "scheduler_patience",
        "resume_timeout",
        "drain_timeout",
        "stats_interval",
    },
    "scheduler": _COMMON
    | {"listen", "worker_address", "tokenizer_address", "shard", "worker_grace", "store", "advertise_address"}
    | {"scheduling_policy", "max_queue", "max_queue_tokens", "max_num_seqs", "max_num_batched_tokens"}
    | {"enable_chunked_prefill", "enable_prefix_caching", "dispatch_margin_ms", "max_lease_steps", "step_timeout"}
    | {"drain_timeout", "stats_interval"},
    "tokenizer": _COMMON
    | {"listen", "model", "chat_template"}
    | {"tokenizer_pool_size", "tokenizer_queue", "tokenizer_timeout", "tokenizer_memory_bytes", "drain_timeout"},
    "worker": _COMMON
    | {"listen", "model", "chat_template", "store", "dtype", "max_model_len", "max_num_seqs", "max_num_batched_tokens"}
    | {"max_logprobs", "quantization"}
    | {"kv_cache_memory_bytes", "gpu_memory_utilization", "threads", "pin_threads", "batch_invariant", "kernels", "advertise_address"}
    | {"logits_processors", "record_steps"}
    | {"structured_outputs_config_backend"}
    | {"constraint_compilers", "constraint_queue", "constraint_timeout", "constraint_memory_bytes"},
}

# Settings of `tokenloom serve` itself.
SERVE_SETTINGS = frozenset({"trace_keep_ratio", "trace_keep_slow"})

# Names that vLLM has given up for others. They work still, with a warning that names the setting's own.
RENAMED: Mapping[str, str] = {"guided_decoding_backend": "structured_outputs_config_backend"}

# vLLM's names for settings that have another name here; flags and keys of a file may use either. A name with a dot is a key of a mapping:
# in a file the mapping may be written out.
ALIASES: Mapping[str, str] = {
    "otlp_traces_endpoint": "otlp_endpoint",
    "shutdown_timeout": "drain_timeout",
    "structured_outputs_config.backend": "structured_outputs_config_backend",
    **RENAMED,
}

# Variables that are read elsewhere than in a settings class: the model cache, the run directories of `tokenloom serve`, the process that
# a service dies with, the instruction set that the C++ kernels are held to, the Jaeger that `tokenloom trace` asks, and the server that
# `tokenloom chat` and `tokenloom complete` ask.
OTHER_VARIABLES = frozenset(
    {
        "TOKENLOOM_JAEGER",
        "TOKENLOOM_URL",
        "TOKENLOOM_CACHE",
        "TOKENLOOM_RUN_DIR",
        "TOKENLOOM_PARENT_PID",
        "TOKENLOOM_CPU_ISA",
    }
)


def owners(name: str) -> list[str]:
    """The services that have a setting of this name."""
    return [service for service, names in {**SERVICE_SETTINGS, "`tokenloom serve`": SERVE_SETTINGS}.items() if name in names]


def warn_renamed(where: str, name: str) -> None:
    """Says on stderr that a setting was given by a name that vLLM has given up; `name` is the one that was used, `where` it stands."""
    setting = RENAMED[name]
    current = next((alias for alias, of in ALIASES.items() if of == setting and alias != name), setting)
    print(f"warning: {where}: {name.replace('_', '-')} is an older name; write {current.replace('_', '-')}", file=sys.stderr)


def all_names() -> frozenset[str]:
    """Every setting of every service and of `tokenloom serve`."""
    return SERVE_SETTINGS.union(*SERVICE_SETTINGS.values())


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that a typo most likely meant."""
    found = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.6)
    return found[0] if found else None


def suggestion(name: str, known: Collection[str]) -> str:
    """`; did you mean X?`, or nothing where no known name is near."""
    meant = nearest(name, known)
    return f"; did you mean {meant}?" if meant else ""


def belongs_to(name: str) -> str:
    """`; it is a setting of the gateway and the worker`, or nothing for a name of nobody."""
    services = owners(name)
    return f"; it is a setting of the {' and the '.join(services)}".replace("the `", "`") if services else ""
