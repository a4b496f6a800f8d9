"""Fixtures that tests of several areas share: the real model, and a tiny random one."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from libs.models.catalog import resolve
from tests.support.redis_server import RedisServer
from tests.support.tiny_llama import make_tiny_llama


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The imported SmolLM2 model directory. Fetched into the model cache once; a test that needs it fails where it cannot be had."""
    return resolve(None, progress=print)


@pytest.fixture(scope="session")
def tiny_llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama checkpoint with a byte-level tokenizer (tests.support.tiny_llama.make_tiny_llama makes variants)."""
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """A Redis that stays up for the whole run; tests keep apart by namespaces. One that is to die is a RedisServer of the test's own."""
    with tempfile.TemporaryDirectory(prefix="redis-") as directory:
        server = RedisServer(Path(directory))
        server.start()
        yield server
        server.kill()
