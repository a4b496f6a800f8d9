"""A GGUF becomes a model directory whose tokenizer and config are those that the model was trained with."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from tokenizers import Tokenizer

from libs.errors import ErrorCode, TokenloomError
from libs.models.directory import ModelDirectory
from libs.models.gguf_import import import_gguf
from libs.models.gguf_metadata import GGUFMetadata
from libs.models.llama_config import RopeScaling
from libs.text.build import build_text_table, byte_level_alphabet
from tests.unit.libs.models.gguf_files import PIECES, write_gguf

# SmolLM2's published pre-tokenizer cuts off every digit by itself, then cuts the rest with GPT-2's pattern. The pieces below were
# cut by hand after that rule; the ids follow from the vocabulary and the ranked merges inside the GGUF by TextbookBpe, which shares
# no code with the import or with the tokenizers package. The ids are written out so that a change of either side shows.
CASES = [
    ("Hello world", ["Hello", " world"], [19556, 905]),
    ("\n\n1.", ["\n\n", "1", "."], [1116, 33, 30]),
    ("12345", ["1", "2", "3", "4", "5"], [33, 34, 35, 36, 37]),
    ("a 12b", ["a", " ", "1", "2", "b"], [81, 216, 33, 34, 82]),
    ("  x", [" ", " x"], [216, 1792]),
    ("don't", ["don", "'t"], [12420, 982]),
    ("naïve café", ["naïve", " café"], [3546, 46494, 37366]),
    ("😀", ["😀"], [10813, 242, 218]),
    ("日本", ["日本"], [23274, 115, 40993]),
    (
        "\t\tif x:\n        return 3.14\n",
        ["\t", "\t", "if", " x", ":", "\n       ", " return", " ", "3", ".", "1", "4", "\n"],
        [197, 197, 342, 1792, 42, 448, 1003, 216, 35, 30, 33, 36, 198],
    ),
    ("It's 10% off!", ["It", "'s", " ", "1", "0", "%", " off", "!"], [1589, 506, 216, 33, 32, 21, 767, 17]),
    ("½ ² ٣", ["½", " ", "²", " ", "٣"], [16738, 216, 19133, 216, 164, 113]),
]


class TextbookBpe:
    """Byte-pair encoding as published: while any neighbours have a merge, join the pair of the best rank, leftmost first."""

    def __init__(self, metadata: GGUFMetadata) -> None:
        self.spelling = {byte: character for character, byte in byte_level_alphabet().items()}
        self.ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(metadata.get("tokenizer.ggml.merges", list))}
        self.ids = {token: token_id for token_id, token in enumerate(metadata.get("tokenizer.ggml.tokens", list))}

    def encode(self, piece: str) -> list[int]:
        parts = [self.spelling[byte] for byte in piece.encode()]
        while True:
            ranked = [(self.ranks[pair], place) for place, pair in enumerate(itertools.pairwise(parts)) if pair in self.ranks]
            if not ranked:
                return [self.ids[part] for part in parts]
            _, place = min(ranked)
            parts[place : place + 2] = [parts[place] + parts[place + 1]]


@pytest.fixture(scope="module")
def smollm2(model_dir):
    model = ModelDirectory(model_dir)
    return Tokenizer.from_file(str(model.tokenizer_file)), TextbookBpe(GGUFMetadata(model.weight_files()[0]))


@pytest.mark.parametrize(("text", "pieces", "ids"), CASES)
def test_smollm2_encodes_as_it_was_trained(smollm2, text, pieces, ids):
    tokenizer, bpe = smollm2
    assert "".join(pieces) == text
    assert [token_id for piece in pieces for token_id in bpe.encode(piece)] == ids
    assert tokenizer.encode(text).ids == ids


def test_smollm2_special_tokens_are_one_id_each(smollm2):
    tokenizer, _ = smollm2
    assert tokenizer.encode("<|im_start|>user\nhi<|im_end|>\n").ids == [1, 4093, 198, 6004, 2, 198]
    assert tokenizer.encode("", add_special_tokens=True).ids == []


def test_smollm2_directory_says_what_the_file_says(model_dir):
    model = ModelDirectory(model_dir)
    config = model.config
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (576, 30, 9, 3)
    assert (config.head_dim, config.intermediate_size, config.vocab_size) == (64, 1536, 49152)
    assert (config.rms_norm_eps, config.rope_theta, config.max_position_embeddings) == (1e-5, 100000.0, 8192)
    assert config.tie_word_embeddings
    assert model.eos_token_ids == (2,)
    assert model.special_tokens["bos_token"] == "<|im_start|>"
    assert "You are a helpful AI assistant named SmolLM" in (model.chat_template or "")
    assert model.name == "SmolLM2-135M-Instruct"
    assert [file.suffix for file in model.weight_files()] == [".gguf"]


def imported(tmp_path, **keys) -> ModelDirectory:
    source = write_gguf(tmp_path / "source.gguf", **keys)
    target = tmp_path / "model"
    target.mkdir()
    import_gguf(source, target, name="tiny")
    return ModelDirectory(target)


def encode(model: ModelDirectory, text: str) -> list[str]:
    tokens: list[str] = Tokenizer.from_file(str(model.tokenizer_file)).encode(text).tokens
    return tokens


def test_an_untied_biased_model_is_recognised_by_its_tensors(tmp_path):
    zeros = np.zeros((4,), np.float32)
    keys = {
        "tensor_output__weight": np.zeros((4, 32), np.float32),
        "tensor_blk__0__attn_q__bias": zeros,
        "tensor_blk__0__ffn_up__bias": zeros,
    }
    config = imported(tmp_path, **keys).config
    assert (config.tie_word_embeddings, config.attention_bias, config.mlp_bias) == (False, True, True)


def test_the_weights_lie_beside_the_config_under_the_models_name(tmp_path):
    model = imported(tmp_path)
    assert [file.name for file in model.weight_files()] == ["tiny.gguf"]
    assert model.weight_files()[0].read_bytes() == (tmp_path / "source.gguf").read_bytes()


def test_control_tokens_are_special_and_user_defined_ones_are_not(tmp_path):
    content = json.loads((imported(tmp_path).tokenizer_file).read_text())
    assert [(token["content"], token["special"]) for token in content["added_tokens"]] == [("<|end|>", True), ("<mark>", False)]


def test_the_pre_tokenizer_decides_how_digits_are_cut(tmp_path):
    merges, tokens = ["1 2"], ["<|end|>", *byte_level_alphabet(), "12"]
    types = [3, *[1] * 257]
    keys = {"tokenizer__ggml__merges": merges, "tokenizer__ggml__tokens": tokens, "tokenizer__ggml__token_type": types}
    smollm, gpt2 = tmp_path / "a", tmp_path / "b"
    smollm.mkdir()
    gpt2.mkdir()
    assert encode(imported(smollm, tokenizer__ggml__pre="smollm", **keys), "12") == ["1", "2"]
    assert encode(imported(gpt2, tokenizer__ggml__pre="gpt-2", **keys), "12") == ["12"]


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("llama-bpe", "AB'S 12345!\n\n x", ["AB", "'S", " ", "123", "45", "!\n\n", " x"]),
        ("qwen2", "123", ["1", "2", "3"]),
        ("gpt-2", "a  b\n\nc", ["a", " ", " b", "\n", "\n", "c"]),
        ("default", "a+12345", ["a", "+", "123", "45"]),
        ("starcoder", "x12", ["x", "1", "2"]),
    ],
)
def test_each_known_pre_tokenizer_cuts_as_published(tmp_path, pre, text, pieces):
    tokenizer = Tokenizer.from_file(str(imported(tmp_path, tokenizer__ggml__pre=pre).tokenizer_file))
    cut = [text[start:end] for _, (start, end) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    assert cut == pieces


def test_a_file_older_than_the_key_is_cut_by_the_default(tmp_path):
    tokenizer = Tokenizer.from_file(str(imported(tmp_path, omit=("tokenizer.ggml.pre",)).tokenizer_file))
    assert len(tokenizer.pre_tokenizer.pre_tokenize_str("1234")) == 2


def test_an_unknown_pre_tokenizer_is_refused_with_the_known_ones(tmp_path):
    with pytest.raises(TokenloomError, match=r"'mystery' is not supported; supported: .*smollm") as caught:
        imported(tmp_path, tokenizer__ggml__pre="mystery")
    assert caught.value.code is ErrorCode.UNSUPPORTED


def test_a_begin_token_is_added_where_the_file_asks_for_it(tmp_path):
    keys = {"tokenizer__ggml__bos_token_id": 0, "tokenizer__ggml__add_bos_token": True, "tokenizer__ggml__add_eos_token": True}
    assert encode(imported(tmp_path, **keys), "a") == ["<|end|>", "a", "<|end|>"]


def test_a_sentencepiece_vocabulary_merges_by_score_and_adds_its_begin_token(tmp_path):
    model = imported(tmp_path, sentencepiece=True)
    assert encode(model, "ab a") == ["<s>", "▁ab", "▁a"]
    table = build_text_table(Tokenizer.from_file(str(model.tokenizer_file)), "f")
    assert table.verified
    assert table.strip_first_space
    assert model.config.vocab_size == len(PIECES)


def test_a_sentencepiece_vocabulary_falls_back_to_bytes(tmp_path):
    assert encode(imported(tmp_path, sentencepiece=True), "é") == ["<s>", "▁", "<0xC3>", "<0xA9>"]


def test_without_a_space_prefix_nothing_is_put_before_the_text(tmp_path):
    model = imported(tmp_path, sentencepiece=True, tokenizer__ggml__add_space_prefix=False)
    assert encode(model, "ab") == ["<s>", "ab"]


def test_the_divisors_of_llama_31_become_its_scaling(tmp_path):
    wavelengths = 2 * np.pi * 500000.0 ** (np.arange(0, 8, 2) / 8)
    divisors = [1.0 if w < 2048 else 8.0 if w > 8192 else 1 / ((1 - (8192 / w - 1) / 3) / 8 + (8192 / w - 1) / 3) for w in wavelengths]
    config = imported(tmp_path, tensor_rope_freqs__weight=np.array(divisors, np.float32)).config
    assert config.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)


def test_other_divisors_are_refused(tmp_path):
    with pytest.raises(TokenloomError, match="rope_freqs"):
        imported(tmp_path, tensor_rope_freqs__weight=np.array([1, 2, 3, 4], np.float32))


def test_linear_scaling_is_kept(tmp_path):
    keys = {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 2.0}
    assert imported(tmp_path, **keys).config.rope_scaling == RopeScaling("linear", 2.0)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"architecture": "gemma3"}, "gemma3.*supported: llama"),
        ({"llama__expert_count": 8}, "mixtures of experts"),
        ({"split__count": 3}, "several parts"),
        ({"llama__rope__scaling__type": "yarn"}, "yarn"),
        ({"llama__rope__dimension_count": 4}, "4 of 8 dimensions"),
        ({"tokenizer__ggml__model": "t5"}, "t5.*supported: gpt2, llama"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(tmp_path, keys, named):
    with pytest.raises(TokenloomError, match=named) as caught:
        imported(tmp_path, **keys)
    assert caught.value.code is ErrorCode.UNSUPPORTED


def test_a_missing_key_is_named(tmp_path):
    with pytest.raises(TokenloomError, match=r"llama\.block_count") as caught:
        imported(tmp_path, omit=("llama.block_count",))
    assert caught.value.code is ErrorCode.INVALID_REQUEST


def test_a_file_that_is_no_gguf_is_refused(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"not a gguf at all, but long enough to hold a header")
    with pytest.raises(TokenloomError, match="cannot be read as GGUF"):
        GGUFMetadata(tmp_path / "x.gguf")


def test_a_file_that_is_cut_off_anywhere_is_refused_and_named(tmp_path):
    whole = write_gguf(tmp_path / "whole.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in [*range(0, 400, 7), *range(400, len(whole), len(whole) // 40)]:
        cut.write_bytes(whole[:size])
        target = tmp_path / f"{size}"
        target.mkdir()
        with pytest.raises(TokenloomError, match=r"cut\.gguf cannot be read as GGUF: .*(cut short|empty|magic)") as caught:
            import_gguf(cut, target, name="m")
        assert caught.value.code is ErrorCode.INVALID_REQUEST


def test_text_that_is_no_utf8_is_refused_and_the_key_named(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", general__name="NOTUTF8", tokenizer__chat_template="NOTUTF8")
    path.write_bytes(path.read_bytes().replace(b"NOTUTF8", b"NOTUTF\xff"))
    with pytest.raises(TokenloomError, match=r"tokenizer\.chat_template is not UTF-8"):
        GGUFMetadata(path).get("tokenizer.chat_template", str)
