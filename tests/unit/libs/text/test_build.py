"""Tables built from tokenizers agree with their decode, and a table that does not is told apart."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from tokenizers import Tokenizer

from libs.errors import ErrorCode, TokenloomError
from libs.models.directory import ModelDirectory
from libs.text.build import agrees, build_text_table, byte_level_alphabet, byte_level_bytes
from libs.text.decoding import decode_text
from libs.text.table import TextRule, TokenClass
from tests.support.tiny_llama import tiny_tokenizer_json


def added(token_id: int, content: str, *, special: bool) -> dict[str, object]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token_id, "content": content, "special": special, **flags}


def sentencepiece_json(*, strip: bool) -> dict[str, object]:
    """A Llama-2-style tokenizer: 0-2 special, 3-258 bytes, then pieces, an added token, and a gap before the last id."""
    pieces = ["▁", "▁a", "b", "▁▁", "é"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    decoders = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if strip:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "version": "1.0",
        "added_tokens": [
            *(added(i, tokens[i], special=True) for i in range(3)),
            added(len(tokens), " two words ", special=False),
            added(len(tokens) + 3, "<|late|>", special=True),
        ],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "byte_fallback": True,
            "vocab": {token: index for index, token in enumerate(tokens)} | {" two words ": len(tokens), "<|late|>": len(tokens) + 3},
            "merges": [],
        },
    }


def tokenizer(content: dict[str, object]) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(content))


def test_the_alphabet_spells_every_byte_once():
    assert sorted(byte_level_alphabet().values()) == list(range(256))
    assert byte_level_bytes("Ġtheé") == b" the\xe9"


def test_a_token_outside_the_alphabet_stands_for_its_own_text():
    assert byte_level_bytes("a b") == b"a b"
    assert byte_level_bytes("日") == "日".encode()


def test_the_real_models_table_is_verified(model_dir):
    model = ModelDirectory(model_dir)
    table = build_text_table(Tokenizer.from_file(str(model.tokenizer_file)), model.tokenizer_fingerprint)
    assert table.verified
    assert (table.vocab_size, table.rule, table.strip_first_space) == (49152, TextRule.BYTE_LEVEL, False)
    assert [table.token_class(i) for i in (1, 2, 33)] == [TokenClass.SPECIAL, TokenClass.SPECIAL, TokenClass.TEXT]
    assert table.token_bytes(2) == b"<|im_end|>"


def test_a_byte_level_tokenizer_gives_a_verified_table():
    table = build_text_table(tokenizer(tiny_tokenizer_json()), "f")
    assert table.verified
    assert table.token_bytes(3 + 0x80) == b"\x80"


@pytest.mark.parametrize("strip", [True, False])
def test_a_sentencepiece_style_tokenizer_gives_a_verified_table(strip):
    reference = tokenizer(sentencepiece_json(strip=strip))
    table = build_text_table(reference, "f")
    assert table.verified
    assert (table.rule, table.strip_first_space) == (TextRule.BYTE_FALLBACK, strip)
    assert table.token_class(3) is TokenClass.BYTE
    assert table.token_bytes(3 + 0xE9) == b"\xe9"
    assert decode_text(table, [260, 261]) == ("ab" if strip else " ab")


def test_added_tokens_and_gaps_have_classes_of_their_own():
    table = build_text_table(tokenizer(sentencepiece_json(strip=True)), "f")
    added_id = 3 + 256 + 5
    assert table.token_class(added_id) is TokenClass.ADDED
    assert table.token_class(added_id + 1) is TokenClass.UNUSED
    assert table.token_class(added_id + 3) is TokenClass.SPECIAL
    assert decode_text(table, [added_id, added_id + 1, added_id + 3]) == "two words "


def test_a_table_that_spells_one_token_wrongly_is_not_verified():
    reference = tokenizer(tiny_tokenizer_json())
    table = build_text_table(reference, "f")
    tokens = list(table.tokens)
    tokens[100] = b"wrong"
    assert not agrees(replace(table, tokens=tuple(tokens)), reference)


def test_a_table_with_the_wrong_rule_for_the_first_space_is_not_verified():
    reference = tokenizer(sentencepiece_json(strip=True))
    assert not agrees(replace(build_text_table(reference, "f"), strip_first_space=False), reference)


@pytest.mark.parametrize("decoder", [None, {"type": "WordPiece", "prefix": "##", "cleanup": True}])
def test_an_unknown_decoder_is_refused_by_name(decoder):
    with pytest.raises(TokenloomError, match="none" if decoder is None else "WordPiece") as caught:
        build_text_table(tokenizer(tiny_tokenizer_json() | {"decoder": decoder}), "f")
    assert caught.value.code is ErrorCode.UNSUPPORTED
