"""The shared weights of a tiny GGUF: the same bits in every file."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.torch import load_file

from bench.peers.weights import prepare
from libs.models.gguf_import import import_gguf
from libs.models.gguf_index import read_index
from libs.models.gguf_metadata import GGUFMetadata
from services.worker.weights import unpermute
from tests.unit.libs.models.gguf_files import BYTE_LEVEL_TOKENS, write_gguf

QUERY = np.random.default_rng(0).standard_normal((32, 32), np.float32)


def model(folder: Path, **tensors: np.ndarray) -> Path:
    folder.mkdir()
    source = write_gguf(folder.with_suffix(".gguf"), tensor_blk__0__attn_q__weight=QUERY, tensor_output_norm__weight=QUERY[0], **tensors)
    import_gguf(source, folder, name="tiny")
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TOKENLOOM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_every_file_holds_the_same_floats_each_in_its_own_order(tmp_path: Path):
    made = prepare(model(tmp_path / "tiny"))
    tensors = load_file(made.directory / "model.safetensors")
    assert np.array_equal(tensors["model.layers.0.self_attn.q_proj.weight"].numpy(), unpermute(QUERY, 4))
    stored = read_index(made.f32)["blk.0.attn_q.weight"]
    assert np.array_equal(stored.data.view(np.float32).reshape(32, 32), QUERY)
    assert made.bytes_float32 == sum(tensor.numel() * 4 for tensor in tensors.values())
    assert (made.endless / "model.safetensors").read_bytes() == (made.directory / "model.safetensors").read_bytes()


def test_matrices_become_blocks_and_vectors_stay_floats_in_the_quantised_file(tmp_path: Path):
    index = read_index(prepare(model(tmp_path / "tiny")).q8_0)
    query = index["blk.0.attn_q.weight"]
    assert query.kind is gguf.GGMLQuantizationType.Q8_0
    assert np.abs(gguf.quants.dequantize(query.data, query.kind) - QUERY).max() <= np.abs(QUERY).max() / 127
    assert index["output_norm.weight"].kind is gguf.GGMLQuantizationType.F32


def test_the_tokenizer_goes_along_and_one_directory_has_no_end_of_text(tmp_path: Path):
    made = prepare(model(tmp_path / "tiny"))
    assert GGUFMetadata(made.f32).get("tokenizer.ggml.tokens", list) == BYTE_LEVEL_TOKENS
    ends = [json.loads((directory / "config.json").read_text())["eos_token_id"] for directory in (made.directory, made.endless)]
    assert ends == [0, -1]


def test_a_file_that_was_spoiled_is_made_again(tmp_path: Path):
    source = model(tmp_path / "tiny")
    made = prepare(source)
    whole = made.f32.read_bytes()
    made.f32.write_bytes(whole[:-1])
    assert prepare(source).f32.read_bytes() == whole


def test_a_weight_without_a_place_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"1 weights of .* have no place"):
        prepare(model(tmp_path / "tiny", tensor_blk__0__attn_gate__weight=QUERY))
