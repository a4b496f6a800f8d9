"""Builds the C++ kernels with the compiler alone, once, into the model cache: `python -m services.worker.kernels.cpu.build`.

The entry's name is a hash of the sources, the compiler's version, the flags and the OpenMP runtime it links to, so that a change of any
of them builds anew and nothing stale is ever loaded. Building takes about three seconds.
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

import torch

from libs.models.cache import default_cache_dir, ensure_entry

LIBRARY = "libtokenloom_cpu.so"
_SOURCES = Path(__file__).parent
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-psabi")
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


def openmp_runtime() -> Path | None:
    """The OpenMP runtime that torch brings; None: torch uses the system's."""
    folder = Path(torch.__file__).parent
    for pattern in ("lib/libgomp*.so*", "../torch.libs/libgomp*.so*"):
        for found in sorted(folder.glob(pattern)):
            return found.resolve()
    return None


def ensure_library(cache: Path | None = None) -> Path:
    """The shared library, built if it is not in the cache (default: the model cache). Raises BuildError."""
    compiler, runtime = find_compiler(), openmp_runtime()
    variants = _VARIANTS.get(platform.machine(), {})
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    digest = hashlib.sha256(repr((version, _FLAGS, variants, str(runtime))).encode())
    for source in sorted((*_SOURCES.glob("*.cpp"), *_SOURCES.glob("*.h"))):
        digest.update(source.name.encode() + source.read_bytes())
    entry = (cache or default_cache_dir()) / "kernels" / digest.hexdigest()[:24]
    ensure_entry(entry, lambda staging: _build(staging, compiler, runtime, variants))
    return entry / LIBRARY


def _build(folder: Path, compiler: str, runtime: Path | None, variants: dict[str, tuple[str, ...]]) -> None:
    units: list[tuple[str, str, tuple[str, ...]]] = [("dispatch", "dispatch.o", ())]
    for isa, flags in {**variants, "generic": ()}.items():
        units.append(("variant", f"variant_{isa}.o", (*flags, f"-DTOKENLOOM_ISA={isa}")))
    with ThreadPoolExecutor(len(units)) as pool:
        commands = [[compiler, *_FLAGS, *flags, "-c", str(_SOURCES / f"{name}.cpp"), "-o", str(folder / out)] for name, out, flags in units]
        list(pool.map(_run, commands))
    objects = [str(folder / out) for _, out, _ in units]
    # Without -fopenmp at this point, the library asks for the very runtime that torch has loaded.
    openmp = [str(runtime)] if runtime is not None else ["-fopenmp"]
    _run([compiler, "-shared", "-o", str(folder / LIBRARY), *objects, *openmp])
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
