"""Where the comparison keeps its environments, weights and unfinished runs."""

from __future__ import annotations

import hashlib
import re
import subprocess
from pathlib import Path

from bench.machine import Machine
from libs.models.cache import default_cache_dir


def root() -> Path:
    """The folder of everything that the comparison may keep between runs."""
    return default_cache_dir() / "peers"


def environment(name: str) -> Path:
    """The virtual environment of a peer."""
    return root() / name


def machine_slug(machine: Machine) -> str:
    """A machine's name as part of a file's: its CPU and the number of its cores."""
    return f"{re.sub(r'[^a-z0-9]+', '-', machine.cpu.lower()).strip('-')}-{machine.cores}-cores"


def run_folder(machine: Machine) -> Path:
    """Where the unfinished results of this tree on this machine lie: two states of a modified tree are two trees."""
    tree = machine.client_commit or "unknown"
    if tree.endswith("+"):
        changes = subprocess.run(["git", "diff", "HEAD"], cwd=Path(__file__).parent, capture_output=True, check=True).stdout
        tree += hashlib.sha256(changes).hexdigest()[:12]
    return root() / "runs" / f"{tree}-{machine_slug(machine)}"


def digest(path: Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
