"""What loading refuses, lowers and reports."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from libs.errors import ErrorCode, TokenloomError
from libs.models.directory import ModelDirectory
from services.worker import numerics
from services.worker.facts import tokenizer_size
from services.worker.kernels.cpu.build import BuildError
from tests.support.tiny_llama import make_tiny_llama
from tests.unit.worker.helpers import Driver, load_engine


@pytest.fixture
def copy(tiny_llama_dir: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_llama_dir, tmp_path / "copy")


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


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_16_bit_types_run_on_the_reference(tiny_llama_dir: Path, dtype: str):
    engine = load_engine(tiny_llama_dir, dtype=dtype)
    assert engine.facts.kv_dtype == dtype
    assert f"/{dtype}/" in engine.facts.fingerprints.numerics
    prompt = list(range(3, 40))
    close = load_engine(tiny_llama_dir)
    ours, theirs = (Driver(item).generate({0: prompt}, 1)[0] for item in (engine, close))
    assert ours == theirs


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
    output = capsys.readouterr()
    assert "no C++ compiler" in output.out + output.err


def test_the_thread_count_is_set_and_defaults_to_the_cpus_of_this_process():
    assert numerics.use_threads(1) == torch.get_num_threads() == 1
    assert numerics.use_threads(None) == torch.get_num_threads()


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
