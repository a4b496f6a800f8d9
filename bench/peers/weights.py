"""The same weights for every server, made once from one GGUF and kept with their checksums.

Whatever the GGUF holds is dequantised to float32 once; a safetensors directory (Tokenloom, vLLM, transformers) and a float32 GGUF
(llama.cpp) then hold the same bits, which is checked while they are made. Q8_0 is made of those floats. Files differ in the order of the
rows of queries and keys (GGUF's converter interleaves the halves of a head), which is a matter of layout alone.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

from bench.peers.places import digest, root
from libs.models.cache import ensure_entry, link_or_copy
from libs.models.directory import ModelDirectory
from libs.models.gguf_index import StoredTensor, read_index
from services.worker.weights import GGUF_LAYER_NAMES, GgufSource

VERSION = 1  # raise it when the same GGUF would come out differently
_MANIFEST = "manifest.json"
_OWN_METADATA = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")


@dataclass(frozen=True, slots=True)
class SharedWeights:
    """Files of one model. `directory` and `endless` are Hugging Face directories, `endless` with an end of text that no token has."""

    directory: Path
    endless: Path
    f32: Path
    q8_0: Path
    packaged: Path
    bytes_float32: int
    checksums: dict[str, str]

    @property
    def model(self) -> str:
        """The name under which every server is asked for it."""
        return self.directory.name


def prepare(model: Path) -> SharedWeights:
    """The shared weights of a model directory with one GGUF in it; made where they are missing or no longer whole.

    Raises ValueError when the directory has no GGUF, when a weight has no known name, or when two files would not hold the same bits.
    """
    files = sorted(model.glob("*.gguf"))
    if len(files) != 1:
        raise ValueError(f"{model} has {len(files)} GGUF files; the comparison starts from one")
    entry = root() / "weights" / f"v{VERSION}-{digest(files[0])[:16]}"
    ensure_entry(entry, lambda staging: _make(staging, model, files[0]), _intact)
    manifest = json.loads((entry / _MANIFEST).read_text())
    return SharedWeights(
        directory=entry / "float32" / model.name,
        endless=entry / "endless" / model.name,
        f32=entry / f"{model.name}-F32.gguf",
        q8_0=entry / f"{model.name}-Q8_0.gguf",
        packaged=files[0],
        bytes_float32=manifest["bytes_float32"],
        checksums=manifest["sha256"] | {files[0].name: entry.name.partition("-")[2]},
    )


def _intact(entry: Path) -> bool:
    try:
        sums = json.loads((entry / _MANIFEST).read_text())["sha256"]
        return all(digest(entry / name) == expected for name, expected in sums.items())
    except (OSError, ValueError, KeyError):
        return False


def _make(staging: Path, model: Path, source: Path) -> None:
    directory = ModelDirectory(model)
    tensors = _float32(GgufSource(source, directory.config), directory.config.num_hidden_layers)
    unknown = len(read_index(source)) - len(tensors)
    if unknown:
        raise ValueError(f"{unknown} weights of {source} have no place in a Llama's safetensors file")
    _write_directories(staging, model, tensors)
    stored = read_index(source)
    _write_gguf(staging / f"{model.name}-F32.gguf", source, stored, gguf.GGMLQuantizationType.F32)
    _write_gguf(staging / f"{model.name}-Q8_0.gguf", source, stored, gguf.GGMLQuantizationType.Q8_0)
    _check_equal(GgufSource(staging / f"{model.name}-F32.gguf", directory.config), tensors)
    names = sorted(path.relative_to(staging).as_posix() for path in staging.rglob("*") if path.is_file())
    total = sum(tensor.numel() * 4 for tensor in tensors.values())
    manifest = {"bytes_float32": total, "source": source.name, "sha256": {name: digest(staging / name) for name in names}}
    (staging / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def _float32(source: GgufSource, layers: int) -> dict[str, torch.Tensor]:
    stems = ["model.embed_tokens", "model.norm", "lm_head"]
    stems += [f"model.layers.{index}.{part}" for index in range(layers) for part in GGUF_LAYER_NAMES]
    names = [f"{stem}.{kind}" for stem in stems for kind in ("weight", "bias")]
    return {name: tensor for name in names if (tensor := source.tensor(name)) is not None}


def _write_directories(staging: Path, model: Path, tensors: dict[str, torch.Tensor]) -> None:
    """The directory for servers that ignore the end of text when asked, and the one for those that cannot."""
    plain, endless = staging / "float32" / model.name, staging / "endless" / model.name
    for target in (plain, endless):
        target.mkdir(parents=True)
        for file in sorted(model.iterdir()):
            if file.suffix in (".json", ".jinja"):
                shutil.copyfile(file, target / file.name)
        _edit(target / "config.json", {"torch_dtype": "float32"})
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    link_or_copy(plain / "model.safetensors", endless / "model.safetensors")
    for name in ("config.json", "generation_config.json"):
        _edit(endless / name, {"eos_token_id": -1})


def _edit(file: Path, changes: dict[str, Any]) -> None:
    content = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(content | changes, indent=1) + "\n")


def _write_gguf(target: Path, source: Path, stored: dict[str, StoredTensor], kind: gguf.GGMLQuantizationType) -> None:
    """The GGUF again with its tensors in float32, or with its matrices as blocks of `kind` (vectors stay float32, as llama.cpp has it)."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, str(reader.fields["general.architecture"].contents()))
    for field in reader.fields.values():
        if not field.name.startswith(_OWN_METADATA):
            inner = field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], inner)
    quantised = kind is not gguf.GGMLQuantizationType.F32
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0 if quantised else gguf.LlamaFileType.ALL_F32)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for name, tensor in stored.items():
        values = np.ascontiguousarray(gguf.quants.dequantize(tensor.data, tensor.kind), np.float32)
        if quantised and values.ndim > 1:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _check_equal(written: GgufSource, tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        again = written.tensor(name)
        if again is None or not torch.equal(again.view(torch.int32), tensor.view(torch.int32)):
            raise ValueError(f"{name} is not the same in the float32 GGUF as in the safetensors file")
