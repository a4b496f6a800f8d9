from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from libs.errors import ErrorCode, TokenloomError
from libs.models.directory import ModelDirectory
from libs.models.gguf_index import read_index
from libs.models.llama_config import LlamaConfig
from services.worker.weights import gguf_name, open_source, unpermute


@pytest.fixture
def config(tiny_llama_dir: Path) -> LlamaConfig:
    return ModelDirectory(tiny_llama_dir).config


def permuted(values: np.ndarray, heads: int) -> np.ndarray:
    """How a GGUF converter reorders the rows of a query or key weight."""
    return values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def write_gguf(path: Path, tensors: dict[str, np.ndarray], kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("tokenizer.ggml.tokens", ["a", "b" * 300, "ü"])
    writer.add_array("tokenizer.ggml.scores", [0.5, 1.5])
    writer.add_bool("flag", True)
    writer.add_uint64("wide", 2**40)
    writer.add_string("general.name", "test")
    for name, values in tensors.items():
        quantised = kind is not gguf.GGMLQuantizationType.F32 and values.ndim > 1
        writer.add_tensor(name, gguf.quants.quantize(values, kind) if quantised else values, raw_dtype=kind if quantised else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_of(directory: Path, path: Path, config: LlamaConfig) -> Path:
    """The tiny checkpoint as a converter would write it."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    tensors = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        count = next((heads[part] for part in heads if part in name), None)
        tensors[gguf_name(name)] = tensor.numpy() if count is None else permuted(tensor.numpy(), count)
    return write_gguf(path, tensors)


def test_a_gguf_gives_the_weights_it_was_made_from(tiny_llama_dir: Path, tmp_path: Path, config: LlamaConfig):
    source = open_source((gguf_of(tiny_llama_dir, tmp_path / "m.gguf", config),), config)
    for name, tensor in load_file(tiny_llama_dir / "model.safetensors").items():
        assert torch.equal(source.tensor(name), tensor), name
    assert source.tensor("model.layers.9.mlp.up_proj.weight") is None
    assert source.total_bytes == (tmp_path / "m.gguf").stat().st_size


def test_safetensors_in_several_files_are_one_source(tmp_path: Path, config: LlamaConfig):
    save_file({"a": torch.ones(2)}, tmp_path / "1.safetensors")
    save_file({"b": torch.zeros(3)}, tmp_path / "2.safetensors")
    source = open_source((tmp_path / "1.safetensors", tmp_path / "2.safetensors"), config)
    assert torch.equal(source.tensor("b"), torch.zeros(3))
    assert source.tensor("c") is None


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0])
def test_quantised_tensors_are_dequantised(tmp_path: Path, config: LlamaConfig, kind: gguf.GGMLQuantizationType):
    values = np.random.default_rng(0).standard_normal((6, 64)).astype(np.float32)
    file = write_gguf(tmp_path / "m.gguf", {"blk.0.ffn_up.weight": values}, kind)
    stored = open_source((file,), config).tensor("model.layers.0.mlp.up_proj.weight")
    assert stored.shape == (6, 64)
    assert float(np.abs(stored.numpy() - values).max()) < (0.35 if kind is gguf.GGMLQuantizationType.Q4_1 else 0.03)


def test_the_index_agrees_with_the_gguf_packages_reader(tmp_path: Path):
    tensors = {f"t{index}": np.arange(32 * (index + 1), dtype=np.float32).reshape(-1, 32) for index in range(5)}
    file = write_gguf(tmp_path / "m.gguf", tensors, gguf.GGMLQuantizationType.Q8_0)
    index = read_index(file)
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    assert index.keys() == theirs.keys()
    for name, stored in index.items():
        assert stored.kind == theirs[name].tensor_type
        assert stored.data.tobytes() == theirs[name].data.tobytes()


def test_a_file_cut_short_anywhere_is_refused(tmp_path: Path, config: LlamaConfig):
    file = write_gguf(tmp_path / "m.gguf", {"t": np.ones((4, 32), np.float32)})
    content = file.read_bytes()
    for length in (1, 10, 30, 200, len(content) - 300, len(content) - 1):
        file.write_bytes(content[:length])
        with pytest.raises(TokenloomError, match="cannot read") as caught:
            open_source((file,), config)
        assert caught.value.code is ErrorCode.INVALID_REQUEST


def test_a_source_tells_what_nobody_asked_for(tmp_path: Path, config: LlamaConfig):
    tensors = {"blk.0.attn_q.bias": np.ones(64, np.float32), "rope_freqs.weight": np.ones(8, np.float32)}
    tensors |= {"output.weight": np.ones((4, 32), np.float32), "output_norm.weight": np.ones(64, np.float32)}
    source = open_source((write_gguf(tmp_path / "m.gguf", tensors),), config)
    assert source.tensor("model.norm.weight") is not None
    assert source.unused() == ["blk.0.attn_q.bias"]


def test_what_is_no_gguf_is_refused(tmp_path: Path, config: LlamaConfig):
    (tmp_path / "m.gguf").write_bytes(b"PK\3\4" + bytes(100))
    with pytest.raises(TokenloomError, match="magic"):
        open_source((tmp_path / "m.gguf",), config)


def test_unpermuting_undoes_the_converters_order():
    values = np.arange(4 * 8 * 3).reshape(32, 3)
    assert (unpermute(permuted(values, 4), 4) == values).all()
    assert not (permuted(values, 4) == values).all()


def test_names_of_both_worlds():
    assert gguf_name("model.layers.12.self_attn.q_proj.weight") == "blk.12.attn_q.weight"
    assert gguf_name("model.layers.0.post_attention_layernorm.weight") == "blk.0.ffn_norm.weight"
    assert gguf_name("model.embed_tokens.weight") == "token_embd.weight"
    assert gguf_name("lm_head.weight") == "output.weight"


@pytest.mark.parametrize("content", [b"", b"\xff" * 100, None])
def test_a_broken_safetensors_file_is_refused_by_its_name(tmp_path: Path, config: LlamaConfig, content: bytes | None):
    whole, broken = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save_file({"x.weight": torch.ones(8)}, whole)
    broken.write_bytes(whole.read_bytes()[:-4] if content is None else content)
    with pytest.raises(TokenloomError, match=r"b\.safetensors") as caught:
        open_source((whole, broken), config)
    assert caught.value.code is ErrorCode.INVALID_REQUEST


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2])
def test_weights_stored_in_eight_bits_are_refused(tmp_path: Path, config: LlamaConfig, dtype: torch.dtype):
    """Their scales are tensors of their own, of many names."""
    file = tmp_path / "a.safetensors"
    save_file({"x.weight": torch.ones(8).to(dtype)}, file)
    with pytest.raises(TokenloomError, match=rf"x\.weight is stored as {dtype}"):
        open_source((file,), config).tensor("x.weight")
