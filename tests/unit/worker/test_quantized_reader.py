"""Which weights become integers, and from what."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file

from libs.models.directory import ModelDirectory
from libs.models.llama_config import LlamaConfig
from services.worker.ops.quantized import QuantizedWeight, stacked
from services.worker.quantized_reader import QuantizedReader
from services.worker.quantizing import grouped, per_channel
from services.worker.weights import gguf_name, open_source, reader
from tests.unit.worker.test_weights import permuted

LAYER = "model.layers.0."
QUERY, KEY, VALUE = (f"{LAYER}self_attn.{part}_proj.weight" for part in "qkv")
GATE, UP, DOWN = (f"{LAYER}mlp.{part}_proj.weight" for part in ("gate", "up", "down"))


@pytest.fixture
def config(tiny_llama_dir: Path) -> LlamaConfig:
    return ModelDirectory(tiny_llama_dir).config


@pytest.fixture
def floats(tiny_llama_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(tiny_llama_dir / "model.safetensors")


Opened = Callable[..., QuantizedReader]


@pytest.fixture
def opened(tmp_path: Path, config: LlamaConfig, floats: dict[str, torch.Tensor]) -> Opened:
    """A reader of a GGUF of the tiny checkpoint, of which some weights have a type of their own and the rest Q4_1."""

    def of(quantization: str, *, tied: bool = False, **kinds: GGMLQuantizationType) -> QuantizedReader:
        writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        for name, tensor in floats.items():
            part = name.split(".")[-2]
            values = permuted(tensor.numpy(), heads[part]) if part in heads else tensor.numpy()
            kind = kinds.get(part, GGMLQuantizationType.Q4_1 if tensor.dim() == 2 else GGMLQuantizationType.F32)
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(values, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        source = open_source((tmp_path / "m.gguf",), config)
        return QuantizedReader(source, reader(source, torch.float32, 21), quantization, tied_head=tied)  # type: ignore[arg-type]

    return of


def integers(weight: object) -> QuantizedWeight:
    assert isinstance(weight, QuantizedWeight)
    return weight


@pytest.mark.parametrize("name", [QUERY, KEY, VALUE, GATE, UP, DOWN])
def test_int4_takes_a_ggufs_blocks_as_they_are_with_rows_in_the_models_order(opened: Opened, name: str):
    read = opened("int4")
    weight = integers(read(name))
    stored = read._source.tensor(name)
    assert weight.bits == 4
    assert torch.equal(weight.dequantized(), stored)


def test_parts_of_one_product_may_come_from_several_types(opened: Opened):
    """As in GGUFs of Q4_K_M, whose values are Q6_K: what is stored in groups of 4 bits stays so, and the rest is rounded beside it."""
    read = opened("int4", v_proj=GGMLQuantizationType.Q8_0, up_proj=GGMLQuantizationType.F16)
    for name in (QUERY, KEY, GATE, DOWN):
        assert torch.equal(integers(read(name)).dequantized(), read._source.tensor(name)), name
    for name in (VALUE, UP):
        weight, expected = integers(read(name)), grouped(read._source.tensor(name))
        assert torch.equal(weight.codes, expected.codes), name
        assert torch.equal(weight.scales, expected.scales), name
    parts = [integers(read(name)) for name in (QUERY, KEY, VALUE)]
    whole = integers(stacked(list(parts)))
    assert torch.equal(whole.dequantized(), torch.cat([part.dequantized() for part in parts]))


def test_int8_has_one_scale_an_output_whatever_is_stored(opened: Opened):
    read = opened("int8", down_proj=GGMLQuantizationType.Q8_0)
    for name in (QUERY, DOWN):
        weight, expected = integers(read(name)), per_channel(read._source.tensor(name))
        assert weight.bits == 8
        assert torch.equal(weight.codes, expected.codes)


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_norms_and_the_embedding_stay_floats_and_the_head_takes_eight_bits(opened: Opened, form: str):
    read = opened(form)
    for name in ("model.embed_tokens.weight", "model.norm.weight", f"{LAYER}input_layernorm.weight"):
        assert isinstance(read(name), torch.Tensor)
    head = integers(read("lm_head.weight"))
    assert head.bits == 8
    assert torch.equal(head.codes, per_channel(read._source.tensor("lm_head.weight")).codes)
    assert read("model.layers.9.mlp.up_proj.weight") is None


def test_a_tied_head_is_the_embedding_in_integers(opened: Opened):
    read = opened("int8", tied=True)
    expected = per_channel(read._source.tensor("model.embed_tokens.weight"))
    assert torch.equal(integers(read("lm_head.weight")).codes, expected.codes)


def test_safetensors_are_rounded_from_their_floats(tiny_llama_dir: Path, config: LlamaConfig, floats: dict[str, torch.Tensor]):
    source = open_source((tiny_llama_dir / "model.safetensors",), config)
    read = QuantizedReader(source, reader(source, torch.float32, 21), "int4", tied_head=False)
    assert torch.equal(integers(read(UP)).codes, grouped(floats[UP]).codes)


def test_what_cannot_be_rounded_is_named(opened: Opened, floats: dict[str, torch.Tensor]):
    floats[DOWN][3, 5] = np.inf
    read = opened("int4", down_proj=GGMLQuantizationType.F32)
    with pytest.raises(ValueError, match=r"model\.layers\.0\.mlp\.down_proj\.weight: weights that are not finite"):
        read(DOWN)


def test_the_log_says_what_became_of_what(opened: Opened, capsys: pytest.CaptureFixture[str]):
    read = opened("int4", down_proj=GGMLQuantizationType.F16)
    for name in (QUERY, DOWN, "lm_head.weight"):
        read(name)
    read.log()
    output = capsys.readouterr()
    line = output.out + output.err
    assert "weights quantised" in line
    assert "int4 as stored" in line
