"""Which backend a worker gets, and what it is told where it cannot have one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from libs.errors import ErrorCode, TokenloomError
from libs.models.directory import ModelDirectory
from services.worker.constraints.registry import backend_name, load_backend, load_constraints
from tests.support.tiny_llama import make_tiny_llama
from tokenloom.worker.v1 import worker_pb2


@pytest.mark.parametrize(
    ("word", "name"), [("auto", "llguidance"), ("guidance", "llguidance"), ("llguidance", "llguidance"), ("xgrammar", "xgrammar")]
)
def test_a_word_means_a_backend(word: str, name: str):
    assert backend_name(word) == name


def test_a_backend_whose_library_is_not_installed_says_what_to_install(tiny_model: ModelDirectory, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "services.worker.constraints.xgrammar_backend", None)
    with pytest.raises(TokenloomError, match=r"pip install 'tokenloom\[xgrammar\]'"):
        load_backend("xgrammar", tiny_model)


def test_llguidance_needs_no_tokenizers_package(tiny_model: ModelDirectory, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    monkeypatch.delitem(sys.modules, "services.worker.constraints.guidance", raising=False)
    assert load_backend("llguidance", tiny_model).vocab_size == 266


@pytest.fixture
def unreadable(tmp_path: Path) -> Path:
    """A model whose tokenizer.json is of a kind that nobody knows."""
    path = make_tiny_llama(tmp_path / "odd")
    content = json.loads((path / "tokenizer.json").read_text())
    content["model"]["type"] = "Odd"
    (path / "tokenizer.json").write_text(json.dumps(content))
    return path


def test_a_tokenizer_that_cannot_be_read_stops_a_start_only_where_the_backend_was_asked_for(unreadable: Path):
    facts = worker_pb2.WorkerFacts(vocab_size=266, eos_token_ids=[2])
    assert load_constraints("auto", unreadable, facts) is None
    assert not facts.constraint_backend
    with pytest.raises(TokenloomError) as caught:
        load_constraints("llguidance", unreadable, facts)
    assert caught.value.code is ErrorCode.UNSUPPORTED


def test_what_is_loaded_is_told_to_the_scheduler(tiny_model: ModelDirectory):
    facts = worker_pb2.WorkerFacts(vocab_size=266, eos_token_ids=[2, 0])
    loaded = load_constraints("auto", Path(tiny_model.path), facts)
    assert loaded is not None
    assert facts.constraint_backend == "llguidance"
    assert loaded.table.width == 9
