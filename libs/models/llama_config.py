"""The shape of a Llama-family model, from a Hugging Face config.json (the keys of transformers 4 and 5)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from libs.errors import ErrorCode, TokenloomError

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM",)


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the length that the model was first trained on.

    "linear" divides every frequency by `factor`; "llama3" divides those with wavelengths above original / low_freq_factor,
    keeps those below original / high_freq_factor and interpolates between (Llama 3.1; used by "llama3" only).
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """What the worker must know to build the model. Sizes in elements; `max_position_embeddings` in tokens.

    `torch_dtype` is the name of the dtype that the weights were saved in ("bfloat16"), None where the file does not say.
    """

    architectures: tuple[str, ...]
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    torch_dtype: str | None = None

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> LlamaConfig:
        """Reads a config.json. Raises TokenloomError: UNSUPPORTED names what this version cannot serve, INVALID_REQUEST what is broken."""
        _refuse_unsupported(config)
        try:
            heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
            parsed = cls(
                architectures=_architectures(config),
                hidden_size=hidden,
                num_hidden_layers=int(config["num_hidden_layers"]),
                num_attention_heads=heads,
                num_key_value_heads=int(config.get("num_key_value_heads") or heads),
                head_dim=int(config.get("head_dim") or hidden // heads),
                intermediate_size=int(config["intermediate_size"]),
                vocab_size=int(config["vocab_size"]),
                rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
                rope_theta=float(_rope(config).get("rope_theta") or config.get("rope_theta") or 10000.0),
                max_position_embeddings=int(config.get("max_position_embeddings", 2048)),
                rope_scaling=_rope_scaling(_rope(config)),
                tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
                attention_bias=bool(config.get("attention_bias", False)),
                mlp_bias=bool(config.get("mlp_bias", False)),
                torch_dtype=config.get("dtype") or config.get("torch_dtype"),
            )
        except KeyError as error:
            raise TokenloomError(ErrorCode.INVALID_REQUEST, f"config.json has no {error.args[0]}") from error
        except (AttributeError, TypeError, ValueError, ZeroDivisionError) as error:
            raise TokenloomError(ErrorCode.INVALID_REQUEST, f"config.json has a value of the wrong kind: {error}") from error
        _refuse_impossible(parsed)
        if parsed.num_attention_heads % parsed.num_key_value_heads:
            raise TokenloomError(
                ErrorCode.INVALID_REQUEST,
                f"{parsed.num_attention_heads} query heads cannot share {parsed.num_key_value_heads} key-value heads evenly",
            )
        return parsed


_SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
    "rope_theta",
)


def _refuse_impossible(config: LlamaConfig) -> None:
    """Numbers that no model has: they would fail far from here, or compute nothing but NaN."""
    for name in _SIZES:
        if not getattr(config, name) > 0:
            raise TokenloomError(ErrorCode.INVALID_REQUEST, f"config.json has {name} {getattr(config, name)}; it must be positive")
    if config.head_dim % 2:
        raise TokenloomError(ErrorCode.INVALID_REQUEST, f"config.json has head_dim {config.head_dim}; rotation needs an even number")
    scaling = config.rope_scaling
    if scaling is not None and not (scaling.factor > 0 and scaling.low_freq_factor < scaling.high_freq_factor):
        raise TokenloomError(ErrorCode.INVALID_REQUEST, f"config.json has a rope scaling that is none: {scaling}")


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    architectures = _architectures(config)
    if not any(name in SUPPORTED_ARCHITECTURES for name in architectures):
        named = ", ".join(architectures) or "none named"
        raise TokenloomError(
            ErrorCode.UNSUPPORTED,
            f"the model's architecture ({named}) is not supported; supported: {', '.join(SUPPORTED_ARCHITECTURES)}",
        )
    if config.get("hidden_act", "silu") != "silu":
        raise TokenloomError(ErrorCode.UNSUPPORTED, f"the activation {config['hidden_act']!r} is not supported; supported: silu")
    partial = _rope(config).get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if partial != 1:
        raise TokenloomError(ErrorCode.UNSUPPORTED, f"heads that are rotated in part (partial_rotary_factor {partial}) are not supported")
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unnamed") if isinstance(quantization, Mapping) else quantization
        raise TokenloomError(ErrorCode.UNSUPPORTED, f"weights quantised by the method {method!r} are not supported")


def _architectures(config: Mapping[str, Any]) -> tuple[str, ...]:
    listed = config.get("architectures") or ()
    return (listed,) if isinstance(listed, str) else tuple(listed)


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """transformers 5 keeps theta and scaling in `rope_parameters`; 4 keeps the scaling alone in `rope_scaling`."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise TokenloomError(ErrorCode.INVALID_REQUEST, f"config.json's rope parameters are no object: {rope!r}")
    return rope


def _rope_scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", float(rope["factor"]))
    if kind == "llama3":
        return RopeScaling(
            "llama3",
            float(rope["factor"]),
            float(rope["low_freq_factor"]),
            float(rope["high_freq_factor"]),
            int(rope["original_max_position_embeddings"]),
        )
    raise TokenloomError(ErrorCode.UNSUPPORTED, f"rope scaling of type {kind!r} is not supported; supported: default, linear, llama3")
