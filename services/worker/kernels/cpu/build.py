"""Builds the C++ kernels with the compiler alone, once, into the model cache: `python -m services.worker.kernels.cpu.build`.

The entry's name is a hash of the sources and flags and one of the compiler's version, so that a change of any of them builds anew and
nothing stale is ever loaded. A seal beside the library tells one that lost its end (a full disk, a power cut) from a whole one: to load
such a one kills the process. Where there is no compiler, what an earlier one built of the same sources serves. Building takes about
five seconds.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from libs.models.cache import default_cache_dir, ensure_entry

LIBRARY = "libtokenloom_cpu.so"
_SEAL = f"{LIBRARY}.sha256"
SOURCES = Path(__file__).parent
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fPIC", "-pthread", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-psabi")
_AVX512 = ("-mavx512f", "-mavx512vl", "-mavx512dq", "-mavx512bw", "-mfma", "-mprefer-vector-width=512")
_VARIANTS = {
    "x86_64": {
        "avx512vnni": (*_AVX512, "-mavx512vnni"),
        "avx512": _AVX512,
        "avx2": ("-mavx2", "-mfma", "-mf16c"),
    }
}


class BuildError(Exception):
    """There is no compiler, or it refused the sources."""


def find_compiler() -> list[str]:
    """The C++ compiler's command: $CXX (with its arguments), else g++, else c++. Raises BuildError when there is none."""
    wanted = shlex.split(os.environ.get("CXX", ""))
    for name, *arguments in (wanted,) if wanted else (["g++"], ["c++"]):
        path = shutil.which(name)
        if path is not None:
            return [path, *arguments]
    raise BuildError(f"no C++ compiler: {wanted[0] if wanted else 'g++ and c++'} not found")


def ensure_library(cache: Path | None = None) -> Path:
    """The shared library, built if it is not in the cache (default: the model cache). Raises BuildError, and OSError of the cache."""
    folder, sources = (cache or default_cache_dir()) / "kernels", _sources_digest()
    try:
        compiler = find_compiler()
    except BuildError:
        built = [entry for entry in folder.glob(f"{sources}-*") if _intact(entry)]
        if not built:
            raise
        return max(built, key=lambda entry: entry.stat().st_mtime_ns) / LIBRARY
    identity = repr((_run([*compiler, "--version"]), compiler[1:])).encode()
    entry = folder / f"{sources}-{hashlib.sha256(identity).hexdigest()[:12]}"
    return ensure_entry(entry, lambda staging: _build(staging, compiler), _intact) / LIBRARY


def build_id(library: Path) -> str:
    """Eight digits that name the sources, compiler and flags that `library` was built from: what its numbers depend on."""
    return hashlib.sha256(library.parent.name.encode()).hexdigest()[:8]


def _sources_digest() -> str:
    digest = hashlib.sha256(repr((FLAGS, platform.machine(), variants())).encode())
    for source in sorted((*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h"))):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:12]


def variants() -> dict[str, tuple[str, ...]]:
    """Flags of each instruction set that this kind of machine may have."""
    return _VARIANTS.get(platform.machine(), {}) | {"generic": ()}


def _intact(entry: Path) -> bool:
    """Whether the library is what was built."""
    try:
        return (entry / _SEAL).read_text() == hashlib.sha256((entry / LIBRARY).read_bytes()).hexdigest()
    except OSError:
        return False


def _build(folder: Path, compiler: list[str]) -> None:
    names = ("dispatch", "program", "sampler", "team", "tiling")
    units: list[tuple[str, str, tuple[str, ...]]] = [(name, f"{name}.o", ()) for name in names]
    units += [("variant", f"variant_{isa}.o", (*flags, f"-DTOKENLOOM_ISA={isa}")) for isa, flags in variants().items()]
    common = [*compiler, *FLAGS]
    commands = [[*common, *flags, "-c", str(SOURCES / f"{name}.cpp"), "-o", str(folder / out)] for name, out, flags in units]
    with ThreadPoolExecutor(len(units)) as pool:
        list(pool.map(_run, commands))
    objects = [str(folder / out) for _, out, _ in units]
    _run([*compiler, "-shared", "-pthread", "-o", str(folder / LIBRARY), *objects])
    for path in objects:
        Path(path).unlink()
    (folder / _SEAL).write_text(hashlib.sha256((folder / LIBRARY).read_bytes()).hexdigest())


def _run(command: list[str]) -> str:
    """What the command printed. Raises BuildError when it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{shlex.join(command)}\n{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    try:
        print(f"CPU kernels are built: {ensure_library()}")
    except (BuildError, OSError) as error:
        sys.exit(f"the CPU kernels cannot be built: {error}")
