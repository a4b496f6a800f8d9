"""What loading refuses, lowers and reports."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from bench.perplexity import score
from libs.errors import ErrorCode, TokenloomError
from libs.models.directory import ModelDirectory
from libs.models.llama_config import LlamaConfig
from services.worker import host, numerics
from services.worker.engine import weight_bytes
from services.worker.facts import tokenizer_size
from services.worker.kernels.cpu.build import BuildError
from services.worker.quantizing import REVISION
from tests.support.tiny_llama import make_tiny_llama
from tests.unit.worker.helpers import Driver, load_engine


@pytest.fixture
def copy(tiny_llama_dir: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_llama_dir, tmp_path / "copy")


@pytest.mark.parametrize("options", [{}, {"quantization": "int8"}, {"quantization": "int4"}], ids=str)
def test_a_loaded_model_keeps_no_weights_file_mapped(copy: Path, options: dict[str, str]):
    engine = load_engine(copy, **options)
    assert str(copy) not in Path("/proc/self/maps").read_text()
    assert engine.step


def test_a_missing_weight_is_named(copy: Path):
    make_tiny_llama(copy, attention_bias=True)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"mlp_bias": True}))
    with pytest.raises(TokenloomError, match=r"hold no model\.layers\.0\.mlp\.gate_proj\.bias") as caught:
        load_engine(copy)
    assert caught.value.code is ErrorCode.INVALID_REQUEST


def test_a_weight_of_another_shape_is_named(copy: Path):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"intermediate_size": 96}))
    with pytest.raises(TokenloomError, match=r"gate_proj\.weight has shape \(128, 64\), the configuration asks for \(96, 64\)"):
        load_engine(copy)


def test_max_model_len_is_lowered_to_what_the_cache_holds_unless_it_was_asked_for(tiny_llama_dir: Path):
    engine = load_engine(tiny_llama_dir, kv_cache_memory_bytes=10 * 8192)
    assert (engine.facts.num_blocks, engine.facts.max_model_len) == (10, 160)
    with pytest.raises(TokenloomError, match="--max-model-len asks for 300"):
        load_engine(tiny_llama_dir, kv_cache_memory_bytes=10 * 8192, max_model_len=300)


def test_numerics_name_what_the_numbers_depend_on(tiny_llama_dir: Path):
    native = load_engine(tiny_llama_dir).facts.fingerprints.numerics
    plain = load_engine(tiny_llama_dir, kernels="reference").facts.fingerprints.numerics
    loose = load_engine(tiny_llama_dir, kernels="reference", batch_invariant=False).facts.fingerprints.numerics
    assert native.startswith("cpu-")
    assert native.endswith("/float32/tp1")
    assert plain.startswith("reference/float32/torch-")
    assert len({native, plain, loose}) == 3
    assert load_engine(tiny_llama_dir, batch_invariant=False, threads=1).facts.fingerprints.numerics == native


def test_numerics_name_the_form_of_the_weights(tiny_llama_dir: Path):
    """The files' fingerprint is the same: only numerics keep workers of two forms from going on with each other's requests."""
    loaded = [load_engine(tiny_llama_dir, kernels="reference", quantization=form).facts.fingerprints for form in (None, "int8", "int4")]
    assert len({item.numerics for item in loaded}) == 3
    assert len({item.model for item in loaded}) == 1
    assert f"/float32/int8.{REVISION}/" in loaded[1].numerics


@pytest.mark.parametrize(("form", "close"), [("int8", 0.16), ("int4", 1.3)])
def test_weights_in_integers_give_nearly_the_same_log_probabilities(tiny_llama_dir: Path, form: str, close: float):
    tokens = list(range(3, 60))
    ours, theirs = (
        score(load_engine(tiny_llama_dir, kernels="reference", quantization=item), tokens, len(tokens), 1) for item in (form, None)
    )
    off = np.abs(np.subtract(ours.logprobs, theirs.logprobs)).mean()
    assert 0 < off < close


def test_integers_take_less_of_the_memory_that_weights_and_cache_share():
    config = LlamaConfig(("LlamaForCausalLM",), 64, 2, 4, 2, 16, 128, 272, 1e-5, 1e4, 512, tie_word_embeddings=True)
    products, table = 2 * (64 * 16 * 12 + 3 * 64 * 128), 272 * 64
    assert weight_bytes(config, torch.float32) == 4 * (products + 2 * table)
    assert weight_bytes(config, torch.float32, packed=False) == 4 * (products + table)
    assert weight_bytes(config, torch.float32, "int8") == products + 5 * table
    assert weight_bytes(config, torch.float32, "int4") == products * 5 // 8 + 5 * table
    assert weight_bytes(config, torch.float32, "int4", packed=False) == 4 * (products + 2 * table)


def test_weights_that_cannot_be_integers_are_named(copy: Path):
    weights = load_file(copy / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"] *= 2.0**-30
    save_file(weights, copy / "model.safetensors")
    with pytest.raises(
        TokenloomError, match=r"model\.layers\.1\.mlp\.up_proj\.weight: .*so small.*--quantization int8 takes it$"
    ) as caught:
        load_engine(copy, quantization="int4", kernels="reference")
    assert caught.value.code is ErrorCode.INVALID_REQUEST
    load_engine(copy, quantization="int8")


def test_widths_that_are_no_whole_groups_are_named_with_the_way_out(copy: Path):
    make_tiny_llama(copy, head_dim=10)
    with pytest.raises(TokenloomError, match=r"num_attention_heads \* head_dim is 40, no multiple of 32.*--quantization int8 takes it$"):
        load_engine(copy, quantization="int4", kernels="reference")
    load_engine(copy, quantization="int8", kernels="reference")


def test_a_weight_of_another_width_is_named_before_its_groups_are(copy: Path):
    weights = load_file(copy / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    save_file(weights | {name: weights[name][:, :-1].contiguous()}, copy / "model.safetensors")
    with pytest.raises(TokenloomError, match=r"down_proj\.weight has shape \(64, 127\), the configuration asks for \(64, 128\)"):
        load_engine(copy, quantization="int4")


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.self_attn.q_proj.bias", "model.layers.0.mlp.down_proj.weight"])
def test_a_model_whose_first_logits_are_not_finite_is_refused(copy: Path, name: str):
    make_tiny_llama(copy, attention_bias=True)
    weights = load_file(copy / "model.safetensors")
    weights[name].view(-1)[0] = float("nan")
    save_file(weights, copy / "model.safetensors")
    with pytest.raises(TokenloomError, match=r"first token are not finite: .* hold NaN or infinity, or overflow in float32") as caught:
        load_engine(copy)
    assert caught.value.code is ErrorCode.INVALID_REQUEST


def test_tensors_that_the_configuration_has_no_place_for_are_told_once(copy: Path, capsys: pytest.CaptureFixture[str]):
    load_engine(copy)
    assert "no place for" not in "".join(capsys.readouterr())
    more = {f"model.layers.0.self_attn.{part}_proj.bias": torch.ones(64) for part in "qkv"}
    more |= {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    more |= {f"model.layers.{index}.mlp.up_proj.weight": torch.ones(128, 64) for index in (7, 8, 9)}
    save_file(load_file(copy / "model.safetensors") | more, copy / "model.safetensors")
    for form in (None, "int8"):
        load_engine(copy, quantization=form)
        lines = [line for line in "".join(capsys.readouterr()).splitlines() if "no place for" in line]
        assert len(lines) == 1
        assert "k_proj.bias" in lines[0]
        assert "up_proj.weight" in lines[0]
        assert "inv_freq" not in lines[0]
        assert "6" in lines[0]


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_the_kernels_integers_follow_the_floats_that_they_stand_for(tiny_llama_dir: Path, form: str):
    """Only the activations' rounding lies between them; one thread gives the bits of a team, and the same identity."""
    tokens = list(range(3, 120))
    alone = load_engine(tiny_llama_dir, kernels="cpu", quantization=form, threads=1)
    team = load_engine(tiny_llama_dir, kernels="cpu", quantization=form, threads=2)
    reference = load_engine(tiny_llama_dir, kernels="reference", quantization=form)
    ours, shared, theirs = (score(engine, tokens, 40, 20) for engine in (alone, team, reference))
    assert ours == shared
    off = np.abs(np.subtract(ours.logprobs, theirs.logprobs)).mean()
    assert 0 < off < 0.2
    names = [engine.facts.fingerprints.numerics for engine in (alone, team, reference)]
    assert names[0] == names[1] != names[2]
    assert names[0].startswith("cpu-")
    assert names[0].endswith(f"/float32/{form}.{REVISION}/tp1")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_16_bit_types_run_on_the_reference(tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch, dtype: str):
    monkeypatch.setattr(host, "multiplies_bfloat16", lambda: True)
    engine = load_engine(tiny_llama_dir, dtype=dtype)
    assert engine.facts.kv_dtype == dtype
    assert f"/{dtype}/" in engine.facts.fingerprints.numerics
    prompt = list(range(3, 40))
    close = load_engine(tiny_llama_dir)
    ours, theirs = (Driver(item).generate({0: prompt}, 1)[0] for item in (engine, close))
    assert ours == theirs


def test_bfloat16_without_instructions_for_it_is_refused(tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host, "multiplies_bfloat16", lambda: False)
    with pytest.raises(TokenloomError, match=r"no instructions for it.*--quantization int8") as caught:
        load_engine(tiny_llama_dir, dtype="bfloat16")
    assert caught.value.code is ErrorCode.UNSUPPORTED


def test_kernels_that_are_insisted_on_are_not_replaced(tiny_llama_dir: Path):
    with pytest.raises(ValidationError, match=r"--kernels cpu and --dtype bfloat16: the C\+\+ kernels take float32"):
        load_engine(tiny_llama_dir, kernels="cpu", dtype="bfloat16")


def test_without_a_compiler_the_reference_serves_and_the_log_says_so(
    tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def no_compiler() -> Path:
        raise BuildError("no C++ compiler")

    monkeypatch.setattr(numerics, "ensure_library", no_compiler)
    assert load_engine(tiny_llama_dir).facts.fingerprints.numerics.startswith("reference/")
    plain = "".join(capsys.readouterr())
    assert "no C++ compiler" in plain
    assert "--quantization" not in plain
    load_engine(tiny_llama_dir, quantization="int8")
    assert "--quantization brings neither speed nor memory" in "".join(capsys.readouterr())


def test_a_tied_models_own_head_is_not_even_read(copy: Path):
    """It is not served: one that is broken need not be mended."""
    make_tiny_llama(copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    weights = load_file(copy / "model.safetensors")
    save_file(weights | {"lm_head.weight": torch.zeros(3, dtype=torch.int32)}, copy / "model.safetensors")
    load_engine(copy)


def test_the_thread_count_is_set_and_defaults_to_the_cpus_of_this_process():
    assert numerics.use_threads(1) == torch.get_num_threads() == 1
    assert numerics.use_threads(None) == torch.get_num_threads()


def test_more_threads_than_cpus_are_taken_with_a_warning(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(numerics.host, "usable_cpus", lambda: 1)
    before = torch.get_num_threads()
    assert numerics.use_threads(1) == 1
    assert "more threads than CPUs" not in "".join(capsys.readouterr())
    assert numerics.use_threads(2) == 2
    assert "more threads than CPUs" in "".join(capsys.readouterr())
    torch.set_num_threads(before)


def test_beside_a_team_of_its_own_torch_keeps_one_thread(tiny_llama_dir: Path):
    load_engine(tiny_llama_dir, kernels="cpu", threads=2)
    assert torch.get_num_threads() == 1
    load_engine(tiny_llama_dir, kernels="reference", threads=2)
    assert torch.get_num_threads() == 2


def test_the_tokenizers_size_counts_added_tokens(copy: Path):
    directory = ModelDirectory(copy)
    before = tokenizer_size(directory)
    content = json.loads(directory.tokenizer_file.read_text())
    content["added_tokens"].append({"id": before + 4, "content": "<extra>"})
    directory.tokenizer_file.write_text(json.dumps(content))
    assert tokenizer_size(ModelDirectory(copy)) == before + 5
