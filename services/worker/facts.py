"""What a worker tells a scheduler about itself at attach, gathered from the model directory and the configuration."""

from __future__ import annotations

import json

from libs.errors import ErrorCode, TokenloomError
from libs.models.directory import GenerationDefaults, ModelDirectory
from tokenloom.common.v1 import common_pb2


def tokenizer_size(directory: ModelDirectory) -> int:
    """Number of ids the tokenizer knows: its highest id + 1. Raises TokenloomError(INVALID_REQUEST) when tokenizer.json names none."""
    content = json.loads(directory.tokenizer_file.read_text(encoding="utf-8"))
    vocabulary = content.get("model", {}).get("vocab", {})
    ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
    highest = max((*ids, *(entry["id"] for entry in content.get("added_tokens") or ())), default=-1)
    if highest < 0:
        raise TokenloomError(ErrorCode.INVALID_REQUEST, f"{directory.tokenizer_file} names no tokens")
    return highest + 1


def defaults_message(defaults: GenerationDefaults) -> common_pb2.GenerationDefaults:
    """generation_config.json's wishes as they travel."""
    return common_pb2.GenerationDefaults(
        temperature=defaults.temperature,
        top_p=defaults.top_p,
        top_k=defaults.top_k,
        min_p=defaults.min_p,
        max_new_tokens=defaults.max_new_tokens,
        repetition_penalty=defaults.repetition_penalty,
    )


def fingerprints(directory: ModelDirectory, numerics: str) -> common_pb2.Fingerprints:
    """Identity of what this worker computes."""
    return common_pb2.Fingerprints(model=directory.model_fingerprint, tokenizer=directory.tokenizer_fingerprint, numerics=numerics)
