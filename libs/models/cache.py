"""The model cache on disk: where it is, and how entries appear in it whole or not at all, however many processes want one at once."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def default_cache_dir() -> Path:
    """$TOKENLOOM_CACHE, else $XDG_CACHE_HOME/tokenloom, else ~/.cache/tokenloom."""
    explicit = os.environ.get("TOKENLOOM_CACHE")
    if explicit:
        return Path(explicit)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tokenloom"


def _any(entry: Path) -> bool:
    return True


def ensure_entry(entry: Path, make: Callable[[Path], None], intact: Callable[[Path], bool] = _any) -> Path:
    """Returns the directory `entry`, made by `make(staging)` if it is not there yet, or made again if it is not `intact`.

    `make` fills an empty directory beside `entry` that is renamed into place when it returns and removed when it raises. A lock file
    lets one process make it while others wait; a process that dies leaves no lock behind, only its staging directory, which the next
    one removes.
    """
    if entry.is_dir() and intact(entry):
        return entry
    entry.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{entry.name}.new-"
    with _locked(entry.with_name(f".{entry.name}.lock")):
        if entry.is_dir() and intact(entry):
            return entry
        for abandoned in entry.parent.glob(f"{prefix}*"):
            shutil.rmtree(abandoned, ignore_errors=True)
        staging = Path(tempfile.mkdtemp(prefix=prefix, dir=entry.parent))
        try:
            make(staging)
            staging.chmod(0o755)
            if entry.is_dir():
                shutil.rmtree(entry)
            staging.rename(entry)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return entry


def link_or_copy(source: Path, target: Path) -> None:
    """A hard link where the file system allows it, else a copy."""
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copyfile(source, target)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
