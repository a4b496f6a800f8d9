"""A tokenizer.json from the vocabulary inside a GGUF file.

A GGUF names its pre-tokenizer in `tokenizer.ggml.pre`; how text is cut before BPE decides the ids, so that an unknown name is refused
rather than guessed. The patterns below are the published pre-tokenizers of those model families.
"""

from __future__ import annotations

from typing import Any

from libs.errors import ErrorCode, TokenloomError
from libs.models.gguf_metadata import GGUFMetadata

_CONTROL, _USER_DEFINED, _UNKNOWN = 3, 4, 2

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|\p{N}{1,3}" + _REST
_QWEN2 = _CONTRACTIONS + r"|\p{N}" + _REST

Json = dict[str, Any]


def _split(pattern: str) -> Json:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _byte_level(use_regex: bool) -> Json:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _sequence(*steps: Json) -> Json:
    return {"type": "Sequence", "pretokenizers": list(steps)}


_DIGITS_THEN_GPT2 = _sequence({"type": "Digits", "individual_digits": True}, _byte_level(True))
_ONLY_GPT2 = _sequence(_byte_level(True))
_LLAMA3_BPE = _sequence(_split(_LLAMA3), _byte_level(False))

_PRE_TOKENIZERS: dict[str, Json] = {
    "smollm": _DIGITS_THEN_GPT2,
    "starcoder": _DIGITS_THEN_GPT2,
    "refact": _DIGITS_THEN_GPT2,
    "gpt-2": _ONLY_GPT2,
    "phi-2": _ONLY_GPT2,
    "olmo": _ONLY_GPT2,
    "llama3": _LLAMA3_BPE,
    "llama-v3": _LLAMA3_BPE,
    "llama-bpe": _LLAMA3_BPE,
    "qwen2": _sequence(_split(_QWEN2), _byte_level(False)),
    "default": _sequence(_split(r"[\p{P}\$\+<=>\^~\|]+"), _split(_GPT2), _split(r"\p{N}+"), _split("[0-9][0-9][0-9]"), _byte_level(False)),
}
# Families whose BPE takes a piece that is a token as it is, before any merge.
_IGNORE_MERGES = ("llama3", "llama-v3", "llama-bpe")


def tokenizer_json(metadata: GGUFMetadata) -> Json:
    """The contents of tokenizer.json. Raises TokenloomError(UNSUPPORTED) for an unknown vocabulary kind or pre-tokenizer."""
    kind = metadata.get("tokenizer.ggml.model", str)
    if kind == "gpt2":
        parts = _byte_level_parts(metadata)
    elif kind == "llama":
        parts = _sentencepiece_parts(metadata)
    else:
        raise metadata.unsupported(f"tokenizers of kind {kind!r} are not supported; supported: gpt2, llama")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(metadata),
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": _post_processor(metadata, default_bos=kind == "llama" or _pre(metadata) in _IGNORE_MERGES),
        **parts,
    }


def token_text(metadata: GGUFMetadata, name: str) -> str | None:
    """The text of the special token that the file names ("bos", "eos", "unknown", "padding"); None: the file names none."""
    token_id = metadata.get(f"tokenizer.ggml.{name}_token_id", int, None)
    if token_id is None:
        return None
    tokens = metadata.get("tokenizer.ggml.tokens", list)
    if not 0 <= token_id < len(tokens):
        raise TokenloomError(ErrorCode.INVALID_REQUEST, f"{metadata.path.name}: {name} token {token_id} is beyond {len(tokens)} tokens")
    return str(tokens[token_id])


def _pre(metadata: GGUFMetadata) -> str:
    # Files older than the key: llama.cpp treats them as "default", too.
    return metadata.get("tokenizer.ggml.pre", str, None) or "default"


def _byte_level_parts(metadata: GGUFMetadata) -> Json:
    pre = _pre(metadata)
    if pre not in _PRE_TOKENIZERS:
        raise metadata.unsupported(
            f"pre-tokenizer {pre!r} is not supported; supported: {', '.join(sorted(_PRE_TOKENIZERS))}",
        )
    merges = [merge.split(" ", 1) for merge in metadata.get("tokenizer.ggml.merges", list)]
    return {
        "pre_tokenizer": _PRE_TOKENIZERS[pre],
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _bpe(metadata, merges, byte_fallback=False, ignore_merges=pre in _IGNORE_MERGES),
    }


def _sentencepiece_parts(metadata: GGUFMetadata) -> Json:
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", bool, True)
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    back = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*([{"type": "Prepend", "prepend": "▁"}] if prefix else []), replace]},
        "decoder": {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        "model": _bpe(metadata, _merges_of_scores(metadata), byte_fallback=True, ignore_merges=False),
    }


def _bpe(metadata: GGUFMetadata, merges: list[list[str]], *, byte_fallback: bool, ignore_merges: bool) -> Json:
    tokens = metadata.get("tokenizer.ggml.tokens", list)
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": token_text(metadata, "unknown") if byte_fallback else None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": byte_fallback,
        "byte_fallback": byte_fallback,
        "ignore_merges": ignore_merges,
        "vocab": {token: token_id for token_id, token in enumerate(tokens)},
        "merges": merges,
    }


def _merges_of_scores(metadata: GGUFMetadata) -> list[list[str]]:
    """SentencePiece keeps a score per piece and no merges: a pair merges if its join is a piece, better scores first.

    Pairs of one piece are ordered by the ids of their halves, as pieces learned earlier have lower ids.
    """
    tokens = metadata.get("tokenizer.ggml.tokens", list)
    scores = metadata.get("tokenizer.ggml.scores", list)
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    ranked: list[tuple[float, int, int, str, str]] = []
    for piece, score in zip(tokens, scores, strict=True):
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in ids and right in ids:
                ranked.append((-score, ids[left], ids[right], left, right))
    ranked.sort(key=lambda entry: entry[:3])
    return [[left, right] for *_, left, right in ranked]


def _added_tokens(metadata: GGUFMetadata) -> list[Json]:
    types = metadata.get("tokenizer.ggml.token_type", list)
    tokens = metadata.get("tokenizer.ggml.tokens", list)
    return [
        {
            "id": token_id,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind != _USER_DEFINED,
        }
        for token_id, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (_CONTROL, _USER_DEFINED, _UNKNOWN)
    ]


def _post_processor(metadata: GGUFMetadata, *, default_bos: bool) -> Json | None:
    bos = token_text(metadata, "bos") if metadata.get("tokenizer.ggml.add_bos_token", bool, default_bos) else None
    eos = token_text(metadata, "eos") if metadata.get("tokenizer.ggml.add_eos_token", bool, False) else None
    if bos is None and eos is None:
        return None
    before = [{"SpecialToken": {"id": bos, "type_id": 0}}] if bos else []
    after = [{"SpecialToken": {"id": eos, "type_id": 0}}] if eos else []
    specials = {}
    for text, name in ((bos, "bos"), (eos, "eos")):
        if text is not None:
            specials[text] = {"id": text, "ids": [metadata.get(f"tokenizer.ggml.{name}_token_id", int)], "tokens": [text]}
    pair = [{"Sequence": {"id": "B", "type_id": 1}}]
    single = [*before, {"Sequence": {"id": "A", "type_id": 0}}, *after]
    return {"type": "TemplateProcessing", "single": single, "pair": [*single, *pair], "special_tokens": specials}
