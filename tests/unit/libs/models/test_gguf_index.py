"""The index of a GGUF says what is wrong with a file, before anything reads its data."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from libs.models.gguf_index import read_index
from tests.unit.libs.models.gguf_files import write_gguf


def test_tensors_are_found_where_they_lie(tmp_path: Path):
    values = np.arange(96, dtype=np.float16).reshape(3, 32)
    index = read_index(write_gguf(tmp_path / "m.gguf", tensor_blk__0__ffn_up__weight=values))
    assert index["blk.0.ffn_up.weight"].data.tobytes() == values.tobytes()


def test_a_file_cut_within_its_data_names_the_tensor_and_the_cause(tmp_path: Path):
    path = write_gguf(tmp_path / "m.gguf", tensor_last__weight=np.ones((64, 32), np.float32))
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(ValueError, match=r"last\.weight ends beyond the end of the file, which is cut short"):
        read_index(path)


def test_a_file_cut_within_its_header_says_so(tmp_path: Path):
    path = write_gguf(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match="its header is cut short or damaged"):
        read_index(path)


def test_a_length_beyond_all_files_is_damage(tmp_path: Path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQQ", 3, 1, 1, 2**64 - 1) + bytes(100))
    with pytest.raises(ValueError, match="its header is cut short or damaged"):
        read_index(path)
