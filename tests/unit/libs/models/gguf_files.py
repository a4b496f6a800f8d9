"""Small GGUF files for tests, written with the gguf package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter, TokenType

from libs.text.build import byte_level_alphabet

BYTE_LEVEL_TOKENS = ["<|end|>", "<mark>", *byte_level_alphabet(), "th", "Ġt", "\u010a\u010a"]
BYTE_LEVEL_TYPES = [TokenType.CONTROL, TokenType.USER_DEFINED, *[TokenType.NORMAL] * 259]
BYTE_LEVEL_MERGES = ["t h", "Ġ t", "\u010a \u010a"]

PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "ab", "▁ab", "▁a"]
PIECE_TYPES = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.BYTE] * 256, *[TokenType.NORMAL] * 6]
PIECE_SCORES = [0.0] * 259 + [-10.0, -11.0, -12.0, -1.0, -2.0, -3.0]


def write_gguf(path: Path, *, architecture: str = "llama", sentencepiece: bool = False, omit: tuple[str, ...] = (), **keys: Any) -> Path:
    """A GGUF of a tiny Llama without layers' weights; `keys` set or replace metadata ("__" stands for "."), `omit` leaves keys out."""
    writer = GGUFWriter(path, architecture)
    prefix = "llama"
    metadata: dict[str, Any] = {
        f"{prefix}.block_count": 2,
        f"{prefix}.context_length": 64,
        f"{prefix}.embedding_length": 32,
        f"{prefix}.feed_forward_length": 48,
        f"{prefix}.attention.head_count": 4,
        f"{prefix}.attention.head_count_kv": 2,
        f"{prefix}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{prefix}.rope.freq_base": 500000.0,
        **(_sentencepiece() if sentencepiece else _byte_level()),
    }
    tensors = {name[7:].replace("__", "."): keys.pop(name) for name in list(keys) if name.startswith("tensor_")}
    metadata |= {name.replace("__", "."): value for name, value in keys.items()}
    for name, value in metadata.items():
        if name not in omit:
            _add(writer, name, value)
    size = len(metadata["tokenizer.ggml.tokens"])
    for name, data in {"token_embd.weight": np.zeros((size, 32), np.float32), **tensors}.items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _byte_level() -> dict[str, Any]:
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": BYTE_LEVEL_TOKENS,
        "tokenizer.ggml.token_type": [int(kind) for kind in BYTE_LEVEL_TYPES],
        "tokenizer.ggml.merges": BYTE_LEVEL_MERGES,
        "tokenizer.ggml.eos_token_id": 0,
    }


def _sentencepiece() -> dict[str, Any]:
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": PIECES,
        "tokenizer.ggml.token_type": [int(kind) for kind in PIECE_TYPES],
        "tokenizer.ggml.scores": PIECE_SCORES,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def _add(writer: GGUFWriter, name: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    else:
        writer.add_array(name, value)
