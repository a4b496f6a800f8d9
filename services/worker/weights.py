"""Weights from the files of a model directory, by their Hugging Face names, in the executor's dtype, or as the integers of a GGUF's blocks.

A GGUF is dequantised with the gguf package and numpy, without transformers. Its converter stores the rows of each query and
key head in another order (the halves of the rotation interleaved); that is undone here, so that models know one layout only.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Set
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import gguf
import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from libs.errors import ErrorCode, TokenloomError
from libs.models.gguf_index import StoredTensor, read_index
from libs.models.llama_config import LlamaConfig
from libs.telemetry.logs import get_logger
from services.worker.ops.quantized import QuantizedWeight
from services.worker.quantizing import from_blocks, has_groups

_log = get_logger(__name__)
_PROGRESS_SECONDS = 2.0
# Weights of a layer by their Hugging Face names, and their names in a GGUF.
GGUF_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# Tensors that files hold and models here compute themselves, or have no use for: a head where it is tied to the embedding (it is asked for
# where it is not), and the frequencies of the rotation.
_NOBODY_NEEDS = re.compile(r"lm_head\.weight|output\.weight|(.*\.)?rotary_emb\.inv_freq|rope_(freqs|factors_long|factors_short)\.weight")
# Unused tensors that the log names.
_NAMED = 5
# A float's: those of 8 bits are quantised.
_LEAST_BYTES = 2
_GGUF_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


class Source(Protocol):
    """Weights of a model directory."""

    @property
    def total_bytes(self) -> int:
        """Size of the files."""
        ...

    def tensor(self, name: str) -> torch.Tensor | None:
        """The weight of a Hugging Face name as stored (GGUF: dequantised to float32); None: there is none. A view of the file, or not."""
        ...

    def unused(self) -> list[str]:
        """Names, as the files have them, of the tensors that nobody asked for, save those that files hold as a rule and nobody needs."""
        ...

    def has_groups(self, name: str) -> bool:
        """Whether the weight is stored in 4 bits, in groups of GROUP inputs."""
        ...

    def groups(self, name: str) -> QuantizedWeight:
        """Such a weight as it is stored. Raises KeyError for any other."""
        ...


def open_source(files: tuple[Path, ...], config: LlamaConfig) -> Source:
    """The source of one GGUF or of safetensors files. Raises TokenloomError(INVALID_REQUEST) when a file cannot be read."""
    try:
        return GgufSource(files[0], config) if files[0].suffix == ".gguf" else SafetensorsSource(files)
    except (OSError, ValueError, KeyError) as error:
        raise TokenloomError(ErrorCode.INVALID_REQUEST, f"cannot read the weights in {files[0].parent}: {error}") from error


class SafetensorsSource:
    """Tensors of one or several safetensors files, read when asked for."""

    def __init__(self, files: tuple[Path, ...]) -> None:
        self._files: dict[Path, Any] = {file: _opened(file) for file in files}
        self._where = {name: file for file, opened in self._files.items() for name in opened.keys()}  # noqa: SIM118 - no mapping
        self._asked: set[str] = set()

    @property
    def total_bytes(self) -> int:
        """See Source."""
        return sum(file.stat().st_size for file in self._files)

    def tensor(self, name: str) -> torch.Tensor | None:
        """See Source. Raises TokenloomError(UNSUPPORTED) for integers and floats of 8 bits, whose scales are tensors of their own."""
        self._asked.add(name)
        file = self._where.get(name)
        if file is None:
            return None
        tensor: torch.Tensor = self._files[file].get_tensor(name)
        if not tensor.is_floating_point() or tensor.dtype.itemsize < _LEAST_BYTES:
            raise TokenloomError(ErrorCode.UNSUPPORTED, f"{name} is stored as {tensor.dtype}: quantised weights are not supported")
        return tensor

    def unused(self) -> list[str]:
        """See Source."""
        return _surprising(self._where.keys() - self._asked)

    def has_groups(self, name: str) -> bool:
        """See Source: safetensors of integers are not read."""
        return False

    def groups(self, name: str) -> QuantizedWeight:
        """See Source."""
        raise KeyError(name)


def _opened(file: Path) -> Any:
    """The file, opened; raises ValueError with its name when it is broken."""
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{file.name} is no complete safetensors file ({error})") from error


class GgufSource:
    """Tensors of a GGUF file, dequantised when asked for."""

    def __init__(self, file: Path, config: LlamaConfig) -> None:
        self._file = file
        self._heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
        self._tensors = read_index(file)
        self._asked: set[str] = set()

    @property
    def total_bytes(self) -> int:
        """See Source."""
        return self._file.stat().st_size

    def tensor(self, name: str) -> torch.Tensor | None:
        """See Source. Raises TokenloomError(UNSUPPORTED) for a quantisation that the gguf package cannot undo."""
        self._asked.add(gguf_name(name))
        stored = self._tensors.get(gguf_name(name))
        if stored is None:
            return None
        try:
            values = gguf.quants.dequantize(stored.data, stored.kind)
        except NotImplementedError as error:
            raise TokenloomError(ErrorCode.UNSUPPORTED, f"{stored.name} is stored as {stored.kind.name}: {error}") from error
        heads = self._permuted_heads(stored)
        if heads is not None:
            values = unpermute(values, heads)
        values = np.ascontiguousarray(values, np.float32)
        return torch.from_numpy(values if values.flags.writeable else values.copy())

    def unused(self) -> list[str]:
        """See Source."""
        return _surprising(self._tensors.keys() - self._asked)

    def has_groups(self, name: str) -> bool:
        """See Source."""
        stored = self._tensors.get(gguf_name(name))
        return stored is not None and has_groups(stored)

    def groups(self, name: str) -> QuantizedWeight:
        """See Source."""
        self._asked.add(gguf_name(name))
        stored = self._tensors[gguf_name(name)]
        # Rows change places as bytes: codes, scales and minimums alike.
        heads = self._permuted_heads(stored)
        return from_blocks(stored if heads is None else replace(stored, data=unpermute(stored.data, heads)))

    def _permuted_heads(self, stored: StoredTensor) -> int | None:
        return next((count for part, count in self._heads.items() if f".{part}." in stored.name), None)


def _surprising(names: Set[str]) -> list[str]:
    return sorted(name for name in names if not _NOBODY_NEEDS.fullmatch(name))


def warn_of_unused(source: Source) -> None:
    """Logs, once a model is built, what its files hold beside its weights: a bias that the configuration denies changes every answer."""
    names = source.unused()
    if names:
        text = "the files hold tensors that the model's configuration has no place for; answers are computed without them"
        _log.warning(text, tensors=len(names), first=names[:_NAMED])


def gguf_name(name: str) -> str:
    """The GGUF's name of a weight with a Hugging Face name ("model.layers.3.mlp.up_proj.weight" is "blk.3.ffn_up.weight")."""
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        index, _, part = stem.removeprefix("model.layers.").partition(".")
        return f"blk.{index}.{GGUF_LAYER_NAMES.get(part, part)}.{kind}"
    return f"{_GGUF_NAMES.get(stem, stem)}.{kind}"


def unpermute(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key weight (or bias) in Hugging Face's order: halves of a head one after the other, not interleaved."""
    interleaved = values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
    return interleaved.swapaxes(1, 2).reshape(values.shape)


def reader(source: Source, dtype: torch.dtype, expected: int) -> Callable[[str], torch.Tensor | None]:
    """A function from names to tensors of `dtype` that logs its progress every two seconds; `expected`: how many weights there are."""
    started = logged = time.monotonic()
    count = 0

    def read(name: str) -> torch.Tensor | None:
        nonlocal logged, count
        tensor = source.tensor(name)
        count += tensor is not None
        now = time.monotonic()
        if now - logged >= _PROGRESS_SECONDS:
            logged = now
            _log.info("loading weights", done=f"{min(100, 100 * count // expected)}%", tensors=count, seconds=round(now - started, 1))
        return None if tensor is None else tensor.to(dtype)

    return read
