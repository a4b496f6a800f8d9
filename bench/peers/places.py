"""Where the comparison keeps its environments, weights and unfinished runs."""

from __future__ import annotations

import hashlib
from pathlib import Path

from libs.models.cache import default_cache_dir


def root() -> Path:
    """The folder of everything that the comparison may keep between runs."""
    return default_cache_dir() / "peers"


def environment(name: str) -> Path:
    """The virtual environment of a peer."""
    return root() / name


def digest(path: Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
