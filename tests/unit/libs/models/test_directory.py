"""What a model directory says, and how it says that something is wrong."""

from __future__ import annotations

import json

import pytest

from libs.errors import ErrorCode, TokenloomError
from libs.models.directory import GenerationDefaults, ModelDirectory
from libs.models.llama_config import RopeScaling
from tests.support.tiny_llama import CHAT_TEMPLATE, make_tiny_llama


@pytest.fixture
def folder(tmp_path):
    return make_tiny_llama(tmp_path / "tiny")


def rewrite(folder, name, **changes):
    file = folder / name
    content = json.loads(file.read_text()) if file.exists() else {}
    content |= changes
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
    return ModelDirectory(folder)


def test_a_complete_directory_is_read(folder):
    model = ModelDirectory(folder)
    assert model.name == "tiny"
    assert (model.config.hidden_size, model.config.torch_dtype, model.config.rope_theta) == (64, "float32", 10000.0)
    assert model.vocab_size == 272
    assert model.chat_template == CHAT_TEMPLATE
    assert model.eos_token_ids == (2, 0)
    assert [file.name for file in model.weight_files()] == ["model.safetensors"]


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_directory_without_its_main_files_is_refused_by_name(folder, name):
    (folder / name).unlink()
    with pytest.raises(TokenloomError, match=name) as caught:
        ModelDirectory(folder)
    assert caught.value.code is ErrorCode.INVALID_REQUEST


@pytest.mark.parametrize("content", ["{", "[]", "\xff"])
def test_a_broken_file_is_named(folder, content):
    (folder / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(TokenloomError, match=r"config\.json"):
        _ = ModelDirectory(folder).config


def test_the_keys_of_transformers_4_are_read_too(folder):
    scaling = {"type": "linear", "factor": 2}
    model = rewrite(folder, "config.json", rope_parameters=None, rope_theta=5e5, rope_scaling=scaling, dtype=None, torch_dtype="bfloat16")
    assert (model.config.rope_theta, model.config.rope_scaling) == (5e5, RopeScaling("linear", 2.0))
    assert model.config.torch_dtype == "bfloat16"


def test_llama3_scaling_keeps_its_four_parameters(folder):
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    model = rewrite(folder, "config.json", rope_parameters=rope | {"original_max_position_embeddings": 8192})
    assert model.config.rope_scaling == RopeScaling("llama3", 32.0, 1.0, 4.0, 8192)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": []}, "none named"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(folder, changes, named):
    with pytest.raises(TokenloomError, match=named) as caught:
        _ = rewrite(folder, "config.json", **changes).config
    assert caught.value.code is ErrorCode.UNSUPPORTED


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": "many"}, "wrong kind"),
        ({"num_key_value_heads": 3}, "evenly"),
        ({"num_attention_heads": 0}, "wrong kind|evenly"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(folder, changes, named):
    with pytest.raises(TokenloomError, match=named) as caught:
        _ = rewrite(folder, "config.json", **changes, **({"head_dim": None} if "num_attention_heads" in changes else {})).config
    assert caught.value.code is ErrorCode.INVALID_REQUEST


def test_head_sizes_are_derived_where_the_file_leaves_them_out(folder):
    config = rewrite(folder, "config.json", head_dim=None, num_key_value_heads=None).config
    assert (config.head_dim, config.num_key_value_heads) == (16, 4)


def test_the_tokenizers_own_end_token_comes_first(folder):
    rewrite(folder, "generation_config.json", eos_token_id=[0, 1])
    assert rewrite(folder, "tokenizer_config.json", eos_token={"content": "<|im_end|>"}).eos_token_ids == (2, 0, 1)


def test_a_template_may_lie_in_tokenizer_config(folder):
    (folder / "chat_template.jinja").unlink()
    assert ModelDirectory(folder).chat_template is None
    assert rewrite(folder, "tokenizer_config.json", chat_template="one").chat_template == "one"
    several = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert rewrite(folder, "tokenizer_config.json", chat_template=several).chat_template == "d"


def test_generation_defaults_are_those_the_file_sets(folder):
    model = rewrite(folder, "generation_config.json", temperature=0.6, top_p=0.9, top_k=20, max_new_tokens=100, do_sample=False)
    assert model.generation_defaults == GenerationDefaults(temperature=0.6, top_p=0.9, top_k=20, max_new_tokens=100)


def test_sampling_that_is_not_built_is_reported_unless_it_is_neutral(folder):
    model = rewrite(folder, "generation_config.json", repetition_penalty=1.1, num_beams=4)
    assert model.generation_defaults.unbuilt == ("num_beams",)
    assert model.generation_defaults.repetition_penalty == 1.1


def test_sharded_weights_are_those_of_the_index(folder):
    index = {"weight_map": {"a": "model-00002-of-00002.safetensors", "b": "model-00001-of-00002.safetensors"}}
    for number in (1, 2):
        (folder / f"model-0000{number}-of-00002.safetensors").touch()
    model = rewrite(folder, "model.safetensors.index.json", **index)
    assert [file.name[:11] for file in model.weight_files()] == ["model-00001", "model-00002"]
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(TokenloomError, match="model-00002"):
        model.weight_files()


@pytest.mark.parametrize(("ggufs", "named"), [([], "no GGUF"), (["a.gguf", "b.gguf"], "2 GGUF")])
def test_weights_must_be_there_and_unambiguous(folder, ggufs, named):
    (folder / "model.safetensors").unlink()
    for name in ggufs:
        (folder / name).touch()
    with pytest.raises(TokenloomError, match=named):
        ModelDirectory(folder).weight_files()


def test_fingerprints_follow_what_they_stand_for(folder, tmp_path):
    original, same = ModelDirectory(folder), ModelDirectory(make_tiny_llama(tmp_path / "same"))
    other = ModelDirectory(make_tiny_llama(tmp_path / "other", seed=1))
    assert original.model_fingerprint == same.model_fingerprint != other.model_fingerprint
    assert original.tokenizer_fingerprint == same.tokenizer_fingerprint == other.tokenizer_fingerprint
    (tmp_path / "same" / "chat_template.jinja").write_text("another")
    assert ModelDirectory(tmp_path / "same").tokenizer_fingerprint != original.tokenizer_fingerprint


@pytest.mark.parametrize("value", ["x", -1, 2**40, True, [2, "0"]])
def test_an_end_of_sequence_that_is_no_token_id_is_refused_by_name(folder, value):
    model = rewrite(folder, "config.json", eos_token_id=value)
    with pytest.raises(TokenloomError, match="eos_token_id") as caught:
        _ = model.eos_token_ids
    assert caught.value.code is ErrorCode.INVALID_REQUEST


def test_a_model_may_have_a_template_of_its_own_for_tools(tmp_path):
    folder = make_tiny_llama(tmp_path / "tiny")
    own = ModelDirectory(folder)
    assert own.tool_template is None
    several = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    assert rewrite(folder, "tokenizer_config.json", chat_template=several).tool_template is None, "the file is for all chats"
    (folder / "chat_template.jinja").unlink()
    model = ModelDirectory(folder)
    assert (model.chat_template, model.tool_template) == ("d", "t")
    assert rewrite(folder, "tokenizer_config.json", chat_template=several[:1]).tokenizer_fingerprint != model.tokenizer_fingerprint
    assert ModelDirectory(folder, "{{ x }}").tool_template is None


def test_the_operator_s_template_takes_the_place_of_the_model_s_and_is_part_of_the_fingerprint(tiny_llama_dir, tmp_path):
    own = ModelDirectory(tiny_llama_dir)
    file = tmp_path / "mine.jinja"
    file.write_text("a\n{{ messages }}")
    by_file, by_text = ModelDirectory(tiny_llama_dir, str(file)), ModelDirectory(tiny_llama_dir, r"a\n{{ messages }}")
    assert by_file.chat_template == by_text.chat_template == "a\n{{ messages }}"
    assert by_file.tokenizer_fingerprint == by_text.tokenizer_fingerprint != own.tokenizer_fingerprint


@pytest.mark.parametrize("given", ["nowhere.jinja", "x" * 5000])
def test_a_template_that_is_neither_file_nor_template_is_refused_by_name(tiny_llama_dir, given):
    with pytest.raises(TokenloomError, match="chat_template: ") as caught:
        _ = ModelDirectory(tiny_llama_dir, given).chat_template
    assert caught.value.param == "chat_template"
