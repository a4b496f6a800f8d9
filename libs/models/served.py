"""The model that a mesh of containers serves: imported once into a shared volume, whole or not at all, without torch.

    /models/served -> .served/3f2a9c1b7d5e4f60/SmolLM2-135M-Instruct      what the services read; the link is exchanged in one step
    /models/.served/3f2a9c1b7d5e4f60/                                     one import: the model's directory and, beside it,
    /models/.served/3f2a9c1b7d5e4f60/import.json                          where it came from
    /models/.served/cache/                                                downloads under way; what a broken one left is gone on with

The link is relative, so that it holds wherever the volume is mounted. A service that has a model open keeps it while another one
replaces it; one that starts finds either the old one or the new one.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from libs.errors import ErrorCode, TokenloomError
from libs.models import catalog
from libs.models.cache import link_or_copy
from libs.models.catalog import Progress
from libs.models.directory import ModelDirectory
from libs.models.gguf_import import IMPORT_VERSION

_STAMP = "import.json"
# What of a model directory is served: the names that the catalogue fetches from the hub, and GGUF weights.
_SUFFIXES = (".json", ".jinja", ".safetensors", ".gguf")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where an import comes from: the name that was asked for, and for local files a digest of their names, sizes and times of change."""

    model: str
    files: str
    version: int = IMPORT_VERSION


@dataclass(frozen=True, slots=True)
class Imported:
    """An import that is served: `path` is its directory, `new` whether this call made it."""

    path: Path
    origin: Origin
    new: bool


def import_model(model: str, target: Path, models: Path | None, progress: Progress = lambda _text: None) -> Imported:
    """Makes `target` name the model directory of `model`: "" (the default), what lies below `models` by that name, or a hub id.

    Without `models` a path may be given as the name.

    What `target` names already is left as it is if it came from there: a hub id and the default are then not looked up again, so that
    a restart needs no network. Otherwise it is replaced when the new import is whole, and older imports are removed.

    Raises TokenloomError as catalog.resolve does, INVALID_REQUEST also for a name that leads out of `models` and for a `target` that is
    not an import of this function; OSError when the disk fails or is full.
    """
    source = _local(model, models)
    origin = Origin(model or catalog.DEFAULT_MODEL.name, _identity(source) if source else "")
    store = target.with_name(f".{target.name}")
    if target.exists() and not target.is_symlink():
        raise TokenloomError(ErrorCode.INVALID_REQUEST, f"{target} exists and is no import of a model; choose another --to", param="to")
    with _locked(store):
        current = _current(target, origin)
        if current is not None:
            return Imported(current, origin, new=False)
        entry = _make(store, origin, source, progress)
        _point(target, entry)
        _remove_others(store, entry.parent)
    return Imported(entry, origin, new=True)


def _local(model: str, models: Path | None) -> Path | None:
    """The directory or file below `models` that `model` names; None: there is none, and it is a hub id or the default."""
    if not model:
        return None
    found = ((models or Path()) / model).resolve()
    if models is not None and not found.is_relative_to(models.resolve()):
        raise TokenloomError(ErrorCode.INVALID_REQUEST, f"{model!r} leads out of {models}; models are named below it", param="model")
    return found if found.exists() else None


def _identity(source: Path) -> str:
    # As for the cache: gigabytes are not hashed at every start, names, sizes and times of change stand for them.
    files = _files(source) if source.is_dir() else [source]
    listed = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(repr(listed).encode()).hexdigest()


def _files(directory: Path) -> list[Path]:
    return sorted(file for file in directory.iterdir() if file.suffix in _SUFFIXES and file.is_file())


def _current(target: Path, origin: Origin) -> Path | None:
    """The directory that `target` names if it is a whole import from `origin`."""
    path = target.resolve()
    try:
        stamp = json.loads((path.parent / _STAMP).read_text())
        _check(path)
    except (OSError, ValueError, TokenloomError):
        return None
    return path if stamp == asdict(origin) else None


def _check(path: Path) -> None:
    """Raises TokenloomError unless the services can read what is there: one that cannot is not to replace one that can."""
    directory = ModelDirectory(path)
    _ = directory.config, directory.eos_token_ids, directory.weight_files()


def _make(store: Path, origin: Origin, source: Path | None, progress: Progress) -> Path:
    cache = store / "cache"
    for abandoned in store.glob("new-*"):
        shutil.rmtree(abandoned)
    staging = Path(tempfile.mkdtemp(prefix="new-", dir=store))
    try:
        named = origin.model if origin.model != catalog.DEFAULT_MODEL.name else None
        resolved = catalog.resolve(str(source) if source else named, cache, progress)
        name = Path(origin.model).name.removesuffix(".gguf")
        _collect(resolved, staging / name, own=cache.resolve(), progress=progress)
        _check(staging / name)
        (staging / _STAMP).write_text(json.dumps(asdict(origin)))
        staging.chmod(0o755)
        entry = store / hashlib.sha256(f"{origin}{os.urandom(8).hex()}".encode()).hexdigest()[:16]
        staging.rename(entry)
        return entry / name
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _collect(source: Path, target: Path, *, own: Path, progress: Progress) -> None:
    """Brings the model's files together: those of our own cache are linked, others copied, for their owner may change them in place."""
    target.mkdir()
    progress(f"copying {source.name} into the volume")
    for file in _files(source):
        place = target / file.name
        if file.resolve().is_relative_to(own):
            link_or_copy(file, place)
        else:
            shutil.copyfile(file, place)
        place.chmod(0o644)


def _point(target: Path, entry: Path) -> None:
    """Exchanges the link in one step, so that it names a whole model at every moment."""
    link = target.with_name(f".{target.name}.new")
    link.unlink(missing_ok=True)
    link.symlink_to(os.path.relpath(entry, target.parent), target_is_directory=True)
    link.replace(target)


def _remove_others(store: Path, entry: Path) -> None:
    for other in store.iterdir():
        if other.is_dir() and other != entry:
            shutil.rmtree(other, ignore_errors=True)


@contextmanager
def _locked(store: Path) -> Iterator[None]:
    """Of several imports into one volume at once, one works and the others then find it done."""
    store.mkdir(parents=True, exist_ok=True)
    with (store / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
