"""Builds the C++ kernels with the compiler alone, once, into the model cache: `python -m services.worker.kernels.cpu.build`.

The entry's name is a hash of the sources, the compiler's version and the flags, so that a change of any of them builds anew and nothing
stale is ever loaded. Building takes about five seconds.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from libs.models.cache import default_cache_dir, ensure_entry

LIBRARY = "libtokenloom_cpu.so"
_SOURCES = Path(__file__).parent
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-pthread", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-psabi")
_VARIANTS = {
    "x86_64": {
        "avx512": ("-mavx512f", "-mavx512vl", "-mavx512dq", "-mavx512bw", "-mfma", "-mprefer-vector-width=512"),
        "avx2": ("-mavx2", "-mfma"),
    }
}


class BuildError(Exception):
    """There is no compiler, or it refused the sources."""


def find_compiler() -> str:
    """The C++ compiler: $CXX, else g++, else c++. Raises BuildError when there is none."""
    wanted = os.environ.get("CXX")
    for name in (wanted,) if wanted else ("g++", "c++"):
        path = shutil.which(name)
        if path is not None:
            return path
    raise BuildError(f"no C++ compiler: {wanted or 'g++ and c++'} not found")


def ensure_library(cache: Path | None = None) -> Path:
    """The shared library, built if it is not in the cache (default: the model cache). Raises BuildError."""
    compiler = find_compiler()
    variants = _VARIANTS.get(platform.machine(), {})
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    digest = hashlib.sha256(repr((version, _FLAGS, variants)).encode())
    for source in sorted((*_SOURCES.glob("*.cpp"), *_SOURCES.glob("*.h"))):
        digest.update(source.name.encode() + source.read_bytes())
    entry = (cache or default_cache_dir()) / "kernels" / digest.hexdigest()[:24]
    ensure_entry(entry, lambda staging: _build(staging, compiler, variants))
    return entry / LIBRARY


def build_id(library: Path) -> str:
    """Eight digits that name the sources, compiler and flags that `library` was built from: what its numbers depend on."""
    return library.parent.name[:8]


def _build(folder: Path, compiler: str, variants: dict[str, tuple[str, ...]]) -> None:
    units: list[tuple[str, str, tuple[str, ...]]] = [(name, f"{name}.o", ()) for name in ("dispatch", "program", "team")]
    for isa, flags in {**variants, "generic": ()}.items():
        units.append(("variant", f"variant_{isa}.o", (*flags, f"-DTOKENLOOM_ISA={isa}")))
    with ThreadPoolExecutor(len(units)) as pool:
        commands = [[compiler, *_FLAGS, *flags, "-c", str(_SOURCES / f"{name}.cpp"), "-o", str(folder / out)] for name, out, flags in units]
        list(pool.map(_run, commands))
    objects = [str(folder / out) for _, out, _ in units]
    _run([compiler, "-shared", "-pthread", "-o", str(folder / LIBRARY), *objects])
    for path in objects:
        Path(path).unlink()


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{' '.join(command)}\n{done.stderr}")


if __name__ == "__main__":
    try:
        print(f"CPU kernels are built: {ensure_library()}")
    except BuildError as error:
        sys.exit(str(error))
